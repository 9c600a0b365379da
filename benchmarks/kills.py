"""Recovery when a rank is killed (kill -9) under many streams: time and lost work.

    python -m benchmarks.kills

Targets with the demo model over 20 kills: noticed within 0.2 s, all streams move again within 3 s
of the kill, no request lost, no token different. The kills come at random moments while the engines
are idle, prefill, decode, or move experts.

Prints and saves the timeline of each kill, and medians and maxima.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from statistics import median
from typing import Any

import psutil

from benchmarks.common import parser, save
from moeserve.actor.supervisor import RestartPolicy
from moeserve.cluster import fleet
from moeserve.config import Config, config_of
from moeserve.errors import MoeserveError
from moeserve.frontend import open as opening
from moeserve.frontend.front_end import FrontEnd
from moeserve.sampling import SamplingParams

MOMENTS = ("idle", "prefill", "decode", "rebalance")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--dp", type=int, default=2)
    flags.add_argument("--tp", type=int, default=1)
    flags.add_argument("--fork-server", choices=("on", "off"), default="on")
    flags.add_argument("--rest-s", type=float, default=4.0, help="mean seconds between kills [4]")
    flags.add_argument("--streams", type=int, default=32)
    flags.add_argument("--tokens", type=int, default=150)
    flags.add_argument("--kills", type=int, default=20)
    flags.add_argument("--seed", type=int, default=1)
    args = flags.parse_args()
    # The deaths are intended, so they must not count as a crash loop.
    fleet.POLICY = RestartPolicy(first_pause_s=0.0, max_deaths=args.kills + 1)
    parallel: dict[str, Any] = {
        "dp": args.dp,
        "tp": args.tp,
        "fork_server": args.fork_server,
        "rebalance": "off",
    }
    config = config_of("demo", threads=1, max_model_len=1024, kv_cache_bytes=2**26, **parallel)
    save("kills", args, asyncio.run(run(config, args)))


async def run(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    async with opening.open_front_end(config, child=True) as front:
        await front.wait_ready()
        undisturbed = await Streams(front, args.streams, args.tokens).end()
        kills = []
        for number in range(args.kills):
            await until(lambda: complete(front))
            await asyncio.sleep(rng.uniform(0, 2 * args.rest_s))
            kills.append(await kill(front, MOMENTS[number % 4], undisturbed, args.tokens, rng))
            # Printed at once, so that an interrupted run leaves results.
            print(kills[-1], file=sys.stderr, flush=True)
    marks = ("noticed", "process", "ready", "joined", "half of the streams", "moving")
    reached = {name: [kill["at_s"][name] for kill in kills] for name in marks}
    return {
        "dp": config.parallel.dp,
        "tp": config.parallel.tp,
        "fork_server": config.parallel.fork_server,
        "rest_s": args.rest_s,
        "streams": args.streams,
        "tokens": args.tokens,
        "median_s": {name: round(median(times), 3) for name, times in reached.items()},
        "max_s": {name: max(times) for name, times in reached.items()},
        "lost": sum(kill["lost"] for kill in kills),
        "different": sum(kill["different"] for kill in kills),
        "kills": kills,
    }


class Streams:
    """`count` concurrent requests; `seen` collects their tokens."""

    def __init__(self, front: FrontEnd, count: int, num_tokens: int) -> None:
        self.seen: list[list[int]] = [[] for _ in range(count)]
        self.tasks = [asyncio.create_task(self._read(front, i, num_tokens)) for i in range(count)]

    async def _read(self, front: FrontEnd, i: int, num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.8, seed=i, ignore_eos=True)
        async with await front.generate([5 + i, 6, 7, 8] * 20, params) as deltas:
            async for delta in deltas:
                self.seen[i] += delta.token_ids

    def going(self, counts: list[int]) -> list[bool]:
        """Return for each stream whether it has more than counts[i] tokens or is over."""
        return [
            len(seen) > n or task.done()
            for seen, n, task in zip(self.seen, counts, self.tasks, strict=True)
        ]

    async def end(self) -> list[list[int] | str]:
        """Return the tokens of each stream, or the error that ended it."""
        ends = await asyncio.gather(*self.tasks, return_exceptions=True)
        return [
            str(end) if isinstance(end, MoeserveError) else seen
            for end, seen in zip(ends, self.seen, strict=True)
        ]


async def kill(
    front: FrontEnd,
    moment: str,
    undisturbed: list[list[int] | str],
    num_tokens: int,
    rng: random.Random,
) -> dict[str, Any]:
    assert front.fleet is not None
    streams = Streams(front, 0 if moment == "idle" else len(undisturbed), num_tokens)
    if moment in ("decode", "rebalance"):
        begun = rng.randrange(1, 30)
        await until(lambda: all(len(seen) > begun for seen in streams.seen))
    moving = asyncio.create_task(front.fleet.scaling.rebalance()) if moment == "rebalance" else None
    await asyncio.sleep(rng.uniform(0, 0.1))
    number = rng.randrange(front.fleet.dp)
    pid = front.fleet.view.engines[number].pid
    warm = front.fleet.scaling.rendezvous.local_host.server is not None
    assert pid is not None
    leader = psutil.Process(pid)
    ranks = [leader, *leader.children()]
    at_s = await Timeline(front, number, streams, rng.choice(ranks)).run()
    ends = await streams.end()
    if moving is not None:
        await asyncio.gather(moving, return_exceptions=True)
    expected = undisturbed[: len(ends)]
    return {
        "moment": moment,
        "warm": warm,
        "at_s": at_s,
        "lost": sum(isinstance(end, str) for end in ends),
        "different": sum(
            end != want
            for end, want in zip(ends, expected, strict=True)
            if not isinstance(end, str)
        ),
    }


class Timeline:
    """Records what happens after a kill, in seconds since then.

    The marks are: noticed, process (the new one), the phases of its start, ready, joined, half of
    the streams, moving (every stream has a new token).
    """

    def __init__(
        self, front: FrontEnd, victim: int, streams: Streams, rank: psutil.Process
    ) -> None:
        self._front = front
        self._victim = victim
        self._streams = streams
        self._rank = rank
        self._at_s: dict[str, float] = {}

    async def run(self) -> dict[str, float]:
        stats = self._front.stats
        fleet = self._front.fleet
        assert fleet is not None
        deaths = stats.total.restarts
        pid = fleet.view.engines[self._victim].pid
        phase = fleet.engines[self._victim].phase
        killed_s = time.monotonic()
        self._rank.kill()
        counts: list[int] | None = None

        def mark(name: str, happened: bool) -> None:
            if happened and name not in self._at_s:
                self._at_s[name] = round(time.monotonic() - killed_s, 3)

        def over() -> bool:
            nonlocal counts, phase
            if stats.total.restarts > deaths and counts is None:
                counts = [len(seen) for seen in self._streams.seen]
            mark("noticed", counts is not None)
            state = fleet.engines[self._victim]
            mark("process", fleet.view.engines[self._victim].pid not in (None, pid))
            if state.phase is not phase:
                phase = state.phase
                mark(phase.name, counts is not None)
            mark("ready", "process" in self._at_s and state.ready is not None)
            mark("joined", "ready" in self._at_s and complete(self._front))
            if counts is None:
                return False
            going = self._streams.going(counts)
            mark("half of the streams", "joined" in self._at_s and 2 * sum(going) >= len(going))
            mark("moving", "joined" in self._at_s and all(going))
            return "moving" in self._at_s

        await until(over)
        return self._at_s


def complete(front: FrontEnd) -> bool:
    return front.fleet is not None and front.fleet.view.complete


async def until(condition: Any) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110  (it measures)
            await asyncio.sleep(0.001)


if __name__ == "__main__":
    main()
