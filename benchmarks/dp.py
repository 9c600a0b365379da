"""Two engines with one thread each beside one engine with two threads, decoding a batch of 32.

    python -m benchmarks.dp --model DIR

Both are loaded at the same time and get the same work in turns, so that the ratio holds on a shared
machine. A round counts tokens from the time when all streams have started until the first one ends.

    ratio     tokens/s of two engines over those of one
    all2all   time that the model waited for tokens, as a share of its step time
    vote      time from a vote to the decision, as a share of the time per step; it overlaps the
              previous step, so the sum with all2all is an upper bound

Targets for a model of about 1e9 parameters: ratio 0.85 or more, all2all and vote together at most
0.12. Prints and saves all of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from benchmarks.common import parser, save, summary
from moeserve.config import Config, config_of
from moeserve.frontend import open as opening
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import StepRecord
from moeserve.plan.measure import RecordingStats
from moeserve.sampling import SamplingParams

PROMPT_TOKENS = 32


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="demo")
    flags.add_argument("--dtype", default="auto", help="[auto]")
    flags.add_argument("--batch", type=int, default=32)
    flags.add_argument("--tokens", type=int, default=40, help="tokens of each answer [40]")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--kv-cache-bytes", type=int, default=2**29)
    args = flags.parse_args()
    common = {
        "dtype": args.dtype,
        "max_num_seqs": args.batch,
        "max_model_len": PROMPT_TOKENS + args.tokens + 8,
        "kv_cache_bytes": args.kv_cache_bytes,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "rebalance": "off",
    }
    one = config_of(args.model, dp=1, threads=2, **common)
    two = config_of(args.model, dp=2, threads=1, **common)
    save("dp", args, asyncio.run(compare(one, two, args.batch, args.tokens, args.rounds)))


async def compare(
    one: Config, two: Config, batch: int, num_tokens: int, num_rounds: int
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"one": [], "two": []}
    shares: dict[str, list[float]] = {"all2all": [], "vote": [], "both": []}
    async with (
        opening.open_front_end(one, child=True) as alone,
        opening.open_front_end(two, child=True) as pair,
    ):
        for front in (alone, pair):
            await front.wait_ready()
            front.stats = RecordingStats()
            await one_round(front, batch, 4)
        for number in range(num_rounds):
            for name, front in (("one", alone), ("two", pair))[:: 1 if number % 2 else -1]:
                rate, records = await one_round(front, batch, num_tokens)
                rates[name].append(rate)
                if name == "two":
                    for key, share in shares_of(records).items():
                        shares[key].append(share)
    ratios = [b / a for a, b in zip(rates["one"], rates["two"], strict=True)]
    return {
        "batch": batch,
        "tokens": num_tokens,
        "ratio": summary(ratios),
        "one_process_two_threads_tokens_per_s": summary(rates["one"]),
        "two_engines_one_thread_tokens_per_s": summary(rates["two"]),
        "share_of_step": {key: summary(values) for key, values in shares.items()},
    }


async def one_round(front: FrontEnd, batch: int, num_tokens: int) -> tuple[float, list[StepRecord]]:
    """Return tokens per second while all streams decode, and the step records of that time."""
    counts = [0] * batch
    began_s = ended_s = 0.0
    num_before = 0

    async def read(i: int) -> None:
        nonlocal began_s, ended_s, num_before
        prompt = [random.randrange(5, 200) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        async with await front.generate(prompt, params) as deltas:
            async for delta in deltas:
                counts[i] += len(delta.token_ids)
                if not began_s and all(counts):
                    began_s = time.monotonic()
                    num_before = sum(counts)
                elif began_s and not ended_s and delta.finish_reason is not None:
                    ended_s = time.monotonic()
                    rate.append((sum(counts) - num_before) / (ended_s - began_s))

    rate: list[float] = []
    stats = front.stats
    assert isinstance(stats, RecordingStats)
    stats.records.clear()
    await asyncio.gather(*(read(i) for i in range(batch)))
    if not rate:
        raise SystemExit("the streams did not overlap: use more --tokens")
    return rate[0], [record for record in stats.records if began_s <= record.at_s <= ended_s]


def shares_of(records: list[StepRecord]) -> dict[str, float]:
    """Return all2all's and the vote's shares, over both engines. All steps must be decodes."""
    device_us = exposed_us = vote_us = step_us = 0.0
    for rank in {record.dp_rank for record in records}:
        steps = [record for record in records if record.dp_rank == rank]
        device_us += sum(step.device_us for step in steps)
        exposed_us += sum(step.exposed_comm_us for step in steps)
        vote_us += sum(step.vote_us for step in steps[1:])
        step_us += (steps[-1].at_s - steps[0].at_s) * 1e6
    all2all = exposed_us / max(1.0, device_us)
    vote = vote_us / max(1.0, step_us)
    return {"all2all": all2all, "vote": vote, "both": all2all + vote}


if __name__ == "__main__":
    main()
