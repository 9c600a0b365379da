"""Random load on a group of engines for a long time: hangs, leaks, different tokens.

    python -m benchmarks.soak --minutes 30

Load: bursts of requests of all lengths, with aborts, priorities, shared prefixes and logprobs, and
pauses in which all or some engines are idle. Experts move now and then, and in the first third
engines are killed. Every hundredth request has an answer that is known beforehand. When everything
is idle at the end, each engine audits its state, and dies if it finds a fault.

Memory: sampled once a second. The slope is taken over the second half of the time, for every
process that lived through it. An engine keeps the heap of its largest step (moeserve/ops/pick.py),
which is planned for and no leak. So the engines get the largest possible steps before that half
(the slope begins after them if they take longer), and the growth of each process since it was first
seen is reported beside the slope.

Watchdog: if requests wait and no token comes for --patience seconds, the run ends with the state of
each engine and what its threads wait for.

Targets: no hang, no request lost, no token different, and a slope of at most 1 MB per minute in
every process. Prints and saves the counts and the slopes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import parser, save
from moeserve.actor.supervisor import RestartPolicy
from moeserve.cluster import fleet
from moeserve.config import config_of
from moeserve.engine.core import AUDIT_INTERVAL_S
from moeserve.errors import Conflict, MoeserveError
from moeserve.frontend import open as opening
from moeserve.frontend.front_end import FrontEnd
from moeserve.sampling import SamplingParams

MAX_LEN = 1024
MAX_SEQS = 32
FILL_AT = 0.35  # share of the time at which the largest steps begin
KNOWN = (
    ([5, 6, 7, 8] * 12, SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True)),
    ([9, 10, 11] * 5, SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)),
)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--minutes", type=float, default=30.0)
    flags.add_argument("--model", default="demo")
    flags.add_argument("--dp", type=int, default=2)
    flags.add_argument("--tp", type=int, default=1)
    flags.add_argument("--dbo", choices=["auto", "on", "off"], default="auto")
    flags.add_argument("--all2all", default="auto")
    flags.add_argument("--kills", type=int, default=4)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument(
        "--rate", type=float, default=40.0, help="requests per second in a burst [40]"
    )
    flags.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="seconds without a token that count as a hang [60]",
    )
    args = flags.parse_args()
    # The deaths are intended, so they must not count as a crash loop.
    fleet.POLICY = RestartPolicy(first_pause_s=0.0, max_deaths=args.kills + 1)
    config = config_of(
        args.model,
        dp=args.dp,
        tp=args.tp,
        dbo=args.dbo,
        all2all=args.all2all,
        threads=1,
        max_model_len=MAX_LEN,
        kv_cache_bytes=2**23,
        max_num_seqs=MAX_SEQS,
    )

    async def run() -> dict[str, Any]:
        async with opening.open_front_end(config, child=True) as front:
            await front.wait_ready()
            soak = Soak(
                front, 60 * args.minutes, random.Random(args.seed), args.patience, args.rate
            )
            return await soak.run(args.kills, args.dp)

    save("soak", args, asyncio.run(run()))


class Soak:
    def __init__(
        self, front: FrontEnd, seconds: float, rng: random.Random, patience_s: float, rate: float
    ) -> None:
        self.front = front
        self.rate = rate
        self.rng = rng
        self.patience_s = patience_s
        self.began_s = time.monotonic()
        self.seconds = seconds
        self.counts = dict.fromkeys(
            ("done", "aborted", "lost", "different", "killed", "moved", "tokens"), 0
        )
        self.causes: set[str] = set()
        self.live: set[asyncio.Task[None]] = set()
        self.slope_from = 1.0  # value of `at`; 1 until the largest steps are done
        self.token_s = time.monotonic()  # time of the newest token
        self.rss: dict[tuple[str, int], list[tuple[float, int]]] = {}
        self.known: list[list[int]] = []

    @property
    def at(self) -> float:
        """The share of the time that has passed, from 0 to 1."""
        return (time.monotonic() - self.began_s) / self.seconds

    async def run(self, num_kills: int, num_engines: int) -> dict[str, Any]:
        for prompt, params in KNOWN:
            self.known.append(await self.tokens(prompt, params))
        tasks = self.watch(), self.sample(), self.disturb(num_kills), self.fill(num_engines)
        watches = [asyncio.create_task(one) for one in tasks]
        load = asyncio.create_task(self.load())
        done, _ = await asyncio.wait({load, *watches[:2]}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a watch ends only with an error
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await asyncio.sleep(AUDIT_INTERVAL_S + 2)
        for (prompt, params), known in zip(KNOWN, self.known, strict=True):
            self.counts["different"] += await self.tokens(prompt, params) != known
        stats = self.front.stats
        return {
            **self.counts,
            "causes": sorted(self.causes),
            "deaths_not_ours": stats.total.restarts - self.counts["killed"],
            "preemptions": stats.preemptions,
            "steps": stats.total.steps,
            "overlap_efficiency": round(stats.total.overlap_efficiency, 3),
            "slope_from_minute": round(self.slope_from * self.seconds / 60, 1),
            "memory": self.slopes(),
        }

    # ---- load

    async def load(self) -> None:
        while self.at < 1:
            for _ in range(self.rng.choice((1, 1, 3, 8, 40))):
                if len(self.live) < 100:
                    self.spawn()
                await asyncio.sleep(self.rng.expovariate(self.rate))
            await asyncio.sleep(self.rng.choice((0, 0, 8, 40, 160)) / self.rate)
        while self.live:
            await asyncio.wait(self.live)

    def spawn(self) -> None:
        known = self.rng.randrange(len(KNOWN)) if self.rng.random() < 0.01 else None
        task = asyncio.create_task(self.one() if known is None else self.one_known(known))
        self.live.add(task)
        task.add_done_callback(self.live.discard)

    async def one_known(self, number: int) -> None:
        try:
            self.counts["different"] += await self.tokens(*KNOWN[number]) != self.known[number]
            self.counts["done"] += 1
        except MoeserveError as error:
            self.lost(error)

    async def one(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(5, 250) for _ in range(rng.choice((1, 5, 30, 120, 500)))]
        if rng.random() < 0.3:
            prompt = [20 + rng.randrange(3)] * 64 + prompt
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 3)),
            max_tokens=rng.choice((1, 2, 20, 80, 300)),
            temperature=rng.choice((0, 1.0)),
            seed=rng.randrange(99),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice((None, None, 3)),
            stop=["the "] if rng.random() < 0.1 else [],
            prompt_logprobs=rng.choice((None, None, None, None, 1)),
        )
        patience = rng.randrange(60) if rng.random() < 0.2 else None
        try:
            async with await self.front.generate(
                prompt, params, priority=rng.choice((0, 0, 0, -1, 1))
            ) as deltas:
                async for delta in deltas:
                    self.note(len(delta.token_ids))
                    if patience is not None and (patience := patience - 1) < 0:
                        self.counts["aborted"] += 1
                        return
            self.counts["done"] += 1
        except MoeserveError as error:
            self.lost(error)

    async def fill(self, num_engines: int) -> None:
        """Cause the largest steps.

        Every process of every engine gets long prompts at once, with all their logits.
        """
        await asyncio.sleep(max(0.0, FILL_AT - self.at) * self.seconds)
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=1)

        async def long() -> None:
            try:
                await self.tokens([self.rng.randrange(5, 250) for _ in range(MAX_LEN - 8)], params)
                self.counts["done"] += 1
            except MoeserveError as error:
                self.lost(error)

        longs = [asyncio.create_task(long()) for _ in range(num_engines * MAX_SEQS)]
        for task in longs:
            self.live.add(task)
            task.add_done_callback(self.live.discard)
        await asyncio.wait(longs)
        self.slope_from = max(0.5, self.at)

    async def tokens(self, prompt: list[int], params: SamplingParams) -> list[int]:
        seen: list[int] = []
        async with await self.front.generate(prompt, params) as deltas:
            async for delta in deltas:
                seen += delta.token_ids
                self.note(len(delta.token_ids))
        return seen

    def note(self, num_tokens: int) -> None:
        self.counts["tokens"] += num_tokens
        self.token_s = time.monotonic()

    def lost(self, error: MoeserveError) -> None:
        self.counts["lost"] += 1
        self.causes.add(str(error))

    # ---- trouble

    async def disturb(self, num_kills: int) -> None:
        group = self.front.fleet
        assert group is not None, "one engine is no group: --dp 2 or --tp 2"
        kill_at = sorted(self.rng.uniform(0, 1 / 3) for _ in range(num_kills))
        while True:
            await asyncio.sleep(self.rng.uniform(0, min(20.0, self.seconds / 20)))
            try:
                if group.experts is not None and await group.scaling.rebalance() is not None:
                    self.counts["moved"] += 1
            except Conflict as error:
                print(f"not moved: {error}", flush=True)
            if kill_at and self.at > kill_at[0] and group.view.complete:
                kill_at.pop(0)
                ranks = [
                    p for engine in group.view.engines if engine.pid for p in family(engine.pid)
                ]
                os.kill(self.rng.choice(ranks).pid, signal.SIGKILL)
                self.counts["killed"] += 1

    async def watch(self) -> None:
        """Raise SystemExit when requests wait and no token comes."""
        while True:
            await asyncio.sleep(0.5)
            if not self.live:
                self.token_s = time.monotonic()
            if (silent_s := time.monotonic() - self.token_s) > self.patience_s:
                raise SystemExit(
                    f"{len(self.live)} requests and no token for {silent_s:.0f} s\n{self.states()}"
                )

    def states(self) -> str:
        """Return the state of all engines, and what their threads wait for in the kernel."""
        assert self.front.fleet is not None
        lines = []
        for engine in self.front.fleet.view.engines:
            lines.append(str(engine))
            for process in family(engine.pid) if engine.pid else []:
                for thread in sorted(Path(f"/proc/{process.pid}/task").iterdir()):
                    words = [
                        (thread / name).read_text().strip() for name in ("comm", "wchan", "syscall")
                    ]
                    lines.append(f"  {process.pid} {thread.name}: {' '.join(words)}")
        return "\n".join(lines)

    # ---- memory

    async def sample(self) -> None:
        assert self.front.fleet is not None
        while True:
            self.remember("front end", psutil.Process())
            for engine in self.front.fleet.view.engines:
                for number, process in enumerate(family(engine.pid) if engine.pid else []):
                    self.remember(f"engine {engine.rank} rank {number}", process)
            await asyncio.sleep(1.0)

    def remember(self, role: str, process: psutil.Process) -> None:
        try:
            self.rss.setdefault((role, process.pid), []).append(
                (self.at, process.memory_info().rss)
            )
        except psutil.NoSuchProcess:
            return  # it was just killed

    def slopes(self) -> dict[str, Any]:
        found = {}
        for (role, _), samples in self.rss.items():
            late = [(at, rss) for at, rss in samples if at > self.slope_from]
            if samples[0][0] > self.slope_from or samples[-1][0] < 0.95 or len(late) < 3:
                continue  # it did not live long enough
            minutes, mib = np.array(late).T * np.array([[self.seconds / 60], [2.0**-20]])
            slope = float(np.polyfit(minutes, mib, 1)[0])
            found[role] = {
                "slope_mb_per_minute": round(slope, 3),
                "first_mb": mib[0],
                "last_mb": mib[-1],
                "minutes_of_life_before": round(
                    (self.slope_from - samples[0][0]) * self.seconds / 60, 1
                ),
                "grown_since_first_seen_mb": (samples[-1][1] - samples[0][1]) * 2.0**-20,
            }
        return found


def family(pid: int) -> list[psutil.Process]:
    """Return an engine's processes: its leader, then its other ranks."""
    try:
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    main()
