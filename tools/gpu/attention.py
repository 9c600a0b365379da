"""Times of attention over the paged cache: decode, latent decode and prefill.

Decode is compared with the bytes of keys and values, prefill with torch's attention.

R rows, T tokens, H heads, G KV heads, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.kernels import flash_attention
from moeserve.kernels.attention_plan import Bounds
from moeserve.kernels.paged_attention import (
    AttentionMetadata,
    AttentionShape,
    attention,
    plan_attention,
)
from tools.gpu.bench import Bench, figures

HEADS = 32
KV_HEADS = 4
HEAD_DIM = 128
BLOCK_SIZE = 16
SMOKE_HEADS = 8
SMOKE_DIM = 32
CONTEXTS: dict[str, Sequence[int]] = {
    "64 x 8k": [8192] * 64,
    "64 x 4k": [4096] * 64,
    "1 x 128k + 31 x 4k": [131_072, *[4096] * 31],
    "1 x 1k": [1024],
    "256 x 1k": [1024] * 256,
    "8 x 32k": [32_768] * 8,
}
PREFILLS = ((1, 1024), (1, 4096), (1, 16_384), (8, 2048))  # (rows, new tokens of each)
SMOKE_CONTEXTS = {"3 rows": [5, 600, 1]}


@dataclass(frozen=True, slots=True)
class Step:
    """Queries and a cache whose blocks are in random order."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: Tensor
    starts: Tensor
    offsets: Tensor
    shape: AttentionShape
    bounds: Bounds

    @property
    def case(self) -> tuple[Any, ...]:
        return (
            self.q,
            self.k,
            self.v,
            self.blocks,
            self.starts,
            self.offsets,
            self.shape,
            self.bounds,
        )

    def plan(self, invariant: bool) -> AttentionMetadata:
        return plan_attention(
            self.blocks, self.starts, self.offsets, self.shape, self.bounds, invariant=invariant
        )


def scattered(bench: Bench, widths: Sequence[int]) -> Tensor:
    """Return block tables whose rows have `widths` blocks in random order; 0 is unused."""
    numbers = torch.randperm(sum(widths), device=bench.device).int() + 1
    blocks = torch.zeros((len(widths), max(widths)), dtype=torch.int32, device=bench.device)
    for row, mine in enumerate(torch.split(numbers, list(widths))):
        blocks[row, : len(mine)] = mine
    return blocks


def tensors_of(bench: Bench, starts: Sequence[int], news: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return each row's first position, and the offsets of the rows' tokens."""
    offsets = torch.tensor([0, *news], device=bench.device).cumsum(0).int()
    return torch.tensor(starts, dtype=torch.int32, device=bench.device), offsets


def step_of(bench: Bench, starts: Sequence[int], news: Sequence[int]) -> Step:
    heads, dim = (SMOKE_HEADS, SMOKE_DIM) if bench.smoke else (HEADS, HEAD_DIM)
    shape = AttentionShape(heads, KV_HEADS, dim, dim, BLOCK_SIZE, bench.dtype)
    widths = [-(-(start + new) // BLOCK_SIZE) for start, new in zip(starts, news, strict=True)]
    cache = (sum(widths) + 1, BLOCK_SIZE, KV_HEADS, dim)
    return Step(
        bench.random(sum(news), heads, dim, scale=dim**-0.5),
        bench.random(*cache),
        bench.random(*cache),
        scattered(bench, widths),
        *tensors_of(bench, starts, news),
        shape,
        Bounds(len(starts), sum(news), max(news), max(map(sum, zip(starts, news, strict=True)))),
    )


def by_flash(
    bench: Bench, cases: Sequence[tuple[Any, ...]], num_bytes: int = 0, flops: int = 0
) -> Any:
    """Return FlashAttention-3's figures, or the reason why there are none.

    Each case is q, k, v and the arguments of the plan.
    """
    if (why := flash_attention.unsupported_reason(bench.device)) is not None:
        return why
    runs = [
        partial(
            flash_attention.attention, q, k, v, flash_attention.plan_attention(*step, tokens=len(q))
        )
        for q, k, v, *step in cases
    ]
    timed = bench.time({"fa3": runs}, {"fa3"})
    return figures(timed["fa3"], num_bytes, flops) if "fa3" in timed else "it failed, see the notes"


def decode(bench: Bench, name: str, contexts: Sequence[int]) -> dict[str, Any]:
    """Time one new token per row. Bytes are those of keys and values, read once.

    The plan is timed separately, because a step makes it once for all layers.
    """
    steps = [step_of(bench, [n - 1 for n in contexts], [1] * len(contexts))]
    num_bytes = 2 * sum(contexts) * KV_HEADS * HEAD_DIM * steps[0].k.element_size()
    steps += [
        step_of(bench, [n - 1 for n in contexts], [1] * len(contexts))
        for _ in range(bench.copies(num_bytes) - 1)
    ]
    found: dict[str, Any] = {"contexts": name}
    for word, invariant in (("invariant", True), ("fast", False)):
        plans = [step.plan(invariant) for step in steps]
        runs = [
            partial(attention, s.q, s.k, s.v, plan) for s, plan in zip(steps, plans, strict=True)
        ]
        found[word] = figures(bench.time({word: runs})[word], num_bytes)
    found["fa3"] = by_flash(bench, [step.case for step in steps], num_bytes)
    found["plan"] = figures(bench.time({"plan": [partial(steps[0].plan, False)]})["plan"])
    return found


def latent(bench: Bench, name: str, contexts: Sequence[int], heads: int) -> dict[str, Any]:
    """Time decode of multi-head latent attention.

    There is one KV head: a latent and a rotated key. The values are the latent.
    """
    rank, rotated = (16, 16) if bench.smoke else (512, 64)
    shape = AttentionShape(heads, 1, rank + rotated, rank, BLOCK_SIZE, bench.dtype)
    bounds = Bounds(len(contexts), len(contexts), 1, max(contexts))
    num_bytes = sum(contexts) * shape.dim * bench.dtype.itemsize
    flops = 2 * sum(contexts) * heads * (shape.dim + rank)
    runs: dict[str, list[Any]] = {"invariant": [], "fast": []}
    cases = []
    for _ in range(bench.copies(num_bytes)):
        blocks = scattered(bench, [-(-n // BLOCK_SIZE) for n in contexts])
        starts, offsets = tensors_of(bench, [n - 1 for n in contexts], [1] * len(contexts))
        q = bench.random(len(contexts), heads, shape.dim, scale=shape.dim**-0.5)
        k = bench.random(int(blocks.max()) + 1, BLOCK_SIZE, 1, shape.dim)
        for word, taken in runs.items():
            plan = plan_attention(
                blocks, starts, offsets, shape, bounds, invariant=word == "invariant"
            )
            taken.append(partial(attention, q, k, k[..., :rank], plan))
        cases.append((q, k, k[..., :rank], blocks, starts, offsets, shape, bounds))
    timed = {
        word: figures(bench.time({word: taken})[word], num_bytes, flops)
        for word, taken in runs.items()
    }
    return {"contexts": name, **timed, "fa3": by_flash(bench, cases, num_bytes, flops)}


def prefill(bench: Bench, rows: int, new: int) -> dict[str, Any]:
    """Time whole prompts, beside torch's attention on the same keys and values, unpaged."""
    step = step_of(bench, [0] * rows, [new] * rows)
    flops = 4 * rows * (new * (new + 1) // 2) * HEADS * HEAD_DIM
    candidates: dict[str, list[Any]] = {}
    for word, invariant in (("invariant", True), ("fast", False)):
        candidates[word] = [partial(attention, step.q, step.k, step.v, step.plan(invariant))]
    q = step.q.view(rows, new, *step.q.shape[1:]).transpose(1, 2)
    k, v = (bench.random(rows, KV_HEADS, new, q.shape[-1]) for _ in range(2))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    candidates["torch sdpa"] = [lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True, scale=1.0)]
    timed = {
        name: figures(samples, flops=flops) for name, samples in bench.time(candidates).items()
    }
    return {
        "rows": rows,
        "new_tokens": new,
        **timed,
        "fa3": by_flash(bench, [step.case], flops=flops),
    }


def run(bench: Bench) -> None:
    contexts = SMOKE_CONTEXTS if bench.smoke else CONTEXTS
    bench.each("decode", contexts, lambda name: decode(bench, name, contexts[name]))
    latents = {"64 x 8k, 16 heads": ([8192] * 64, 16), "64 x 8k, 128 heads": ([8192] * 64, 128)}
    latents = {"3 rows, 2 heads": ([5, 600, 1], 2)} if bench.smoke else latents
    bench.each("latent", latents, lambda name: latent(bench, name, *latents[name]))
    bench.each(
        "prefill", ((1, 20),) if bench.smoke else PREFILLS, lambda case: prefill(bench, *case)
    )
