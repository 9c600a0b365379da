"""Autotuning for `moeserve tune`: search the fastest launch parameters of each kernel.

The search measures the configs that cost.py predicts to be fastest. Then it changes one parameter
at a time (coordinate descent). Launch parameters must not change results: a config whose bits
differ from those of the defaults is dropped. Parameters that do change bits are not tuned: the
depth of a step over K, and the number of warps that share the positions of attention.

Sizes: M rows, T tokens, E experts, K experts per token, D model width, I expert width.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from moeserve.kernels import (
    cost,
    deep_gemm,
    flash_attention,
    flashinfer_moe,
    grouped_fp8,
    grouped_gemm,
    grouped_weight_only,
    linear,
    paged_attention,
    tiles,
)
from moeserve.kernels.align import Alignment, align
from moeserve.kernels.attention_plan import Bounds
from moeserve.kernels.configs import Config, facts_of
from moeserve.kernels.fp8 import BLOCK, E4M3, quantize
from moeserve.kernels.paged_attention import AttentionShape

Choices = Mapping[str, Sequence[int]]
Timer = Callable[[Callable[[], object]], float]  # returns the milliseconds of a call
# Parameters of each product that need a compilation
COMPILED_PARAMETERS = ("block_n", "warps", "stages")
Key = tuple[str, int, int, int, int]  # a product, block_m, and its COMPILED_PARAMETERS

NUM_PASSES = 2  # over all parameters, because the best value of one may depend on a later one
NUM_TRIES = 10  # configs to measure, among those that are predicted to be fastest
TIE_SHARE = 0.005  # added to a predicted time for each parameter that is not the default
BLOCKS = (64, 128, 256)
WARPS = (4, 8)
STAGES = (2, 3, 4, 5, 6)
GROUPS = (1, 4, 8, 16)
GROUPED: Choices = {
    "block_m": (16, 32, 64, 128), "up_block_n": BLOCKS, "up_warps": WARPS,
    "up_stages": (2, 3, 4, 5),
    "down_block_n": BLOCKS, "down_warps": WARPS, "down_stages": (2, 3, 4, 5), "group": GROUPS,
    "tma": (0, 1),
}  # fmt: skip
FP8: Choices = {**GROUPED, "block_m": (16, 32, 64), "up_block_n": (128,), "down_block_n": (64, 128)}
LINEAR: Choices = {
    "block_m": (16, 32, 64, 128), "block_n": BLOCKS, "warps": WARPS, "stages": (3, 4, 5, 6),
    "group": GROUPS,
    "tma": (0, 1),
}  # fmt: skip
ATTENTION: Choices = {
    "num_stages": (2, 3, 5, 7),  # 4 and 6 are equivalent to 3 and 5
    "programs": (4, 8, 32),
}
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 16_384)
CONTEXT_LENGTH = 4096  # tokens, of attention
DECODE_ROWS = 64
PREFILL_TOKENS = 2048
# Raised for configs that cannot run. RuntimeError: a pass of the compiler failed.
CANNOT_RUN = (OutOfResources, PTXASError, CompilationError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Job:
    """One entry of a config table that is to be tuned."""

    family: str
    shape: str
    size: int
    default: Config
    choices: Choices  # values to try for each parameter
    run: Callable[[Config], Tensor]  # run the kernel on random data, the same at each call
    # The GEMMs that `run` launches last, by the prefix of their parameters' names. Empty if cost.py
    # cannot predict the kernel.
    products: Mapping[str, cost.Product] = field(default_factory=dict)
    # Parameters that select the kernel of an optional package, whose bits may differ.
    rival: Config | None = None


Maker = Callable[..., Iterator[Job]]  # makes the jobs of a shape on a `device`


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search."""

    config: Config
    default_ms: float
    best_ms: float
    num_tried: int
    wrong_configs: Sequence[Config]  # that gave other bits than the defaults


def search(
    job: Job, timer: Timer, first: Iterable[Config] = (), passes: int = NUM_PASSES
) -> SearchResult:
    """Search the fastest config by coordinate descent.

    The descent begins at the fastest of the defaults and `first`.
    """
    expected = job.run(job.default).clone()
    times: dict[tuple[int, ...], float] = {}
    wrong_configs: list[Config] = []

    def measured(config: Config) -> float:
        # Infinity if the config cannot run or gives other bits.
        key = tuple(config[name] for name in job.choices)
        if key not in times:
            times[key] = math.inf
            try:
                if torch.equal(job.run(config), expected):
                    times[key] = timer(lambda: job.run(config))
                else:
                    wrong_configs.append(config)
            except CANNOT_RUN:
                pass  # too much shared memory or too many registers
        return times[key]

    default_ms = measured(job.default)
    best: Config = min((job.default, *first), key=measured)
    for _ in range(passes):
        for name, values in job.choices.items():
            best = min(({**best, name: value} for value in (best[name], *values)), key=measured)
    best_ms = measured(best)
    if job.rival is not None:
        rival = {**best, **job.rival}
        with suppress(*CANNOT_RUN):
            best, best_ms = min(
                (best, best_ms), (rival, timer(lambda: job.run(rival))), key=itemgetter(1)
            )
    return SearchResult(
        config=best,
        default_ms=default_ms,
        best_ms=best_ms,
        num_tried=len(times),
        wrong_configs=wrong_configs,
    )


def _key(name: str, config: Config) -> Key:
    block_n, warps, stages = (config[f"{name}{part}"] for part in COMPILED_PARAMETERS)
    return name, config["block_m"], block_n, warps, stages


def variants(job: Job) -> list[Config]:
    """Return configs that together use every variant of the kernels that needs a compilation."""
    configs = {}
    for block_m, *values in itertools.product(job.choices["block_m"], BLOCKS, WARPS, STAGES):
        wanted = {
            f"{name}{part}": v
            for name in job.products
            for part, v in zip(COMPILED_PARAMETERS, values, strict=True)
        }
        possible = {name: value for name, value in wanted.items() if value in job.choices[name]}
        config = {**job.default, "block_m": block_m, **possible}
        configs[tuple(config.values())] = config
    return list(configs.values())


def compile_variant(make: Maker, config: Config) -> dict[Key, cost.Facts]:
    """Compile the kernels of a shape's products, and return facts about them; {} if that fails.

    Call `cost.compile_only` before.
    """
    job = next(make(device=torch.device("meta")))
    try:
        all_facts = cost.compiled_by(lambda: job.run(config), len(job.products))
        return {
            _key(name, config): facts for name, facts in zip(job.products, all_facts, strict=True)
        }
    except CANNOT_RUN:
        return {}


def ranked(job: Job, facts: Mapping[Key, cost.Facts], card: cost.Card) -> list[Config]:
    """Return up to NUM_TRIES configs that are predicted to be fastest.

    Any two differ in more than one parameter, because others take nearly the same time.
    """
    names = [name for name in job.choices if name != "tma"]
    every = ({**job.default, **dict(zip(names, values, strict=True))}
             for values in itertools.product(*(job.choices[name] for name in names)))  # fmt: skip
    predict = predictor(job, facts, card)
    best_configs: list[Config] = []
    for predicted_s, config in sorted(((predict(c), c) for c in every), key=lambda pair: pair[0]):
        if len(best_configs) == NUM_TRIES or math.isinf(predicted_s):
            break
        if all(sum(config[name] != other[name] for name in names) > 1 for other in best_configs):
            best_configs.append(config)
    return best_configs


def predictor(
    job: Job, facts: Mapping[Key, cost.Facts], card: cost.Card
) -> Callable[[Config], float]:
    """Return a function that predicts the seconds of a config.

    Each parameter that is not the default adds TIE_SHARE, to break ties. Kernels without facts take
    infinitely long.
    """

    @cache
    def seconds(key: Key, group: int) -> float:
        block_m, *values = key[1:]
        config = {
            "block_m": block_m,
            "group": group,
            **dict(zip(COMPILED_PARAMETERS, values, strict=True)),
        }
        if key not in facts:
            return math.inf
        return cost.seconds(facts[key], job.products[key[0]], card, config)

    def predict(config: Config) -> float:
        total = sum(seconds(_key(name, config), config["group"]) for name in job.products)
        return total * (
            1 + TIE_SHARE * sum(config[name] != job.default[name] for name in job.choices)
        )

    return predict


def grouped_jobs(
    experts: int,
    width: int,
    dim: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
    kind: str = "plain",
) -> Iterator[Job]:
    """Yield a job for each number of tokens: both products of an MoE layer with random routing.

    kind: the format of the weights: plain, fp8 (block scales, activations in e4m3), int8 (one scale
        per output), int4 (one scale per 128 inputs) or fp4 (MXFP4, one scale per 32 inputs).
    """
    make = {"plain": _plain_products, "fp8": _fp8_products}.get(
        kind, partial(_weight_only_products, kind)
    )
    products = make(experts, width, dim, dtype, device)
    for tokens in TOKENS:
        x = random(tokens, dim, dtype=dtype, device=device)
        ids = torch.rand(tokens, experts, device=device).topk(top_k).indices.int()

        def _run(config: Config, x: Tensor = x, ids: Tensor = ids) -> Tensor:
            if config.get("flashinfer"):
                # This includes the combine, which is not in our time, so FlashInfer must win by
                # more.
                return flashinfer_moe.fused_moe(
                    x, ids, torch.ones(ids.shape, device=device), *products.weights
                )
            config = deep_gemm.with_deep_gemm(config)
            return products.run(x, align(ids, experts, config["block_m"]), config, top_k)

        size = tokens * top_k
        default = products.launch(size, *products.launch_args, facts_of(device).name)
        up = replace(products.up, rows=size)
        both = {"up_": up, "down_": replace(up, width=dim, inner=width, matrices=1)}
        rival = None
        if kind == "fp8" and deep_gemm.unsupported_reason(device) is None:
            rival = deep_gemm.FASTER
        if (
            kind == "plain"
            and dtype != torch.float32
            and flashinfer_moe.unsupported_reason(device, False) is None
        ):
            rival = flashinfer_moe.FASTER
        yield Job(
            family=products.family,
            shape=products.shape,
            size=size,
            default=default,
            choices=products.choices,
            run=_run,
            products=both,
            rival=rival,
        )


@dataclass(frozen=True, slots=True)
class _Products:
    """Both products of an MoE layer in one weight format."""

    family: str
    # Returns the default config. Called with rows, *launch_args, name of the device
    launch: Callable[..., Config]
    launch_args: Sequence[Any]
    shape: str
    choices: Choices
    run: Callable[[Tensor, Alignment, Config, int], Tensor]  # called with the last one as top_k
    up: cost.Product  # gate and up, without rows
    weights: tuple[Tensor, ...] = ()  # for FlashInfer, whose order of gate and up does not matter


def _plain_products(
    experts: int, width: int, dim: int, dtype: torch.dtype, device: torch.device
) -> _Products:
    w13, w2 = (
        random(experts, *size, dtype=dtype, device=device)
        for size in ((2 * width, dim), (dim, width))
    )
    launch_args = experts, width, dim, dtype

    def _run(x: Tensor, alignment: Alignment, config: Config, top_k: int) -> Tensor:
        return grouped_gemm.down(
            grouped_gemm.gate_up(x, w13, alignment, config, top_k), w2, alignment, config
        )

    up = cost.Product(
        rows=0,
        experts=experts,
        width=width,
        inner=dim,
        depth=tiles.block_k(dim, dtype),
        matrices=2,
        weight_bytes=dtype.itemsize,
        row_bytes=dtype.itemsize,
    )
    return _Products(
        family="grouped_gemm",
        launch=grouped_gemm.launch_of,
        launch_args=launch_args,
        shape=grouped_gemm.shape_of(*launch_args),
        choices=GROUPED,
        run=_run,
        up=up,
        weights=(w13, w2),
    )


def _fp8_products(
    experts: int, width: int, dim: int, dtype: torch.dtype, device: torch.device
) -> _Products:
    def _weights(rows: int, columns: int) -> grouped_fp8.Scaled:
        values = random(experts, rows, columns, dtype=dtype, device=device).to(E4M3)
        return grouped_fp8.Scaled(
            values, torch.ones((experts, rows // BLOCK, columns // BLOCK), device=device)
        )

    w13 = _weights(2 * width, dim)
    w2 = _weights(dim, width)

    def _run(x: Tensor, alignment: Alignment, config: Config, top_k: int) -> Tensor:
        hidden = deep_gemm.gate_up(grouped_fp8.Scaled(*quantize(x)), w13, alignment, config, top_k)
        return deep_gemm.down(hidden, w2, alignment, config, x.new_zeros((len(x) * top_k, dim)))

    launch_args = experts, width, dim
    up = cost.Product(
        rows=0,
        experts=experts,
        width=width,
        inner=dim,
        depth=BLOCK,
        matrices=2,
        weight_bytes=1,
        row_bytes=1,
    )
    return _Products(
        family="grouped_fp8",
        launch=grouped_fp8.launch_fp8_of,
        launch_args=launch_args,
        shape=grouped_fp8.shape_of(*launch_args),
        choices=FP8,
        run=_run,
        up=up,
    )


def _weight_only_products(
    kind: str, experts: int, width: int, dim: int, dtype: torch.dtype, device: torch.device
) -> _Products:
    def _weights(rows: int, columns: int) -> grouped_weight_only.Narrow:
        values = torch.randint(0, 16, (experts, rows, columns), dtype=torch.uint8, device=device)
        group = {"int4": 128, "fp4": 32}.get(kind, columns)
        scales = torch.full((experts, rows, -(-columns // group)), columns**-0.5 / 8, device=device)
        if kind != "int8":
            return grouped_weight_only.pack_int4(values, scales, None, group, floats=kind == "fp4")
        return grouped_weight_only.Narrow(
            group, values.view(torch.int8), scales.transpose(1, 2).contiguous()
        )

    w13 = _weights(2 * width, dim)
    w2 = _weights(dim, width)

    def _run(x: Tensor, alignment: Alignment, config: Config, top_k: int) -> Tensor:
        hidden = grouped_weight_only.gate_up_narrow(x, w13, alignment, config, top_k)
        return grouped_weight_only.down_narrow(
            hidden, w2, alignment, config, x.new_zeros((len(hidden), dim))
        )

    launch_args = experts, width, dim, kind, w2.group, dtype
    shape = grouped_weight_only.shape_of(*launch_args)
    up = cost.Product(
        rows=0,
        experts=experts,
        width=width,
        inner=dim,
        depth=w2.half * (2 if w2.in_pairs else 1),
        matrices=2,
        weight_bytes=(w2.values.nbytes + w2.scales.nbytes) / math.prod(w2.shape),
        row_bytes=dtype.itemsize,
    )
    return _Products(
        family="grouped_weight_only",
        launch=grouped_weight_only.launch_narrow_of,
        launch_args=launch_args,
        shape=shape,
        choices=GROUPED,
        run=_run,
        up=up,
    )


def linear_jobs(width: int, inner: int, dtype: torch.dtype, device: torch.device) -> Iterator[Job]:
    """Yield a job for each number of rows of a linear layer."""
    w = random(width, inner, dtype=dtype, device=device)
    for rows in TOKENS:
        x = random(rows, inner, dtype=dtype, device=device)
        default = linear.launch_of(rows, width, inner, dtype, facts_of(device).name)

        def _run(config: Config, x: Tensor = x) -> Tensor:
            return linear.linear(x, w, config=config)

        product = cost.Product(
            rows=rows,
            experts=1,
            width=width,
            inner=inner,
            depth=tiles.block_k(inner, dtype),
            matrices=1,
            weight_bytes=dtype.itemsize,
            row_bytes=dtype.itemsize,
        )
        yield Job(
            family="linear",
            shape=linear.shape_of(width, inner, dtype),
            size=rows,
            default=default,
            choices=LINEAR,
            run=_run,
            products={"": product},
        )


def attention_jobs(shape: AttentionShape, device: torch.device) -> Iterator[Job]:
    """Yield a job for each program size of decode and prefill."""
    per_row = -(-CONTEXT_LENGTH // shape.block_size)
    seen = set()
    cache = (DECODE_ROWS * per_row + 1, shape.block_size, shape.kv_heads)
    k = random(*cache, shape.dim, dtype=shape.dtype, device=device)
    if shape.latent:
        v = k[..., : shape.v_dim]
    else:
        v = random(*cache, shape.v_dim, dtype=shape.dtype, device=device)
    misfit = flash_attention.misfit(
        shape.dim, shape.v_dim, latent=shape.latent
    ) or flash_attention.unsupported_reason(device)
    flash_sizes = [] if misfit else paged_attention.tile_rows(shape, invariant=False)
    blocks = (torch.randperm(DECODE_ROWS * per_row, device=device).int() + 1).view(
        DECODE_ROWS, per_row
    )
    for rows, new, invariant in (
        (DECODE_ROWS, 1, True),
        (DECODE_ROWS, 1, False),
        (1, PREFILL_TOKENS, True),
        (1, PREFILL_TOKENS, False),
    ):
        starts = torch.full((rows,), CONTEXT_LENGTH - new, dtype=torch.int32, device=device)
        offsets = torch.arange(rows + 1, dtype=torch.int32, device=device) * new
        inputs = (
            blocks[:rows],
            starts,
            offsets,
            shape,
            Bounds(rows, rows * new, new, CONTEXT_LENGTH),
        )
        plan = paged_attention.plan_attention(*inputs, invariant=invariant)
        q = random(rows * new, shape.heads, shape.dim, dtype=shape.dtype, device=device)
        block_m = plan.passes[0 if new == 1 else -1].block_m
        if block_m in seen:
            continue
        seen.add(block_m)
        flash_plan = (
            flash_attention.plan_attention(*inputs, tokens=len(q))
            if block_m in flash_sizes
            else None
        )

        def _run(
            config: Config, q: Tensor = q, plan: Any = plan, flash_plan: Any = flash_plan
        ) -> Tensor:
            if config.get("fa3"):
                return flash_attention.attention(q, k, v, flash_plan)
            return paged_attention.attention(q, k, v, plan, config=config)

        default = paged_attention.launch_of(shape, k.dtype, block_m, facts_of(device).name)
        name = paged_attention.shape_of(shape, k.dtype)
        rival = flash_attention.FASTER if flash_plan else None
        yield Job(
            family="paged_attention",
            shape=name,
            size=block_m,
            default=default,
            choices=ATTENTION,
            run=_run,
            rival=rival,
        )


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normal random numbers, scaled by 1 / sqrt(last dimension).

    So a GEMM of them with standard normal numbers has standard normal outputs.
    """
    return torch.randn(shape, dtype=dtype, device=device).mul_(shape[-1] ** -0.5)
