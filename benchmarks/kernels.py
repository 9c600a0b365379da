"""Speed of native matrix products by shape: weight bytes and floating-point operations per second.

    python -m benchmarks.kernels                  # all CPUs that this process may use
    python -m benchmarks.kernels --threads 1

The weights of a shape are larger than the caches. The calling thread is pinned like the workers;
unpinned, it may share a CPU with one of them. Prints the best of some rounds as JSON; nothing is
saved.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.native import NativeExperts
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear

WIDTH = 1024
HIDDEN = 512
SLOTS = 32
EXPERTS = (  # (busy experts, rows per expert)
    (1, 1),
    (8, 1),
    (32, 1),
    (32, 2),
    (32, 4),
    (32, 8),
    (32, 32),
    (32, 128),
    (32, 256),
)
LINEAR = ((1024, 2048), (1024, 4096))  # (inputs, outputs)
ROWS = (1, 8, 32, 128, 1024)


def best_s(run: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def figures(run: Callable[[], Any], num_bytes: int, flops: int, rounds: int) -> dict[str, float]:
    run()
    seconds = best_s(run, rounds)
    return {
        "us": round(seconds * 1e6, 1),
        "gb_s": round(num_bytes / seconds / 1e9, 2),
        "gflop_s": round(flops / seconds / 1e9, 1),
    }


def expert_cases(rounds: int) -> list[dict[str, Any]]:
    kernel = NativeExperts()
    w13 = torch.randn(SLOTS, 2 * HIDDEN, WIDTH).bfloat16()
    w2 = torch.randn(SLOTS, WIDTH, HIDDEN).bfloat16()
    # 400 MB, so that no layer is still in a cache when its turn comes again.
    layers = [kernel.pack(ExpertWeights(w13, w2)) for _ in range(4)]
    cases = []
    for experts, rows in EXPERTS:
        counts = np.zeros(SLOTS, np.int64)
        counts[:: SLOTS // experts] = rows
        x = torch.randn(experts * rows, WIDTH).bfloat16()
        out = torch.empty_like(x)
        inbound = Inbound(Layout.GROUPED, x, counts, counts.cumsum())

        def run(inbound: Inbound = inbound, out: torch.Tensor = out) -> None:
            for packed in layers:
                kernel.run(inbound, packed, out)

        weights = len(layers) * experts * 3 * WIDTH * HIDDEN
        cases.append(
            {
                "kernel": "experts",
                "experts": experts,
                "rows": rows,
                **figures(run, 2 * weights, 2 * weights * rows, rounds),
            }
        )
    return cases


def linear_cases(rounds: int) -> list[dict[str, Any]]:
    cases = []
    for depth, columns in LINEAR:
        layers = [NativeLinear(torch.randn(columns, depth).bfloat16()) for _ in range(24)]
        for rows in ROWS:
            x = torch.randn(rows, depth).bfloat16()

            def run(layers: list[NativeLinear] = layers, x: torch.Tensor = x) -> None:
                for linear in layers:
                    linear(x)

            weights = len(layers) * depth * columns
            cases.append(
                {
                    "kernel": "linear",
                    "inputs": depth,
                    "outputs": columns,
                    "rows": rows,
                    **figures(run, 2 * weights, 2 * weights * rows, rounds),
                }
            )
    return cases


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="[all allowed CPUs]"
    )
    flags.add_argument("--rounds", type=int, default=5, help="runs of each shape [5]")
    flags.add_argument("--only", choices=["experts", "linear"], help="one kernel")
    args = flags.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    module: Any = native()
    if module is None or not module.serving_isa():
        raise SystemExit(
            "the native extension is not built, or this CPU has no instruction set that it serves"
        )
    module.set_threads(cpus)
    os.sched_setaffinity(0, cpus[:1])
    torch.set_num_threads(1)
    cases = expert_cases(args.rounds) if args.only != "linear" else []
    cases += linear_cases(args.rounds) if args.only != "experts" else []
    print(json.dumps({"isa": module.serving_isa(), "threads": len(cpus), "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
