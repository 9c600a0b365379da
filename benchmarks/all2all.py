"""Time of dispatch plus combine for each all-to-all backend among the ranks of one machine.

    python -m benchmarks.all2all [--backends shm torch] [--ranks 2] [--samples 2000]

Target: at most 150 us at the median for shm with 64 tokens x 1,024 x bf16, top 8, 2 ranks, on two
cores.

Ranks are processes, each pinned to its own core while there are enough cores. Between dispatch and
combine each rank writes its experts' results. That write is not counted, but waiting for a rank
that is late with it is.

Prints and saves microseconds per layer for each backend and size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import ROOT, free_port, parser, save
from moeserve.comm.members import Members
from moeserve.config import ParallelConfig
from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.registry import AUTO, make_backends
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch

WARM_UP = 0.1  # share of the samples that is discarded
EXPERTS = 16  # per rank


@dataclass(frozen=True, slots=True)
class Size:
    """One case: tokens per rank, model width, experts per token."""

    tokens: int
    hidden: int
    top_k: int


SIZES = [
    Size(1, 1024, 8),
    Size(64, 1024, 8),
    Size(32, 4096, 8),
    Size(512, 1024, 8),
    Size(2048, 2048, 8),
]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--backends",
        nargs="+",
        default=list(AUTO["cpu"]),
        help="backends to measure [%(default)s]",
    )
    flags.add_argument("--ranks", type=int, default=2, help="number of processes [2]")
    flags.add_argument(
        "--samples", type=int, default=500, help="round trips of the small sizes [500]"
    )
    flags.add_argument("--as-rank", metavar="JSON", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.as_rank:
        sys.stdout.write(json.dumps(one_rank(**json.loads(args.as_rank))))
        return
    results = []
    for size in SIZES:
        samples = max(25, min(args.samples, args.samples * 64 // size.tokens))
        for backend in args.backends:
            results.append(
                {"backend": backend, **asdict(size), **measure(backend, args.ranks, size, samples)}
            )
            print(json.dumps(results[-1]), file=sys.stderr)
    save("all2all", args, {"ranks": args.ranks, "dtype": "bfloat16", "round_trips": results})


def measure(backend: str, ranks: int, size: Size, samples: int) -> dict[str, Any]:
    """Run all ranks and return the figures of the slowest one: median, p90 and minimum by phase."""
    with tempfile.TemporaryDirectory(prefix="moeserve-") as directory:
        common = {"backend": backend, "ranks": ranks, "size": asdict(size), "samples": samples}
        meeting = {"directory": directory, "store": f"127.0.0.1:{free_port()}"}
        command = [sys.executable, "-m", "benchmarks.all2all", "--as-rank"]
        processes = [
            subprocess.Popen(
                [*command, json.dumps({"rank": rank, **common, **meeting})],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(
            f"{backend}: a rank ended with {[process.returncode for process in processes]}"
        )
    return max(
        (json.loads(output) for output in outputs),
        key=lambda found: float(found["total_us"]["median"]),
    )


def one_rank(
    rank: int,
    backend: str,
    ranks: int,
    size: dict[str, int],
    samples: int,
    directory: str,
    store: str,
) -> dict[str, Any]:
    """Measure one case on one rank, pinned to a core, and return its times."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    shape = Size(**size)
    config = ParallelConfig(dp=ranks, all2all=backend)
    (made,) = make_backends(
        config,
        hidden_size=shape.hidden,
        dtype=torch.bfloat16,
        top_k=shape.top_k,
        max_tokens=shape.tokens,
        experts_per_rank=EXPERTS,
    )
    if made.caps.obstacle is not None:
        raise SystemExit(made.caps.obstacle)
    hosts = ("here",) * ranks
    made.join(
        Members(
            epoch=1,
            rank=rank,
            tp_size=1,
            host_of=hosts,
            directory=directory,
            store=store,
            token="benchmark",
        ),
        EXPERTS,
        1,
    )
    try:
        return round_trips(made, *inputs(rank, ranks * EXPERTS, shape), samples)
    finally:
        made.leave()


def inputs(rank: int, num_experts: int, size: Size) -> tuple[Tensor, Routing]:
    """Return random tokens and their routes: top_k experts per token, all equally likely."""
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(size.tokens, size.hidden, generator=generator).bfloat16()
    ids = [
        torch.randperm(num_experts, generator=generator)[: size.top_k] for _ in range(size.tokens)
    ]
    return x_TD, Routing(
        torch.stack(ids).int(), torch.rand(size.tokens, size.top_k, generator=generator)
    )


def round_trips(backend: All2All, x_TD: Tensor, routing: Routing, samples: int) -> dict[str, Any]:
    """Return this rank's times of dispatch and combine, without warm-up."""
    ubatch = UBatch()
    out_TD = torch.empty_like(x_TD)
    marks_ns = []
    for _ in range(samples):
        begun = time.perf_counter_ns()
        rows = backend.dispatch(x_TD, routing, ubatch)
        sent = time.perf_counter_ns()
        ticket = rows.wait()
        arrived = time.perf_counter_ns()
        y = x_TD.new_empty(ticket.inbound.rows.shape) if ticket.y is None else ticket.y
        y.copy_(ticket.inbound.x)  # in place of the experts
        written = time.perf_counter_ns()
        sums = backend.combine(ticket, y, out_TD, ubatch)
        returned = time.perf_counter_ns()
        sums.wait()
        done = time.perf_counter_ns()
        marks_ns.append((sent - begun, arrived - sent, returned - written, done - returned))
    kept = marks_ns[int(samples * WARM_UP) :]
    names = ("dispatch_us", "dispatch_wait_us", "combine_us", "combine_wait_us")
    phases = dict(zip(names, zip(*kept, strict=True), strict=True))
    return {
        "total_us": spread([sum(mark) for mark in kept]),
        **{name: spread(ns) for name, ns in phases.items()},
    }


def spread(times_ns: Any) -> dict[str, float]:
    """Return median, p90 and minimum in microseconds."""
    ordered = sorted(times_ns)
    picks = {"median": len(ordered) // 2, "p90": len(ordered) * 9 // 10, "min": 0}
    return {name: round(ordered[index] / 1e3, 1) for name, index in picks.items()}


if __name__ == "__main__":
    main()
