"""Times of row-wise kernels and of dense linear layers.

Row-wise are norms, activation, routing, sorting, summing and sampling, in GB/s or microseconds.
Linear layers are compared with cuBLAS.

T tokens, K experts per token, E experts, D model width, V vocabulary, M rows, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moeserve.kernels.activation import act_mul
from moeserve.kernels.align import align, combine
from moeserve.kernels.linear import linear
from moeserve.kernels.logprobs import logprobs
from moeserve.kernels.route import route
from moeserve.kernels.rows import add_rms_norm, embedding, rms_norm
from moeserve.kernels.sampling import SamplingTensors, sample
from moeserve.ops.rules import SWIGLU, RouterRule
from tools.gpu.bench import Bench, Run, figures

RENORMALIZED = RouterRule(renormalize=True)

DIM = 2048
EXPERTS = 128
TOP_K = 8
WIDTH = 768
VOCAB = 151_936
TOKENS = (1, 64, 256, 2048, 16_384)
SAMPLED = (1, 64, 256)
# (outputs, inputs): Qwen3-30B-A3B's QKV, output projection and LM head; Mixtral's QKV.
LINEARS = ((5120, 2048), (2048, 4096), (151_936, 2048), (6144, 4096))
LINEAR_ROWS = (1, 16, 64, 256, 1024, 4096)

Maker = Callable[
    [], tuple[Run, int]
]  # returns a call over data of its own, and the bytes that it moves


def per_token(bench: Bench, tokens: int) -> dict[str, Maker]:
    """Return makers of calls for so many tokens."""
    dim, experts, top_k, width = (64, 16, 2, 32) if bench.smoke else (DIM, EXPERTS, TOP_K, WIDTH)
    size = bench.dtype.itemsize
    pairs = tokens * top_k
    weight = torch.ones(dim, device=bench.device)
    table = bench.random(1000, dim)

    def ids() -> Any:
        return torch.rand(tokens, experts, device=bench.device).topk(top_k).indices.int()

    def combining() -> tuple[Run, int]:
        y = bench.random(tokens, top_k, dim)
        shares = torch.rand(tokens, top_k, device=bench.device)
        chosen = ids()
        return partial(combine, y, shares, chosen), (top_k + 1) * tokens * dim * size

    def routing() -> tuple[Run, int]:
        return partial(
            route, bench.random(tokens, experts), top_k, RENORMALIZED
        ), tokens * experts * size

    def adding() -> tuple[Run, int]:
        x = bench.random(tokens, dim)
        residual = bench.random(tokens, dim)
        return partial(add_rms_norm, x, residual, weight, 1e-6), 4 * tokens * dim * size

    def embedded() -> tuple[Run, int]:
        chosen = torch.randint(0, len(table), (tokens,), device=bench.device)
        return partial(embedding, chosen, table), 2 * tokens * dim * size

    return {
        "rms_norm": lambda: (
            partial(rms_norm, bench.random(tokens, dim), weight, 1e-6),
            2 * tokens * dim * size,
        ),
        "add_rms_norm": adding,
        "act_mul": lambda: (
            partial(act_mul, bench.random(pairs, 2 * width), SWIGLU),
            3 * pairs * width * size,
        ),
        "embedding": embedded,
        "route": routing,
        "align": lambda: (partial(align, ids(), experts, 64), 8 * tokens * top_k),
        "combine": combining,
    }


def sampling(bench: Bench, rows: int) -> dict[str, Maker]:
    """Return samplers (greedy, random, top-k and top-p) and logprobs."""
    vocab = 1500 if bench.smoke else VOCAB

    def settings(temperature: float, top_k: int, top_p: float) -> SamplingTensors:
        def full(value: float, dtype: torch.dtype = torch.float32) -> Any:
            return torch.full((rows,), value, dtype=dtype, device=bench.device)

        seeds = torch.randint(0, 2**31 - 1, (2, rows), dtype=torch.int32, device=bench.device)
        return SamplingTensors(
            full(temperature), full(-torch.inf), full(top_k, torch.int32), full(top_p), *seeds
        )

    def sampled(temperature: float, top_k: int = 1 << 30, top_p: float = 1.0) -> tuple[Run, int]:
        logits = bench.random(rows, vocab, scale=3.0, dtype=torch.float32)
        cuts = top_p < 1
        run = partial(
            sample, logits, settings(temperature, top_k, top_p), draws=temperature > 0, cuts=cuts
        )
        return run, logits.nbytes

    def logged() -> tuple[Run, int]:
        logits = bench.random(rows, vocab, dtype=torch.float32)
        return partial(
            logprobs, logits, torch.zeros(rows, dtype=torch.int64, device=bench.device), 20
        ), logits.nbytes

    return {
        "sample greedy": lambda: sampled(0.0),
        "sample drawn": lambda: sampled(0.8),
        "sample top-k 50, top-p 0.95": lambda: sampled(0.8, 50, 0.95),
        "logprobs 20": logged,
    }


def timed(bench: Bench, name: str, rows: int, make: Maker) -> dict[str, Any]:
    run, num_bytes = make()
    runs = [run] + [make()[0] for _ in range(bench.copies(num_bytes) - 1)]
    return {
        "kernel": name,
        "rows": rows,
        "copies": len(runs),
        **figures(bench.time({name: runs})[name], num_bytes),
    }


def dense(bench: Bench, width: int, inner: int, rows: int) -> dict[str, Any]:
    """Time our batch-invariant product beside cuBLAS."""
    x = bench.random(rows, inner)
    copies = bench.copies(width * inner * x.element_size())
    weights = [bench.random(width, inner, scale=inner**-0.5) for _ in range(copies)]
    samples = bench.time(
        {
            "moeserve": [partial(linear, x, w) for w in weights],
            "cublas": [partial(torch.nn.functional.linear, x, w) for w in weights],
        }
    )
    work = {
        "num_bytes": (width * inner + rows * (width + inner)) * x.element_size(),
        "flops": 2 * rows * width * inner,
    }
    found = {name: figures(taken, **work) for name, taken in samples.items()}
    return {"outputs": width, "inputs": inner, "rows": rows, **found}


def run(bench: Bench) -> None:
    """Cases are (number of rows, kernel), and (outputs, inputs, rows) of dense products."""
    tokens, rows = ((3,), (2,)) if bench.smoke else (TOKENS, SAMPLED)
    makers = {("", n): per_token(bench, n) for n in tokens} | {
        ("sampled ", n): sampling(bench, n) for n in rows
    }
    named = {
        f"{kind}{n} {name}": (name, n, make)
        for (kind, n), found in makers.items()
        for name, make in found.items()
    }
    bench.each("kernels", named, lambda case: timed(bench, *named[case]))
    shapes = ((48, 64),) if bench.smoke else LINEARS
    wanted = [(*shape, n) for shape in shapes for n in ((3,) if bench.smoke else LINEAR_ROWS)]
    bench.each("linear", wanted, lambda case: dense(bench, *case))
