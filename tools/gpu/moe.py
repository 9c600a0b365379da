"""Times of the fused MoE, beside torch's and other engines' kernels.

It sorts rows, runs two grouped products and sums.

M tokens, K experts per token, E experts, I expert width, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moeserve.kernels import deep_gemm, flashinfer_moe
from moeserve.kernels.activation import act_mul
from moeserve.kernels.align import Alignment, align, combine
from moeserve.kernels.configs import Config, facts_of
from moeserve.kernels.fp8 import E4M3, quantize
from moeserve.kernels.grouped_fp8 import Scaled, down_fp8, gate_up_fp8, launch_fp8_of
from moeserve.kernels.grouped_gemm import down, gate_up, launch_of
from moeserve.kernels.grouped_weight_only import (
    Narrow,
    down_narrow,
    gate_up_narrow,
    launch_narrow_of,
)
from moeserve.ops.rules import SWIGLU
from tools.gpu.bench import Bench, Run, error_of, figures
from tools.gpu.peers import PeerMoe, load_peers

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FEWER = (1, 16, 64, 128, 256, 512, 2048, 4096, 16384)
ROUTINGS = 4  # batches through which calls rotate
MOST_ERROR = 1e-2


@dataclass(frozen=True, slots=True)
class Shape:
    experts: int
    width: int
    dim: int
    top_k: int

    def __str__(self) -> str:
        return f"E{self.experts} N{self.width} K{self.dim} top-{self.top_k}"


Routing = Literal["even", "skewed", "balanced"]


@dataclass(frozen=True, slots=True)
class Case:
    shape: Shape
    tokens: int
    routing: Routing

    def __str__(self) -> str:
        return f"{self.shape}, {self.tokens} tokens, {self.routing}"


SHAPES = (Shape(128, 768, 2048, 8), Shape(8, 14336, 4096, 2), Shape(64, 1408, 2048, 6))
SMOKE = Shape(4, 32, 64, 2)
CASES = [
    *(Case(SHAPES[0], tokens, "even") for tokens in TOKENS),
    # The sizes and the routing for which others have published times.
    *(Case(SHAPES[0], tokens, "balanced") for tokens in (1, 4, 16, 64, 256, 1024, 4096, 16384)),
    *(Case(SHAPES[0], tokens, "skewed") for tokens in (64, 512, 4096)),
    *(Case(shape, tokens, "even") for shape in SHAPES[1:] for tokens in FEWER),
]
NARROW = (1, 16, 64, 256, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class Weights:
    w13: Tensor
    w2: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens and their routes."""

    x: Tensor
    ids: Tensor
    shares: Tensor

    @property
    def distinct(self) -> int:
        return int(torch.unique(self.ids).numel())


def weights_of(bench: Bench, shape: Shape) -> Weights:
    return Weights(
        bench.random(shape.experts, 2 * shape.width, shape.dim, scale=shape.dim**-0.5),
        bench.random(shape.experts, shape.dim, shape.width, scale=shape.width**-0.5),
    )


def batch_of(bench: Bench, shape: Shape, tokens: int, routing: Routing = "even") -> Batch:
    """Return random tokens with a routing.

    even        experts are drawn without repetition, with equal probabilities
    skewed      with probabilities of 1 / rank
    balanced    experts take turns, so that as many as possible are needed, each equally often
    """
    shares = torch.rand(tokens, shape.top_k, device=bench.device)
    if routing == "balanced":
        ids = (
            torch.arange(tokens * shape.top_k, device=bench.device).view(tokens, -1) % shape.experts
        )
        ids = torch.randperm(shape.experts, device=bench.device)[ids]
    else:
        ranks = torch.arange(shape.experts, device=bench.device) + 1.0
        ids = torch.multinomial(
            (ranks**-1 if routing == "skewed" else ranks**0).expand(tokens, -1), shape.top_k
        )
    return Batch(bench.random(tokens, shape.dim), ids.int(), shares / shares.sum(1, keepdim=True))


def work_of(shape: Shape, batches: Sequence[Batch], byte_share: float = 1.0) -> dict[str, int]:
    """Return a step's operations, and the mean bytes of the weights that it needs.

    byte_share is the size of a weight relative to bf16.
    """
    weights = sum(batch.distinct for batch in batches) / len(batches) * 3 * shape.width * shape.dim
    flops = 2 * len(batches[0].x) * shape.top_k * 3 * shape.width * shape.dim
    return {"num_bytes": int(2 * weights * byte_share), "flops": flops}


def products(batch: Batch, w: Weights, to: Alignment, config: Config, top_k: int) -> Tensor:
    return down(gate_up(batch.x, w.w13, to, config, top_k), w.w2, to, config)


def whole(batch: Batch, w: Weights, config: Config, shape: Shape) -> Tensor:
    """Run what a layer runs after its router: sort, multiply, sum."""
    to = align(batch.ids, shape.experts, config["block_m"])
    y = products(batch, w, to, config, shape.top_k)
    return combine(y.view(*batch.ids.shape, shape.dim), batch.shares, batch.ids)


def reference(batch: Batch, w: Weights) -> Tensor:
    """Compute it in fp32, expert by expert; the intermediate is rounded as in kernels."""
    out = torch.zeros_like(batch.x, dtype=torch.float32)
    for expert in torch.unique(batch.ids).tolist():
        tokens, places = (batch.ids == expert).nonzero(as_tuple=True)
        gate, up = (batch.x[tokens].float() @ w.w13[expert].float().T).chunk(2, -1)
        hidden = (torch.nn.functional.silu(gate) * up).to(batch.x.dtype).float()
        out.index_add_(
            0, tokens, batch.shares[tokens, places, None] * (hidden @ w.w2[expert].float().T)
        )
    return out


def torch_grouped(batch: Batch, w: Weights, shape: Shape) -> Run | None:
    """Return torch's grouped product over gathered rows, or None if torch has none."""
    if batch.x.device.type != "cuda" or not hasattr(torch, "_grouped_mm"):
        return None
    flat = batch.ids.flatten()
    rows = batch.x[flat.argsort(stable=True) // shape.top_k]
    ends = flat.bincount(minlength=shape.experts).cumsum(0).int()
    w13 = w.w13.transpose(-1, -2)
    w2 = w.w2.transpose(-1, -2)
    return lambda: torch._grouped_mm(
        act_mul(torch._grouped_mm(rows, w13, offs=ends), SWIGLU), w2, offs=ends
    )


class FlashInferMoe:
    """FlashInfer's fused experts. They also sort and sum rows: compare with our whole layer."""

    def __init__(self, w13: Tensor) -> None:
        self._w31 = flashinfer_moe.swapped(w13)

    def prepare(self, x: Tensor, ids: Tensor, shares: Tensor, w13: Tensor, w2: Tensor) -> Run:
        """Return a call that includes everything; its result is [M, 1, D]."""
        return lambda: flashinfer_moe.fused_moe(x, ids, shares, self._w31, w2)[:, None]


def compared(
    bench: Bench, case: Case, w: Weights, peers: Mapping[str, PeerMoe | FlashInferMoe]
) -> Any:
    """Time our products and the peers' on the same routes, and our whole layer beside FlashInfer's.

    For the products, each side's rows are sorted outside the timing.
    """
    shape = case.shape
    tokens = case.tokens
    batches = [
        batch_of(bench, shape, tokens, case.routing) for _ in range(ROUTINGS if bench.times else 1)
    ]
    config = launch_of(
        tokens * shape.top_k,
        shape.experts,
        shape.width,
        shape.dim,
        bench.dtype,
        facts_of(bench.device).name,
    )
    aligned = [align(batch.ids, shape.experts, config["block_m"]) for batch in batches]
    pairs = list(zip(batches, aligned, strict=True))
    candidates: dict[str, list[Run]] = {
        "moeserve": [partial(products, batch, w, to, config, shape.top_k) for batch, to in pairs],
        "moeserve layer": [partial(whole, batch, w, config, shape) for batch in batches],
    }
    grouped = [run for batch in batches if (run := torch_grouped(batch, w, shape)) is not None]
    if grouped:
        candidates["torch grouped_mm"] = grouped
    exact = reference(batches[0], w)
    errors = {"moeserve": error_of(whole(batches[0], w, config, shape), exact)}
    notes = {}
    for name, peer in peers.items():
        runs = [peer.prepare(batch.x, batch.ids, batch.shares, w.w13, w.w2) for batch in batches]
        try:
            errors[name] = error_of(runs[0]().float().sum(1), exact)
        except Exception as error:
            notes[name] = f"left out: {type(error).__name__}: {error}"[:300]
            continue
        if errors[name] < MOST_ERROR:
            candidates[name] = list(runs)
        else:
            notes[name] = f"left out: its result is off by {errors[name]:.2g}"
    work = work_of(shape, batches)
    may_fail = candidates.keys() - {"moeserve", "moeserve layer"}
    found = {
        name: figures(samples, **work) for name, samples in bench.time(candidates, may_fail).items()
    }
    ours = {
        name: found["moeserve layer" if name == "flashinfer" else "moeserve"]["us"]
        for name in found
    }
    ratios = {
        name: f["us"] / ours[name]
        for name, f in found.items()
        if ours[name] and "moeserve" not in name
    }
    return {
        "shape": str(shape),
        "tokens": tokens,
        "routing": case.routing,
        "config": dict(config),
        "distinct_experts": [batch.distinct for batch in batches],
        "errors": errors,
        "figures": found,
        "ratios": ratios,
        "notes": notes,
    }


def fp8_case(bench: Bench, shape: Shape, tokens: int) -> Any:
    """Time e4m3 weights and rows with block scales; rows are quantized outside the timing."""

    def scaled(*size: int) -> Scaled:
        values = torch.randn(size, device=bench.device).to(E4M3)
        return Scaled(
            values,
            torch.rand(size[0], size[1] // 128, -(-size[2] // 128), device=bench.device) / 64,
        )

    w13 = scaled(shape.experts, 2 * shape.width, shape.dim)
    w2 = scaled(shape.experts, shape.dim, shape.width)
    batch = batch_of(bench, shape, tokens)
    config = launch_fp8_of(
        tokens * shape.top_k, shape.experts, shape.width, shape.dim, facts_of(bench.device).name
    )
    to = align(batch.ids, shape.experts, config["block_m"])
    x = Scaled(*quantize(batch.x))
    out = bench.random(tokens * shape.top_k, shape.dim)
    run = lambda: down_fp8(gate_up_fp8(x, w13, to, config, shape.top_k), w2, to, config, out)  # noqa: E731
    candidates = {"w8a8": [run]}
    why = deep_gemm.unsupported_reason(bench.device)
    if why is None:
        tiles = align(batch.ids, shape.experts, deep_gemm.TILE)
        chosen = deep_gemm.CONFIG
        candidates["deep_gemm"] = [
            lambda: deep_gemm.down(
                deep_gemm.gate_up(x, w13, tiles, chosen, shape.top_k), w2, tiles, chosen, out
            )
        ]
    found = {
        name: figures(samples, **work_of(shape, [batch], 0.5))
        for name, samples in bench.time(candidates, {"deep_gemm"}).items()
    }
    return {
        "tokens": tokens,
        "config": dict(config),
        **found.pop("w8a8"),
        "deep_gemm": found.get("deep_gemm", why),
    }


def int4_case(bench: Bench, shape: Shape, tokens: int) -> Any:
    """Time 4-bit weights with a scale per 128 inputs, and bf16 rows."""
    group = 32 if bench.smoke else 128

    def packed(outputs: int, inputs: int) -> Narrow:
        size = (shape.experts, outputs, inputs // 2)
        values = torch.randint(0, 256, size, dtype=torch.uint8, device=bench.device)
        return Narrow(
            group, values, bench.random(shape.experts, inputs // group, outputs, scale=0.01)
        )

    w13 = packed(2 * shape.width, shape.dim)
    w2 = packed(shape.dim, shape.width)
    batch = batch_of(bench, shape, tokens)
    rows = tokens * shape.top_k
    device = facts_of(bench.device).name
    config = launch_narrow_of(
        rows, shape.experts, shape.width, shape.dim, "int4", group, bench.dtype, device
    )
    to = align(batch.ids, shape.experts, config["block_m"])
    run = lambda: down_narrow(gate_up_narrow(batch.x, w13, to, config, shape.top_k), w2, to, config)  # noqa: E731
    samples = bench.time({"int4": [run]})["int4"]
    return {
        "tokens": tokens,
        "config": dict(config),
        **figures(samples, **work_of(shape, [batch], 0.25 + 1 / group)),
    }


def run(bench: Bench, peers_folder: Path | None) -> None:
    peers, notes = load_peers(peers_folder)
    if not bench.part[0]:
        why = flashinfer_moe.unsupported_reason(bench.device, blocks=False)
        bench.found["peers"] = notes | ({"flashinfer": why} if why else {})

    @lru_cache(maxsize=1)
    def made(shape: Shape) -> tuple[Weights, dict[str, PeerMoe | FlashInferMoe]]:
        torch.cuda.empty_cache()
        weights = weights_of(bench, shape)
        them = dict[str, PeerMoe | FlashInferMoe]()
        for name, peer in peers.items():
            them[name] = PeerMoe(peer, shape.experts, shape.width, shape.dim)
        if flashinfer_moe.unsupported_reason(bench.device, blocks=False) is None:
            them["flashinfer"] = FlashInferMoe(weights.w13)
        return weights, them

    def measure(case: Case) -> Any:
        found = compared(bench, case, *made(case.shape))
        if not found["errors"]["moeserve"] < MOST_ERROR:
            bench.found["wrong"].append(f"cases {case}")
        return found

    bench.each(
        "cases",
        [Case(SMOKE, 3, "even"), Case(SMOKE, 5, "balanced")] if bench.smoke else CASES,
        measure,
    )
    made.cache_clear()
    first = Shape(4, 128, 128, 2) if bench.smoke else SHAPES[0]
    if not bench.smoke:  # the interpreter has no products of e4m3
        bench.each("w8a8", NARROW, lambda tokens: fp8_case(bench, first, tokens))
    bench.each(
        "int4", (3,) if bench.smoke else NARROW, lambda tokens: int4_case(bench, first, tokens)
    )
