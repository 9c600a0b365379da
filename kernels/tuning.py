"""Searches for launch parameters by measuring, one parameter at a time from the defaults on.

What a kernel computes does not depend on them; a candidate whose bits differ from the defaults' is dropped all the
same. How deep a step over K is, on which bits do depend, is no parameter. M rows, T tokens, E experts, K of them per
token, D model width, I expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from moeserve.kernels import grouped_gemm, paged_attention
from moeserve.kernels import linear as dense
from moeserve.kernels.align import align
from moeserve.kernels.attention_plan import Bounds
from moeserve.kernels.configs import Config
from moeserve.kernels.devices import facts_of
from moeserve.kernels.paged_attention import AttentionShape

Choices = Mapping[str, Sequence[int]]
Timer = Callable[[Callable[[], object]], float]  # milliseconds of a call

PASSES = 2  # over all parameters: the best value of one may depend on a later one
BLOCKS, WARPS, GROUPS = (64, 128, 256), (4, 8), (1, 4, 8, 16)
GROUPED: Choices = {
    "block_m": (16, 32, 64, 128), "up_block_n": BLOCKS, "up_warps": WARPS, "up_stages": (2, 3, 4, 5),
    "down_block_n": BLOCKS, "down_warps": WARPS, "down_stages": (2, 3, 4, 5), "group": GROUPS, "tma": (0, 1),
}  # fmt: skip
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
    """One entry of a table. run: the kernel over random data with these parameters, anew at each call."""

    family: str
    shape: str
    size: int
    default: Config
    choices: Choices
    run: Callable[[Config], Tensor]


@dataclass(frozen=True, slots=True)
class Found:
    """wrong: candidates that gave other bits than the defaults."""

    config: Config
    default_ms: float
    best_ms: float
    tried: int
    wrong: Sequence[Config]


def search(job: Job, timer: Timer) -> Found:
    """The fastest parameters that a descent along one of them at a time finds."""
    wanted = job.run(job.default).clone()
    times: dict[tuple[int, ...], float] = {}
    wrong: list[Config] = []

    def measured(config: Config) -> float:
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
    return Found(best, default_ms, measured(best), len(times), wrong)


def grouped_jobs(
    experts: int, width: int, dim: int, top_k: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Job]:
    """Both products of a layer of experts, by the number of tokens; rows go to random experts."""
    w13 = random(experts, 2 * width, dim, dtype=dtype, device=device)
    w2 = random(experts, dim, width, dtype=dtype, device=device)
    name = facts_of(device).name
    for tokens in TOKENS:
        x = random(tokens, dim, dtype=dtype, device=device)
        ids = torch.rand(tokens, experts, device=device).topk(top_k).indices.int()

        def run(config: Config, x: Tensor = x, ids: Tensor = ids) -> Tensor:
            to = align(ids, experts, config["block_m"])
            return grouped_gemm.down(grouped_gemm.gate_up(x, w13, to, config, top_k), w2, to, config)

        default = grouped_gemm.launch_of(tokens * top_k, experts, width, dim, dtype, name)
        shape = grouped_gemm.shape_of(experts, width, dim, dtype)
        yield Job("grouped_gemm", shape, tokens * top_k, default, GROUPED, run)


def linear_jobs(width: int, inner: int, dtype: torch.dtype, device: torch.device) -> Iterator[Job]:
    """A linear layer, by the number of rows."""
    w = random(width, inner, dtype=dtype, device=device)
    for rows in TOKENS:
        x = random(rows, inner, dtype=dtype, device=device)
        default = dense.launch_of(rows, width, inner, dtype, facts_of(device).name)

        def run(config: Config, x: Tensor = x) -> Tensor:
            return dense.linear(x, w, config=config)

        yield Job("linear", dense.shape_of(width, inner, dtype), rows, default, LINEAR, run)


def attention_jobs(shape: AttentionShape, device: torch.device) -> Iterator[Job]:
    """Decode and prefill, each with the programs that they take; one entry for each size of those."""
    per_row, seen = -(-CONTEXT // shape.block_size), set()
    cache = (ROWS * per_row + 1, shape.block_size, shape.kv_heads, shape.head_dim)
    k, v = (random(*cache, dtype=shape.dtype, device=device) for _ in range(2))
    blocks = (torch.randperm(ROWS * per_row, device=device).int() + 1).view(ROWS, per_row)
    for rows, new, invariant in ((ROWS, 1, True), (ROWS, 1, False), (1, PREFILL, True), (1, PREFILL, False)):
        starts = torch.full((rows,), CONTEXT - new, dtype=torch.int32, device=device)
        offsets = torch.arange(rows + 1, dtype=torch.int32, device=device) * new
        bounds = Bounds(rows, rows * new, new, CONTEXT)
        plan = paged_attention.plan_attention(blocks[:rows], starts, offsets, shape, bounds, invariant=invariant)
        q = random(rows * new, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
        block_m = plan.passes[0 if new == 1 else -1].block_m
        if block_m in seen:
            continue
        seen.add(block_m)

        def run(config: Config, q: Tensor = q, plan: paged_attention.AttentionPlan = plan) -> Tensor:
            return paged_attention.attention(q, k, v, plan, config=config)

        default = paged_attention.launch_of(shape, k.dtype, block_m, facts_of(device).name)
        name = paged_attention.shape_of(shape, k.dtype)
        yield Job("paged_attention", name, block_m, default, ATTENTION, run)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Products of them with rows of normal numbers are normal, too."""
    return torch.randn(shape, dtype=dtype, device=device).mul_(shape[-1] ** -0.5)
