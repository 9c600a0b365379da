"""Check weights in 4 and 8 bits, from `Quantized` to products: their values and batch invariance.

fp8 is in blocks of 128 x 128, for which experts also round rows to e4m3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.kernels.align import align, combine
from moeserve.kernels.fp8 import E4M3
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.triton import PackedTriton, TritonExperts
from moeserve.ops.quantized import Quantized, dequantized
from moeserve.ops.triton_ops import QuantizedLinear
from tools.gpu import moe
from tools.gpu.bench import Bench
from tools.gpu.references import quantize_reference, widen

KINDS = ("int4", "int8", "fp8", "fp4")
PRODUCT = 1e-2
ROUNDED = 2e-2  # bound where sums close to a tie may round to another e4m3 value
UNFIT_FOR_SMOKE = ("experts fp8",)  # the interpreter rounds to e4m3 wrongly
# Numbers of rows; a smoke run has 3, once.
FEW = 1
MANY = 700


def weights(bench: Bench, kind: Any, *shape: int) -> Quantized:
    """Return random values with varying scales."""
    rows = 128 if kind == "fp8" else 1
    group = {"int4": 128, "fp4": 16, "fp8": 128}.get(kind, 0)
    group = 32 if bench.smoke and kind != "fp8" else group
    into = replace(
        Quantized.empty(kind, group, kind == "int4", bench.dtype, shape, bench.device), rows=rows
    )
    plain = torch.randn(shape, device=bench.device)
    if kind == "fp8":
        into.values.copy_((plain * 32).to(E4M3).view(torch.uint8))
    elif kind == "fp4":
        into.values.random_(0, 16)
    else:
        plain = (plain * (3 if kind == "int4" else 32)).round() + (8 if kind == "int4" else 0)
        into.values.copy_(plain.clamp(*((0, 15) if kind == "int4" else (-127, 127))))
    scales = (
        torch.rand(*shape[:-2], -(-shape[-2] // rows), into.scales.shape[-1], device=bench.device)
        + 0.5
    )
    scales = scales.repeat_interleave(rows, -2)[..., : shape[-2], :]
    into.scales.copy_(scales * shape[-1] ** -0.5 / (3 if kind.endswith("4") else 32))
    if into.zeros is not None:
        into.zeros.copy_(torch.randint(6, 10, into.zeros.shape, device=bench.device))
    return into


def dense(bench: Bench, kind: str, rows: int) -> tuple[Tensor, Tensor, float]:
    """Check a dense product with a bias, as Qwen2 has it."""
    inner, width = (64, 80) if bench.smoke else (2048, 5120)
    x = bench.random(3 if bench.smoke else rows, inner)
    bias = bench.random(width)
    w = weights(bench, kind, width, inner)
    return (
        QuantizedLinear(w, bias)(x),
        x.double() @ dequantized(w).double().T + bias.double(),
        PRODUCT,
    )


def packed_experts(bench: Bench, kind: str) -> tuple[moe.Shape, ExpertWeights, PackedTriton]:
    shape = moe.Shape(4, 64, 64, 2) if bench.smoke else moe.Shape(64, 768, 2048, 8)
    w13 = weights(bench, kind, shape.experts, 2 * shape.width, shape.dim)
    found = ExpertWeights(w13, weights(bench, kind, shape.experts, shape.dim, shape.width))
    return shape, found, TritonExperts().pack(found)


def layer(packed: PackedTriton, batch: moe.Batch, shape: moe.Shape) -> Tensor:
    """Sort, multiply and sum."""
    config = packed.launch(batch.ids.numel(), batch.x)
    y = batch.x.new_empty((batch.ids.numel(), shape.dim))
    packed.run(batch.x, align(batch.ids, shape.experts, config["block_m"]), config, y, shape.top_k)
    return combine(y.view(*batch.ids.shape, -1), batch.shares, batch.ids)


def experts(bench: Bench, kind: str, tokens: int) -> tuple[Tensor, Tensor, float]:
    shape, w, packed = packed_experts(bench, kind)
    batch = moe.batch_of(bench, shape, 3 if bench.smoke else tokens)

    def fit(x: Tensor) -> Tensor:
        return widen(*quantize_reference(x)).float() if kind == "fp8" else x

    wanted = torch.zeros_like(batch.x, dtype=torch.float32)
    for expert in torch.unique(batch.ids).tolist():
        rows, places = (batch.ids == expert).nonzero(as_tuple=True)
        gate, up = (fit(batch.x[rows].float()) @ dequantized(w.w13_eFD[expert]).T).chunk(2, -1)
        y = fit(torch.nn.functional.silu(gate) * up) @ dequantized(w.w2_eDI[expert]).T
        wanted.index_add_(0, rows, batch.shares[rows, places, None] * y)
    return layer(packed, batch, shape), wanted, ROUNDED if kind == "fp8" else PRODUCT


CHECKS = {
    f"linear {kind} {rows}": partial(dense, kind=kind, rows=rows)
    for kind in KINDS
    for rows in (FEW, MANY)
}
CHECKS |= {
    f"experts {kind} {rows}": partial(experts, kind=kind, tokens=rows)
    for kind in KINDS
    for rows in (FEW, MANY)
}


def is_invariant(bench: Bench, kind: str) -> bool:
    """Return whether the first row alone has the same bits as in several batches."""
    sizes = (1, 3) if bench.smoke else (1, 2, 17, 65, 513, 4097)
    shape, _, packed = packed_experts(bench, kind)
    linear = QuantizedLinear(weights(bench, kind, 320, shape.dim))
    batch = moe.batch_of(bench, shape, sizes[-1])
    parts = [
        moe.Batch(*(part[:n].contiguous() for part in (batch.x, batch.ids, batch.shares)))
        for n in sizes
    ]
    first = [torch.cat((linear(part.x)[0], layer(packed, part, shape)[0])) for part in parts]
    return all(torch.equal(row, first[0]) for row in first)
