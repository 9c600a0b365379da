"""Searches for launch parameters by measuring, one parameter at a time from the defaults on.

What a kernel computes does not depend on them; a candidate whose bits differ from the defaults' is dropped all the
same. How deep a step over K is, on which bits do depend, is no parameter. M rows, T tokens, E experts, K of them per
token, D model width, I expert width.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from moeserve.kernels import deep_gemm, grouped_fp8, grouped_gemm, paged_attention
from moeserve.kernels import grouped_weight_only as narrow
from moeserve.kernels import linear as dense
from moeserve.kernels.align import Alignment, align
from moeserve.kernels.attention_plan import Bounds
from moeserve.kernels.configs import Config, facts_of
from moeserve.kernels.fp8 import BLOCK, E4M3, quantise
from moeserve.kernels.paged_attention import AttentionShape

Choices = Mapping[str, Sequence[int]]
Timer = Callable[[Callable[[], object]], float]  # milliseconds of a call

PASSES = 2  # over all parameters: the best value of one may depend on a later one
BLOCKS, WARPS, GROUPS = (64, 128, 256), (4, 8), (1, 4, 8, 16)
GROUPED: Choices = {
    "block_m": (16, 32, 64, 128), "up_block_n": BLOCKS, "up_warps": WARPS, "up_stages": (2, 3, 4, 5),
    "down_block_n": BLOCKS, "down_warps": WARPS, "down_stages": (2, 3, 4, 5), "group": GROUPS, "tma": (0, 1),
}  # fmt: skip
FP8: Choices = {**GROUPED, "block_m": (16, 32, 64), "up_block_n": (128,)}
LINEAR: Choices = {
    "block_m": (16, 32, 64, 128), "block_n": BLOCKS, "warps": WARPS, "stages": (3, 4, 5, 6), "group": GROUPS,
    "tma": (0, 1),
}  # fmt: skip
ATTENTION: Choices = {"num_warps": (4, 8), "num_stages": (2, 3, 4, 5, 6), "programs": (2, 4, 8, 16, 32)}
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 16_384)
CONTEXT, ROWS, PREFILL = 4096, 64, 2048
IMPOSSIBLE = (OutOfResources, PTXASError, CompilationError, RuntimeError)  # the last: a pass of the compiler


@dataclass(frozen=True, slots=True)
class Job:
    """One entry of a table. run: the kernel over random data with these parameters, anew at each call. rival: further
    parameters with which kernels of others run, whose bits differ."""

    family: str
    shape: str
    size: int
    default: Config
    choices: Choices
    run: Callable[[Config], Tensor]
    rival: Config | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """wrong: candidates that gave other bits than the defaults."""

    config: Config
    default_ms: float
    best_ms: float
    tried: int
    wrong: Sequence[Config]


def search(job: Job, timer: Timer) -> Found:
    """Returns the fastest parameters that a descent along one of them at a time finds."""
    wanted = job.run(job.default).clone()
    times: dict[tuple[int, ...], float] = {}
    wrong: list[Config] = []

    def measured(config: Config) -> float:
        """Returns the configuration's time; infinity where it cannot run or gives other bits."""
        key = tuple(config[name] for name in job.choices)
        if key not in times:
            times[key] = math.inf
            try:
                if torch.equal(job.run(config), wanted):
                    times[key] = timer(lambda: job.run(config))
                else:
                    wrong.append(config)
            except IMPOSSIBLE:
                pass  # too much shared memory or too many registers
        return times[key]

    best, default_ms = dict(job.default), measured(job.default)
    for _ in range(PASSES):
        for name, values in job.choices.items():
            best = min(({**best, name: value} for value in (best[name], *values)), key=measured)
    best_ms = measured(best)
    if job.rival is not None:
        other = {**best, **job.rival}
        with suppress(*IMPOSSIBLE):
            best, best_ms = min((best, best_ms), (other, timer(lambda: job.run(other))), key=itemgetter(1))
    return Found(best, default_ms, best_ms, len(times), wrong)


def grouped_jobs(
    experts: int, width: int, dim: int, top_k: int, dtype: torch.dtype, device: torch.device, kind: str = "plain"
) -> Iterator[Job]:
    """Yields both products of a layer of experts by number of tokens; rows go to random experts. kind: of the weights,
    plain, fp8 (in blocks, with rows in e4m3), int8 (a scale for each output) or int4 (one for each 128 inputs)."""
    make = {"plain": _plain, "fp8": _fp8}.get(kind, partial(_narrow, kind))
    products = make(experts, width, dim, dtype, device)
    for tokens in TOKENS:
        x = random(tokens, dim, dtype=dtype, device=device)
        ids = torch.rand(tokens, experts, device=device).topk(top_k).indices.int()

        def _run(config: Config, x: Tensor = x, ids: Tensor = ids) -> Tensor:
            config = deep_gemm.chosen(config)
            return products.run(x, align(ids, experts, config["block_m"]), config, top_k)

        size = tokens * top_k
        default = products.launch(size, *products.about, facts_of(device).name)
        rival = deep_gemm.WINS if kind == "fp8" and deep_gemm.obstacle(device) is None else None
        yield Job(products.family, products.shape, size, default, products.choices, _run, rival)


@dataclass(frozen=True, slots=True)
class _Products:
    """launch: default parameters, from the number of rows, `about` and the device's name. run: the products, from rows,
    alignment, parameters and choices per row."""

    family: str
    launch: Callable[..., Config]
    about: Sequence[Any]
    shape: str
    choices: Choices
    run: Callable[[Tensor, Alignment, Config, int], Tensor]


def _plain(experts: int, width: int, dim: int, dtype: torch.dtype, device: torch.device) -> _Products:
    w13, w2 = (random(experts, *size, dtype=dtype, device=device) for size in ((2 * width, dim), (dim, width)))
    about = experts, width, dim, dtype

    def _run(x: Tensor, to: Alignment, config: Config, top_k: int) -> Tensor:
        return grouped_gemm.down(grouped_gemm.gate_up(x, w13, to, config, top_k), w2, to, config)

    return _Products("grouped_gemm", grouped_gemm.launch_of, about, grouped_gemm.shape_of(*about), GROUPED, _run)


def _fp8(experts: int, width: int, dim: int, dtype: torch.dtype, device: torch.device) -> _Products:
    def _weights(rows: int, columns: int) -> grouped_fp8.Scaled:
        values = random(experts, rows, columns, dtype=dtype, device=device).to(E4M3)
        return grouped_fp8.Scaled(values, torch.ones((experts, rows // BLOCK, columns // BLOCK), device=device))

    w13, w2 = _weights(2 * width, dim), _weights(dim, width)

    def _run(x: Tensor, to: Alignment, config: Config, top_k: int) -> Tensor:
        hidden = deep_gemm.gate_up(grouped_fp8.Scaled(*quantise(x)), w13, to, config, top_k)
        return deep_gemm.down(hidden, w2, to, config, x.new_zeros((len(x) * top_k, dim)))

    about = experts, width, dim
    return _Products("grouped_fp8", grouped_fp8.launch_fp8_of, about, grouped_fp8.shape_of(*about), FP8, _run)


def _narrow(kind: str, experts: int, width: int, dim: int, dtype: torch.dtype, device: torch.device) -> _Products:
    def _weights(rows: int, columns: int) -> narrow.Narrow:
        values = torch.randint(0, 16, (experts, rows, columns), dtype=torch.uint8, device=device)
        group = 128 if kind == "int4" else columns
        scales = torch.full((experts, rows, -(-columns // group)), columns**-0.5 / 8, device=device)
        if kind == "int4":
            return narrow.pack_int4(values, scales, None, group)
        return narrow.Narrow(group, values.view(torch.int8), scales.transpose(1, 2).contiguous())

    w13, w2 = _weights(2 * width, dim), _weights(dim, width)

    def _run(x: Tensor, to: Alignment, config: Config, top_k: int) -> Tensor:
        hidden = narrow.gate_up_narrow(x, w13, to, config, top_k)
        return narrow.down_narrow(hidden, w2, to, config, x.new_zeros((len(hidden), dim)))

    about = experts, width, dim, kind, w2.group, dtype
    shape = narrow.shape_of(*about)
    return _Products("grouped_weight_only", narrow.launch_narrow_of, about, shape, GROUPED, _run)


def linear_jobs(width: int, inner: int, dtype: torch.dtype, device: torch.device) -> Iterator[Job]:
    """Yields a linear layer for each number of rows."""
    w = random(width, inner, dtype=dtype, device=device)
    for rows in TOKENS:
        x = random(rows, inner, dtype=dtype, device=device)
        default = dense.launch_of(rows, width, inner, dtype, facts_of(device).name)

        def _run(config: Config, x: Tensor = x) -> Tensor:
            return dense.linear(x, w, config=config)

        yield Job("linear", dense.shape_of(width, inner, dtype), rows, default, LINEAR, _run)


def attention_jobs(shape: AttentionShape, device: torch.device) -> Iterator[Job]:
    """Yields decode and prefill, one entry for each size of their programs."""
    per_row, seen = -(-CONTEXT // shape.block_size), set()
    cache = (ROWS * per_row + 1, shape.block_size, shape.kv_heads)
    k = random(*cache, shape.dim, dtype=shape.dtype, device=device)
    v = k[..., : shape.v_dim] if shape.latent else random(*cache, shape.v_dim, dtype=shape.dtype, device=device)
    blocks = (torch.randperm(ROWS * per_row, device=device).int() + 1).view(ROWS, per_row)
    for rows, new, invariant in ((ROWS, 1, True), (ROWS, 1, False), (1, PREFILL, True), (1, PREFILL, False)):
        starts = torch.full((rows,), CONTEXT - new, dtype=torch.int32, device=device)
        offsets = torch.arange(rows + 1, dtype=torch.int32, device=device) * new
        bounds = Bounds(rows, rows * new, new, CONTEXT)
        plan = paged_attention.plan_attention(blocks[:rows], starts, offsets, shape, bounds, invariant=invariant)
        q = random(rows * new, shape.heads, shape.dim, dtype=shape.dtype, device=device)
        block_m = plan.passes[0 if new == 1 else -1].block_m
        if block_m in seen:
            continue
        seen.add(block_m)

        def _run(config: Config, q: Tensor = q, plan: paged_attention.AttentionMetadata = plan) -> Tensor:
            return paged_attention.attention(q, k, v, plan, config=config)

        default = paged_attention.launch_of(shape, k.dtype, block_m, facts_of(device).name)
        name = paged_attention.shape_of(shape, k.dtype)
        yield Job("paged_attention", name, block_m, default, ATTENTION, _run)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns normal random numbers whose products with rows of normal numbers are normal, too."""
    return torch.randn(shape, dtype=dtype, device=device).mul_(shape[-1] ** -0.5)
