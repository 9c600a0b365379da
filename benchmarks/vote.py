"""Latency of the step vote: N processes on one host that only vote, over the real DP coordinator.

    python -m benchmarks.vote [--tcp]

With --tcp the connection is encrypted, as between machines.

    vote    time that an engine waits when all vote at once; the slowest engine's median counts
    wake    time from one engine's vote to the decision when all others sleep

Target: median at most 120 us with 4 processes on two cores. Prints and saves p50, p90 and p99.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from time import perf_counter_ns
from typing import Any

from benchmarks.common import ROOT, free_port, parser, save
from moeserve.comm.dp_coordinator import open_coordinator
from moeserve.comm.members import Members
from moeserve.engine.vote import Action, DPCoordinator, Vote

NUM_ENGINES = [1, 2, 4]
WARM_UP = 200


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--votes", type=int, default=3000)
    flags.add_argument("--engines", type=int, nargs="+", default=NUM_ENGINES)
    flags.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    flags.add_argument(
        "--tcp", action="store_true", help="vote over TCP, encrypted, as between machines"
    )
    flags.add_argument("--member", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.member:
        members = Members(**json.loads(args.member))
        print(json.dumps(run(args.loop, members, args.votes)))
        return
    results = [measure(count, args) for count in args.engines]
    save(
        "vote",
        args,
        {"cores": len(os.sched_getaffinity(0)), "loop": args.loop, "results": results},
    )


def measure(num_engines: int, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="moeserve-vote-") as directory:
        started = []
        hosts = [f"host {rank}" if args.tcp else "one" for rank in range(num_engines)]
        vote = f"127.0.0.1:{free_port()}"
        for rank in range(num_engines):
            member = {
                "epoch": 1,
                "rank": rank,
                "tp_size": 1,
                "host_of": hosts,
                "directory": directory,
                "store": "127.0.0.1:0",
                "token": "benchmark",
                "vote": vote,
            }
            words = [
                "--member",
                json.dumps(member),
                "--votes",
                str(args.votes),
                "--loop",
                args.loop,
            ]
            command = [sys.executable, "-m", "benchmarks.vote", *words]
            started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        told = [json.loads(process.communicate(timeout=300)[0]) for process in started]
    return {
        "num_engines": num_engines,
        "vote_us": max((one["vote_us"] for one in told), key=lambda us: us["p50"]),
        "wake_us": told[-1]["wake_us"],
    }


def run(loop: str, members: Members, votes: int) -> dict[str, Any]:
    if loop == "asyncio":
        return asyncio.run(vote(members, votes))
    import uvloop

    result: dict[str, Any] = uvloop.run(vote(members, votes))
    return result


async def vote(members: Members, votes: int) -> dict[str, Any]:
    coordinator = await open_coordinator(members)
    spent: dict[str, list[int]] = {"vote": [], "wake": []}
    for step in range(WARM_UP + votes):
        began = perf_counter_ns()
        await coordinator.exchange(Vote(step, 1, has_work=True, tokens=1))
        spent["vote"].append(perf_counter_ns() - began)
    await sleep_and_wake(coordinator, members, spent["wake"], WARM_UP + votes)
    coordinator.close()
    return {f"{name}_us": percentiles(times[len(times) // 10 :]) for name, times in spent.items()}


async def sleep_and_wake(
    coordinator: DPCoordinator, members: Members, wakes: list[int], step: int
) -> None:
    """Park all engines; then the last one wakes the others. Repeat."""
    wakes_others = members.rank == members.size - 1
    for turn in range(300):
        decision = await coordinator.exchange(Vote(step + 2 * turn, 1))
        assert decision.action is Action.PARK
        if wakes_others:
            await asyncio.sleep(0.001)
        else:
            await coordinator.wait_woken()
        began = perf_counter_ns()
        await coordinator.exchange(Vote(step + 2 * turn + 1, 1, has_work=wakes_others))
        wakes.append(perf_counter_ns() - began)


def percentiles(times: list[int]) -> dict[str, float]:
    """Return p50, p90 and p99 in microseconds, from times in nanoseconds."""
    ordered = sorted(times)
    return {f"p{p}": round(ordered[len(ordered) * p // 100] / 1e3, 1) for p in (50, 90, 99)}


if __name__ == "__main__":
    main()
