"""Checks that speculation changes no token, logprob, text or finish reason under random traffic.

    python -m benchmarks.same_tokens --requests 10000 --speculate ngram:4 suffix auto mtp:3

All requests (benchmarks/random_requests.py) first run on one engine that has room for all of them,
without drafts and prefix cache. Then they run with each proposer on two engines whose micro-batches
overlap, whose KV cache is too small (so that requests are preempted), and which are killed at
times.

Compared to the bit are token ids, logprobs (of prompts too), texts, finish and stop reasons, and
the error of a rejected request. If the reader aborts a request, as many tokens are compared as both
runs have given. A proposer for which the model has no head is omitted with the reason. Answers have
1 to 64 tokens, 20 on average, and prompts have at most 240.

Targets: 0 lost, 0 different. Prints and saves the counts and some examples of differences.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import end_as_asked, parser, save
from benchmarks.random_requests import MAX_PROMPT, MAX_TOKENS, RandomRequests, Request
from moeserve import AsyncEngine
from moeserve.actor.supervisor import RestartPolicy
from moeserve.cluster import fleet
from moeserve.errors import MoeserveError, RequestError
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import Logprobs
from moeserve.models.hf_config import read_model_spec
from moeserve.speculation import SpeculationSpec
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.tokenizer import Tokenizer

CONCURRENT = 192  # concurrent requests
MOST_EXAMPLES = 5


@dataclass
class Answer:
    """One sequence of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    text: str = ""
    end: tuple[Any, Any] = (None, None)  # (finish reason, stop reason)


@dataclass
class Answers:
    """The outcome of a request."""

    sequences: list[Answer]
    prompt_logprobs: list[Logprobs | None] | None = None
    error: str = ""  # if it was rejected or lost


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="demo")
    flags.add_argument("--requests", type=int, default=10_000)
    flags.add_argument("--speculate", nargs="+", default=["ngram:4", "suffix", "auto", "mtp:3"])
    flags.add_argument("--dp", type=int, default=2)
    flags.add_argument("--dbo", choices=["auto", "on", "off"], default="on")
    flags.add_argument("--kills", type=int, default=4, help="kills per proposer [%(default)s]")
    flags.add_argument(
        "--kv-cache-bytes",
        type=int,
        default=3 << 20,
        help="KV cache of each disturbed engine [%(default)s]",
    )
    flags.add_argument("--seed", type=int, default=1)
    args = flags.parse_args()
    end_as_asked()
    # The deaths are intended, so they must not count as a crash loop.
    fleet.POLICY = RestartPolicy(first_pause_s=0.0, max_deaths=args.kills + 1)
    save("same-tokens", args, asyncio.run(run(args)))


async def run(args: argparse.Namespace) -> dict[str, Any]:
    folder = resolve_model_dir(args.model)
    spec = read_model_spec(folder)
    source = RandomRequests(
        Tokenizer.load(folder), ChatTemplate.load(folder), spec.vocab_size, args.seed
    )
    requests = [source.request(i) for i in range(args.requests)]
    shared: dict[str, Any] = {"max_model_len": MAX_PROMPT + MAX_TOKENS + 16, "max_num_seqs": 64}
    quiet: dict[str, Any] = {
        "enable_prefix_caching": False,
        "threads": min(2, len(os.sched_getaffinity(0))),
    }
    disturbed: dict[str, Any] = {
        "dp": args.dp,
        "dbo": args.dbo,
        "threads": 1,
        "kv_cache_bytes": args.kv_cache_bytes,
    }
    async with AsyncEngine(args.model, **shared, **quiet) as engine:
        expected, seconds = await Load(engine, requests, 0, random.Random(args.seed)).run()
    gc.collect()
    gc.freeze()
    tokens = sum(len(answer.tokens) for answers in expected for answer in answers.sequences)
    results: dict[str, Any] = {
        "requests": len(requests),
        "kinds": Counter(request.kind for request in requests),
        "with a grammar": sum(
            request.params.structured_outputs is not None for request in requests
        ),
        "aborted by the reader": sum(request.abort_after is not None for request in requests),
        "refused": Counter(answers.error for answers in expected if answers.error),
        "without speculation": {"tokens": tokens, "seconds": round(seconds, 1)},
    }
    for speculate in args.speculate:
        try:
            SpeculationSpec.parse(speculate).resolve(has_mtp=spec.mtp is not None)
        except MoeserveError as error:
            results[speculate] = {"left out": str(error)}
            continue
        async with AsyncEngine(args.model, speculate=speculate, **shared, **disturbed) as engine:
            load = Load(engine, requests, args.kills, random.Random(args.seed))
            found, seconds = await load.run()
            stats = engine.front.stats
            results[speculate] = {
                **compared(requests, expected, found),
                "drafts": sum(stats.drafts),
                "accepted": sum(stats.accepted_drafts),
                "accepted_by_place": [
                    round(right / max(1, verified), 3)
                    for right, verified in zip(stats.accepted_drafts, stats.drafts, strict=True)
                ],
                "kills": load.killed,
                "preemptions": stats.preemptions,
                "deaths_not_ours": stats.total.restarts - load.killed,
                "seconds": round(seconds, 1),
            }
        # Printed at once, so that an interrupted run leaves results.
        print(speculate, results[speculate], file=sys.stderr, flush=True)
    return results


class Load:
    """Runs all requests, CONCURRENT at a time, and kills an engine now and then.

    The kills are spread over the requests.
    """

    def __init__(
        self, engine: AsyncEngine, requests: Sequence[Request], kills: int, rng: random.Random
    ) -> None:
        self.engine = engine
        self.requests = requests
        self.rng = rng
        self.kill_at = sorted(rng.randrange(len(requests) * 9 // 10 + 1) for _ in range(kills))
        self.killed = self.done = 0
        self.began_s = time.monotonic()

    async def run(self) -> tuple[list[Answers], float]:
        """Return the outcome of each request, and the seconds that all took."""
        numbers = iter(range(len(self.requests)))
        found: dict[int, Answers] = {}

        async def client() -> None:
            for i in numbers:
                found[i] = await self.one(self.requests[i])
                self.done += 1
                if self.done % 1000 == 0:
                    print(
                        f"{self.done} after {time.monotonic() - self.began_s:.0f} s",
                        file=sys.stderr,
                        flush=True,
                    )

        async with asyncio.TaskGroup() as group:
            killer = group.create_task(self.kill())
            clients = [
                group.create_task(client()) for _ in range(min(CONCURRENT, len(self.requests)))
            ]
            await asyncio.wait(clients)
            killer.cancel()
        return [found[i] for i in range(len(self.requests))], time.monotonic() - self.began_s

    async def one(self, request: Request) -> Answers:
        answers = Answers([Answer() for _ in range(request.params.n)])
        left = request.abort_after
        try:
            generation = await self.engine.front.generate(
                request.prompt, request.params, priority=request.priority
            )
            async with generation as deltas:
                async for delta in deltas:
                    answer = answers.sequences[delta.index]
                    answer.tokens += delta.token_ids
                    answer.logprobs += delta.logprobs
                    answer.text += delta.text
                    answer.end = delta.finish_reason, delta.stop_reason
                    answers.prompt_logprobs = delta.prompt_logprobs or answers.prompt_logprobs
                    if left is not None and (left := left - len(delta.token_ids)) <= 0:
                        break
        except RequestError as error:
            answers.error = str(error)
        return answers

    async def kill(self) -> None:
        """Kill a random engine at each count of finished requests in `kill_at`.

        Waits for the previous one to rejoin first, so that at most one is down.
        """
        for at in self.kill_at:
            group = self.engine.fleet
            while self.done < at or not group.view.complete:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            pids = [engine.pid for engine in group.view.engines if engine.pid is not None]
            os.kill(self.rng.choice(pids), signal.SIGKILL)
            self.killed += 1
            while group.view.complete:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


def compared(
    requests: Sequence[Request], expected: Sequence[Answers], found: Sequence[Answers]
) -> dict[str, Any]:
    """Count the differing sequences, and the requests that were lost."""
    counts = dict.fromkeys(
        ("tokens", "lost", "different_tokens", "different_logprobs", "different_otherwise"), 0
    )
    examples: list[str] = []
    for i, (request, want, got) in enumerate(zip(requests, expected, found, strict=True)):
        counts["tokens"] += sum(len(answer.tokens) for answer in got.sequences)
        faults = differences(request, want, got)
        for fault in faults:
            counts[fault] += 1
        if faults and len(examples) < MOST_EXAMPLES:
            examples.append(
                f"request {i} ({request.kind}): {sorted(set(faults))} {got.error} {request.params}"
            )
    return counts | {"examples": examples}


def differences(request: Request, want: Answers, got: Answers) -> list[str]:
    """Return what differs, named once for each sequence."""
    if got.error != want.error:
        return ["lost"]
    faults = []
    if request.abort_after is None and got.prompt_logprobs != want.prompt_logprobs:
        faults.append("different_logprobs")
    for a, b in zip(want.sequences, got.sequences, strict=True):
        aborted = request.abort_after is not None and None in (a.end[0], b.end[0])
        n = min(len(a.tokens), len(b.tokens)) if aborted else None
        if a.tokens[:n] != b.tokens[:n]:
            faults.append("different_tokens")
        elif a.logprobs[:n] != b.logprobs[:n]:
            faults.append("different_logprobs")
        elif not aborted and (a.text, a.end) != (b.text, b.end):
            faults.append("different_otherwise")
    return faults


if __name__ == "__main__":
    main()
