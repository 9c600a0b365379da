"""Long prompts: decoding after a long context, and the cost of a long prefill for other streams.

    python -m benchmarks.long_context MODEL    # decode after 16,384; prefill of 8,192
    python -m benchmarks.long_context MODEL --short 1024 --context 32768 --decode-only \\
        --what hybrid-context

decode: one request's tokens per second after a short and after a long prompt, each beside the
machine's floor. decode_step_ratio is the step time after the long prompt over that after the short
one; ..._of_floor is the same ratio of the floors (the bytes), and decode_step_over_floor_ratio is
the first divided by the second. Target for a recurrent hybrid, 32,768 tokens beside 1,024: 1.2.

beside: a long prompt joins 16 decoding requests. Inter-token latencies of the 16 are given before
the prompt arrives (alone), from its arrival to its first token (during), and for both together
(all). Target with --itl-target-ms: p99 during at most 4 times the median alone.

A model with fewer positions is served with as many as are needed: its answers are then meaningless,
but its speed is not. Prints and saves medians, ranges and samples over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import end_as_asked, parser, save, summary
from benchmarks.peers_floor import Case, compiled_machine, floor_tokens_per_s
from moeserve import AsyncEngine, SamplingParams
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec

NEW_TOKENS = 33
BESIDE_TOKENS = 32  # prompt tokens of each stream
ALONE_TOKENS = 32  # tokens of each stream before the long prompt comes


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("model", type=Path, help="Hugging Face directory")
    flags.add_argument(
        "--context", type=int, default=16_384, help="prompt tokens before the decode [16384]"
    )
    flags.add_argument("--short", type=int, default=32, help="tokens of the short prompt [32]")
    flags.add_argument(
        "--prefill", type=int, default=8_192, help="prompt tokens beside the streams [8192]"
    )
    flags.add_argument("--streams", type=int, default=16, help="decoding requests [16]")
    flags.add_argument("--rounds", type=int, default=3, help="number of rounds [3]")
    flags.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="[all allowed CPUs]"
    )
    flags.add_argument("--quantization", help="as of `moeserve serve`")
    flags.add_argument("--kv-cache-dtype", default="auto", help="auto or int8 [auto]")
    flags.add_argument(
        "--kv-cache-bytes",
        type=int,
        help="as of `moeserve serve`; half of it is for states, if there are any",
    )
    flags.add_argument(
        "--itl-target-ms", type=float, default=0.0, help="scheduler.itl_target_ms [0]"
    )
    flags.add_argument(
        "--what", default="long-context", help="first part of the result's name [%(default)s]"
    )
    flags.add_argument(
        "--decode-only", action="store_true", help="no long prompt beside the streams"
    )
    args = flags.parse_args()
    end_as_asked()
    args.prefill = 0 if args.decode_only else args.prefill
    with long_enough(args.model, max(args.context, args.prefill) + NEW_TOKENS) as model:
        save(args.what, args, {"model": args.model.name, **asyncio.run(measure(model, args))})


@contextmanager
def long_enough(model: Path, positions: int) -> Iterator[Path]:
    """Yield a model folder with at least so many positions.

    If the model has fewer, this is a temporary folder beside it, with hard links to its files and
    another config.json.
    """
    config = json.loads((model / "config.json").read_text())
    if config["max_position_embeddings"] >= positions:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-", dir=model.parent) as folder:
        for file in model.iterdir():
            if file.name != "config.json":
                Path(folder, file.name).hardlink_to(file.resolve())
        Path(folder, "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": positions})
        )
        yield Path(folder)


async def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"quantization": args.quantization} if args.quantization else {}
    settings |= {"kv_cache_bytes": args.kv_cache_bytes} if args.kv_cache_bytes else {}
    settings |= {
        "kv_cache_dtype": args.kv_cache_dtype,
        "max_model_len": max(args.context, args.prefill) + NEW_TOKENS,
    }
    settings |= {"itl_target_ms": args.itl_target_ms}
    settings |= {"threads": args.threads, "skip_tokenizer_init": True}
    spec = read_model_spec(model)
    rng = random.Random(0)
    width = next(
        layer.mixer.cache(1)[0].width for layer in spec.layers if not layer.mixer.rule.tile
    )
    # Each head's int8 entry has an fp32 scale.
    kv_bytes = 1 + 4 / width if args.kv_cache_dtype == "int8" else 2
    rounds: dict[str, list[float]] = {}
    with compiled_machine(args.threads) as machine:
        async with AsyncEngine(model, **settings) as engine:
            prompts = {n: random_prompt(rng, spec, n) for n in (args.short, args.context)}
            for prompt in prompts.values():
                await decode(engine, prompt)  # puts the prompt into the prefix cache
            for _ in range(args.rounds):
                rates = machine.rates()
                both = []
                for length, prompt in prompts.items():
                    floor = floor_tokens_per_s(
                        spec, Case("decode", 1, length, NEW_TOKENS), rates, kv_bytes=kv_bytes
                    )
                    speed = await decode(engine, prompt)
                    both.append((speed, floor))
                    rounds.setdefault(f"decode_{length}_tokens_per_s", []).append(speed)
                    rounds.setdefault(f"decode_{length}_share_of_floor", []).append(speed / floor)
                step, by_bytes = (short / long for short, long in zip(*both, strict=True))
                rounds.setdefault("decode_step_ratio", []).append(step)
                rounds.setdefault("decode_step_ratio_of_floor", []).append(by_bytes)
                rounds.setdefault("decode_step_over_floor_ratio", []).append(step / by_bytes)
                if args.decode_only:
                    continue
                for name, figure in (await beside(engine, args, spec, rng)).items():
                    rounds.setdefault(f"beside_{name}", []).append(figure)
    return {name: summary(figures) for name, figures in rounds.items()}


def random_prompt(rng: random.Random, spec: ModelSpec, length: int) -> list[int]:
    return [rng.randrange(3, spec.vocab_size) for _ in range(length)]


class Stream:
    """Collects the times at which a request's tokens arrive."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.under_way = asyncio.Event()  # set after ALONE_TOKENS tokens

    async def run(self, engine: AsyncEngine, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        async for piece in engine.generate({"prompt_token_ids": prompt}, params):
            self.times_s += [time.perf_counter()] * len(piece.outputs[0].token_ids)
            if len(self.times_s) >= ALONE_TOKENS:
                self.under_way.set()


async def decode(engine: AsyncEngine, prompt: list[int]) -> float:
    """Return tokens per second after the first token."""
    stream = Stream()
    await stream.run(engine, prompt, NEW_TOKENS)
    return (NEW_TOKENS - 1) / (stream.times_s[-1] - stream.times_s[0])


async def beside(
    engine: AsyncEngine, args: argparse.Namespace, spec: ModelSpec, rng: random.Random
) -> dict[str, float]:
    """Return the streams' inter-token latencies and the long prompt's time to first token."""
    others = [Stream() for _ in range(args.streams)]
    joining = Stream()
    tasks = [
        asyncio.create_task(s.run(engine, random_prompt(rng, spec, BESIDE_TOKENS), args.prefill))
        for s in others
    ]
    await asyncio.gather(*[stream.under_way.wait() for stream in others])
    joined_s = time.perf_counter()
    await joining.run(engine, random_prompt(rng, spec, args.prefill), 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    begun_s = max(stream.times_s[0] for stream in others)
    ended_s = joining.times_s[0]
    # From the time when every stream is past its prefill.
    streams = [[t for t in stream.times_s if begun_s <= t <= ended_s] for stream in others]
    gaps = {
        "alone": gaps_ms(streams, begun_s, joined_s),
        "during": gaps_ms(streams, joined_s, ended_s),
        "all": gaps_ms(streams, begun_s, ended_s),
    }
    found = {"first_token_s": ended_s - joined_s}
    for name, values in gaps.items():
        median, p99 = (float(np.percentile(values, q)) for q in (50, 99))
        found |= {
            f"{name}_median_ms": median,
            f"{name}_p99_ms": p99,
            f"{name}_p99_over_median": p99 / median,
        }
    return found | {
        "during_p99_over_alone_median": found["during_p99_ms"] / found["alone_median_ms"]
    }


def gaps_ms(streams: list[list[float]], after_s: float, until_s: float) -> list[float]:
    """Return the inter-token latencies of tokens that came after after_s and until until_s."""
    pairs = [pair for times_s in streams for pair in itertools.pairwise(times_s)]
    return [1e3 * (b - a) for a, b in pairs if after_s < b <= until_s]


if __name__ == "__main__":
    main()
