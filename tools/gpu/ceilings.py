"""The card's peak rates: a copy (bytes read and written), and an 8192 x 8192 bf16 product."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton

from benchmarks import common
from tools.gpu.bench import Bench, figures


def run(bench: Bench) -> None:
    """Measure both, and record the versions of everything."""
    if not bench.part[0]:
        bench.found["versions"] = {**common.environment(), "triton": triton.__version__}
    bench.each(
        "ceilings",
        ("copy", "matmul"),
        lambda name: {"name": name, **(copy if name == "copy" else matmul)(bench)},
    )


def copy(bench: Bench) -> dict[str, Any]:
    source = torch.empty(
        1 << 10 if bench.smoke else 1 << 32, dtype=torch.uint8, device=bench.device
    ).random_()
    target = torch.empty_like(source)
    return figures(
        bench.time({"copy": [partial(target.copy_, source)]})["copy"], num_bytes=2 * len(source)
    )


def matmul(bench: Bench) -> dict[str, Any]:
    size = 32 if bench.smoke else 8192
    a = bench.random(size, size)
    b = bench.random(size, size)
    return figures(
        bench.time({"matmul": [partial(torch.matmul, a, b)]})["matmul"], flops=2 * size**3
    )
