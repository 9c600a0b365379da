"""Two engines share the experts of a model. An uneven load makes one of them slow, until experts
move.

python examples/expert_parallel.py
"""

import asyncio

import numpy as np

from moeserve import AsyncEngine, SamplingParams

UNEVEN = ["the " * 120] * 16  # a repeated word uses the same few experts
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


async def ask(engine: AsyncEngine, prompts: list[str]) -> list[tuple[int, ...]]:
    async def one(prompt: str) -> tuple[int, ...]:
        tokens: list[int] = []
        async for out in engine.generate(prompt, PARAMS):
            tokens += out.outputs[0].token_ids
        return tuple(tokens)

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


def share_of_ranks(engine: AsyncEngine, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens per expert since the start, [layers, experts], and each rank's share of
    those after `before`, [layers, ranks].
    """
    view = engine.fleet.view.experts
    assert view is not None
    loads = np.frombuffer(view.counts, "<i8").reshape(view.num_layers, -1)
    table = view.placement
    slots = np.frombuffer(table.experts, "<i4").reshape(view.num_layers, -1)
    new = loads - before
    shares = np.zeros((view.num_layers, table.num_ranks))
    for layer, experts in enumerate(slots):
        replicas = np.bincount(experts, minlength=new.shape[1])
        tokens = (new[layer] / np.maximum(replicas, 1))[experts]  # split among replicas
        shares[layer] = tokens.reshape(table.num_ranks, -1).sum(1)
    return loads, shares / np.maximum(shares.sum(1, keepdims=True), 1)


async def main() -> None:
    async with AsyncEngine(
        "demo", dp=2, redundant_experts=4, rebalance="off", enable_prefix_caching=False
    ) as engine:
        first = await ask(engine, UNEVEN)
        await asyncio.sleep(1.5)  # engines report their load once a second
        loads, before = share_of_ranks(engine, np.zeros(1, np.int64))
        decision = await engine.fleet.scaling.rebalance()
        assert decision is not None
        assert not decision.error, decision.error
        second = await ask(engine, UNEVEN)
        await asyncio.sleep(1.5)
        _, after = share_of_ranks(engine, loads)
    print(
        f"experts moved: {decision.moved_bytes / 1e6:.1f} MB in {decision.took_s:.2f} s; "
        "share of the busier rank:"
    )
    for layer, (a, b) in enumerate(zip(before.max(1), after.max(1), strict=True)):
        print(
            f"  layer {layer}: {a:4.0%} {'#' * round(40 * a):<40}  then {b:4.0%} "
            f"{'#' * round(40 * b)}"
        )
    assert after.max(1).mean() < before.max(1).mean()
    assert first == second
    print(f"{sum(map(len, first))} tokens, the same before and after")


if __name__ == "__main__":
    asyncio.run(main())
