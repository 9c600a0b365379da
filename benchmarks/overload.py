"""Ten times overload: goodput, time to first token and memory, beside a server that is just full.

    python -m benchmarks.overload             # the demo on one core, the clients on another
    python -m benchmarks.overload --url http://127.0.0.1:8000 --places 8 --pid PID

The first form pins the server to one core and the clients to another in every phase, so that the
clients never take CPU time from the server. Phases:

    capacity     as many clients as the server's --max-num-seqs (--places) send one request after
                 another, so that nothing queues
    saturation   requests arrive 10 % faster than that, whether or not earlier ones are answered,
                 so that the queue fills
    overload     requests arrive ten times as fast; a tenth is malformed, and a tenth disconnects
                 after 0.1 s

Capacity and saturation are repeated at the end, because a machine's speed changes by the minute.

Prints and saves the figures of each phase. Goodput counts the tokens of completed answers. Memory
and CPU time are those of the server's processes (--pid), in the order of their start; memory is
read before and after each phase.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import aiohttp
import psutil

from benchmarks.common import parser, running_server, save

WORDS = [
    "the",
    "fox",
    "found",
    "a",
    "lantern",
    "in",
    "old",
    "harbour",
    "and",
    "nobody",
    "knew",
    "why",
    "it",
    "was",
]


@dataclass
class Phase:
    """The outcomes of one phase's requests."""

    seconds: float
    sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0  # of completed answers
    ttft_s: list[float] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)
    rss_mib: list[list[int]] = field(default_factory=list)  # by process: before, after
    cpu_s: list[list[float]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the numbers to print."""
        ordered = sorted(self.ttft_s)
        percentile = {
            f"ttft_p{p}_ms": round(1e3 * ordered[len(ordered) * p // 100], 1) for p in (50, 99)
        }
        rate = {
            "answers_per_s": self.ends["200"] / self.seconds,
            "tokens_per_s": self.tokens / self.seconds,
        }
        cores = [
            round((after - before) / self.seconds, 3)
            for before, after in zip(*self.cpu_s, strict=True)
        ]
        more = {
            "rss_mib": self.rss_mib,
            "cores": cores,
            "median_retry_after_s": median(self.retry_after_s or [0.0]),
        }
        return {"sent": self.sent, "ends": dict(self.ends)} | rate | percentile | more


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--url", default="", help="a running server, which is not pinned [start one]"
    )
    flags.add_argument("--places", type=int, default=8, help="the server's --max-num-seqs [8]")
    flags.add_argument("--pid", type=int, default=0, help="process id of that server")
    flags.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="length of the overload; other phases take an eighth of it [60]",
    )
    flags.add_argument("--times", type=float, default=10.0, help="overload over saturation [10]")
    args = flags.parse_args()
    with ExitStack() as stack:
        url = args.url
        pid = args.pid
        if not url:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[-1]})
            flag = "--max-num-seqs", str(args.places)
            server = stack.enter_context(running_server("demo", *flag, cores={cores[0]}))
            server.wait("/readyz")
            url = f"http://127.0.0.1:{server.port}"
            pid = server.process.pid
        phases = asyncio.run(measure(url, args.places, args.seconds, args.times, pid))
    found = {name: phase.summary() for name, phase in phases.items()}
    over = found["overload"]
    for name in ("capacity", "saturation"):
        pair = [found[name], found[f"{name} again"]]
        found[f"overload / {name}"] = {
            key: round(over[key] / mean(other[key] for other in pair), 3)
            for key in ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms")
        }
    save("overload", args, found)


async def measure(
    url: str, places: int, seconds: float, times: float, pid: int
) -> dict[str, Phase]:
    """Return the phases by name."""
    random.seed(1)
    process = psutil.Process(pid) if pid else None
    phases: dict[str, Phase] = {}
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        # Warm-up: until it has served requests, the server has no measurements to plan with.
        await closed(session, Phase(3.0), places, process)
        rate = 0.0
        for again in ("", " again"):
            full = phases["capacity" + again] = Phase(seconds / 8)
            await closed(session, full, places, process)
            rate = rate or full.ends["200"] / full.seconds
            await opened(
                session,
                phases.setdefault("saturation" + again, Phase(seconds / 8)),
                1.1 * rate,
                process,
            )
            if not again:
                await opened(
                    session,
                    phases.setdefault("overload", Phase(seconds)),
                    times * rate,
                    process,
                    good=8,
                )
    return phases


async def closed(
    session: aiohttp.ClientSession, phase: Phase, places: int, process: psutil.Process | None
) -> None:
    """Keep all places busy without queueing."""
    note(phase, process)
    end_s = time.monotonic() + phase.seconds

    async def client() -> None:
        while time.monotonic() < end_s:
            await ask(session, phase, "whole", end_s)

    await asyncio.gather(*[client() for _ in range(places)])
    note(phase, process)


async def opened(
    session: aiohttp.ClientSession,
    phase: Phase,
    rate: float,
    process: psutil.Process | None,
    good: int = 10,
) -> None:
    """Send requests at a mean rate; `good` of ten are whole, the others malformed or aborted."""
    note(phase, process)
    begun_s = time.monotonic()
    due_s = 0.0
    end_s = begun_s + phase.seconds
    async with asyncio.TaskGroup() as group:
        while due_s < phase.seconds:
            await asyncio.sleep(max(0.0, begun_s + due_s - time.monotonic()))
            bad = (10 - good) / 2
            kind = random.choices(["whole", "malformed", "leaves"], [good, bad, bad])[0]
            group.create_task(ask(session, phase, kind, end_s))
            due_s += random.expovariate(rate)
    note(phase, process)


def note(phase: Phase, process: psutil.Process | None) -> None:
    """Record the memory and the CPU time of a process and its children."""
    found = [] if process is None else [process, *process.children(recursive=True)]
    phase.rss_mib.append([round(one.memory_info().rss / 2**20) for one in found])
    phase.cpu_s.append([sum(one.cpu_times()[:2]) for one in found])


async def ask(session: aiohttp.ClientSession, phase: Phase, kind: str, end_s: float) -> None:
    """Send one request and record how it ended."""
    phase.sent += 1
    prompt = " ".join(random.choices(WORDS, k=random.randint(20, 200)))
    num_tokens = random.randint(64, 192)
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    if kind == "malformed":
        body["temperature"] = "warm"
    begun_s = time.monotonic()
    tokens = 0
    try:
        async with asyncio.timeout(0.1 if kind == "leaves" else None):
            async with session.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    phase.ends[str(response.status)] += 1
                    if response.status == 503:
                        phase.retry_after_s.append(float(response.headers["Retry-After-Ms"]) / 1e3)
                    await response.read()
                    return
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        if not tokens:
                            phase.ttft_s.append(time.monotonic() - begun_s)
                        tokens += 1
    except TimeoutError:
        phase.ends["left"] += 1
        return
    if time.monotonic() <= end_s:
        phase.ends["200"] += 1
        phase.tokens += num_tokens
    else:
        phase.ends["late"] += 1


if __name__ == "__main__":
    main()
