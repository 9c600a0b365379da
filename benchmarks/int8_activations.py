"""Speed of native matrix products by weight format, with bf16 or int8 activations, for few rows.

    python -m benchmarks.int8_activations

All instruction sets and formats take turns within a round, so that the matrices of one format pass
through the caches between two runs of another.

Prints and saves for each case:

    gb_s            packed weights read per second
    speed_of_bf16   median over the rounds of bf16's time divided by the format's
    read_gb_s       the rate at which torch sums the same bytes on every thread (once, not by case)
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks import common
from moeserve.loader.stored_format import IQ2_CODES, IQ3_XXS_CODES, IQ4_CODES
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear, allocate_new
from moeserve.ops.quantized import Quantized

SIZE = 4096  # inputs and outputs of each matrix
ROWS = (1, 8)


def weights() -> dict[str, Any]:
    """Return one matrix of each format."""
    bf16 = torch.bfloat16
    fp16 = torch.float16
    shape = (SIZE, SIZE)
    int4 = torch.randint(0, 16, shape, dtype=torch.uint8)
    int8 = torch.randint(-127, 128, shape, dtype=torch.int8)
    scales = torch.rand(SIZE, SIZE // 32).half().float() / 100
    d = torch.full((SIZE, SIZE // 256), 2.0**-10)
    whole = torch.randint(0, 64, scales.shape).float() * 2.0**-10
    w4 = Quantized("int4", 128, bf16, int4, scales[:, : SIZE // 128].contiguous())
    w8 = Quantized("int8", 0, bf16, int8, scales[:, :1].contiguous())
    rounded: dict[str, Any] = {"activations": "int8"}
    halves = whole.repeat(1, 2)
    one_super: dict[str, Any] = {"supers": (d, None), **rounded}
    k_quant: dict[str, Any] = {"mins": whole, "supers": (d, d), **rounded}
    return {
        "bf16": torch.randn(shape).bfloat16(),
        "int4": w4,
        "int4 int8": replace(w4, **rounded),
        "int8": w8,
        "int8 int8": replace(w8, **rounded),
        "q4_0": Quantized("int4", 32, bf16, int4, scales, scale_dtype=fp16, **rounded),
        "mxfp4": Quantized("fp4", 32, bf16, int4, torch.ones_like(scales)),
        "mxfp4 int8": Quantized(
            "fp4", 32, bf16, int4, torch.ones_like(scales), scale_dtype=bf16, **rounded
        ),
        "iq4_nl": Quantized(
            "codes", 32, bf16, int4, scales, scale_dtype=fp16, bits=4, codes=IQ4_CODES, **rounded
        ),
        "iq3_xxs": Quantized(
            "codes", 32, bf16, int4, whole, bits=4, codes=IQ3_XXS_CODES, **one_super
        ),
        "iq2_xxs": Quantized(
            "codes", 32, bf16, int4 & 7, whole, bits=3, codes=IQ2_CODES, **one_super
        ),
        "iq2_s": Quantized(
            "codes", 16, bf16, int4 & 7, halves, bits=3, codes=IQ2_CODES, **one_super
        ),
        "q2_k": Quantized(
            "int8", 16, bf16, int8 & 3, halves, bits=2, mins=halves, supers=(d, d), **rounded
        ),
        "q3_k": Quantized("int8", 16, bf16, (int8 & 7) - 4, halves, bits=3, **one_super),
        "q4_k": Quantized("int4", 32, bf16, int4, whole, **k_quant),
        "q5_k": Quantized("int8", 32, bf16, int8 & 31, whole, bits=5, **k_quant),
        "q6_k": Quantized("int8", 16, bf16, (int8 & 63) - 32, halves, bits=6, **one_super),
    }


def copies(linear: NativeLinear, weight: Any, num_bytes: int) -> list[NativeLinear]:
    """Return copies of one matrix, each in its own memory, of `num_bytes` in all."""

    def allocate(size: int) -> tuple[torch.Tensor, bool]:
        memory, _ = allocate_new(size)
        return memory.copy_(linear.packed), True

    return [
        NativeLinear(weight, allocate=allocate)
        for _ in range(-(-num_bytes // linear.packed.nbytes))
    ]


def main() -> None:
    flags = common.parser(__doc__)
    flags.add_argument("--rounds", type=int, default=5, help="number of rounds [5]")
    flags.add_argument("--megabytes", type=int, default=500, help="weights per format [500]")
    flags.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="[all allowed CPUs]"
    )
    args: argparse.Namespace = flags.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    module: Any = native()
    torch.set_num_threads(len(cpus))
    torch.ones(2**24).sum()  # starts torch's threads, which would inherit the pin below
    module.set_threads(cpus)
    os.sched_setaffinity(0, cpus[:1])  # unpinned, it may share a CPU with a worker
    torch.manual_seed(0)
    made = {
        name: copies(NativeLinear(weight), weight, args.megabytes * 10**6)
        for name, weight in weights().items()
    }
    seconds: dict[tuple[str, int, str], list[float]] = {}
    reads = []
    for _ in range(args.rounds):
        for isa in module.supported_isas():
            module.use_isa(isa)
            for rows in ROWS:
                x = torch.randn(rows, SIZE).bfloat16()
                for name, linears in made.items():
                    start = time.perf_counter()
                    for linear in linears:
                        linear(x)
                    seconds.setdefault((isa, rows, name), []).append(
                        (time.perf_counter() - start) / len(linears)
                    )
        start = time.perf_counter()
        for linear in made["bf16"]:
            linear.packed.view(torch.int64).sum()
        reads.append(
            sum(linear.packed.nbytes for linear in made["bf16"])
            / (time.perf_counter() - start)
            / 1e9
        )
    cases = []
    for (isa, rows, name), times in seconds.items():
        num_bytes = made[name][0].packed.nbytes
        ratio = statistics.median(
            b / t for b, t in zip(seconds[isa, rows, "bf16"], times, strict=True)
        )
        cases.append(
            {
                "isa": isa,
                "rows": rows,
                "form": name,
                "bits": round(8 * num_bytes / SIZE**2, 3),
                "gb_s": round(num_bytes / statistics.median(times) / 1e9, 2),
                "speed_of_bf16": round(ratio, 2),
            }
        )
    results = {
        "read_gb_s": round(statistics.median(reads), 2),
        "threads": len(cpus),
        "cases": cases,
    }
    lines = [
        f"{c['isa']:12} {c['rows']} {c['form']:11} {c['bits']:6} {c['gb_s']:7} "
        f"{c['speed_of_bf16']:6}"
        for c in cases
    ]
    common.save("int8-activations", args, results, "\n".join([str(results["read_gb_s"]), *lines]))


if __name__ == "__main__":
    main()
