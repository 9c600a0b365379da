"""Checks at start, in a few milliseconds, that kernels are batch-invariant on this machine.

A row's bits must not depend on the number of other rows in the call, on its index among them, or on
the padding of the context. torch's libraries choose code by shape and processor, so this must be
checked on each machine.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moeserve.ops import elementwise, native_layer, native_rows
from moeserve.ops.attention import TILE, attention, plan_attention
from moeserve.ops.inputs import (
    GroupInputs,
    HeadShape,
    Positions,
    RowContext,
    StepInputs,
    to_entries,
)
from moeserve.ops.linear import PackLinear
from moeserve.ops.native_layer import NativeLinear

ROWS = 48
PRODUCTS = ((64, 96), (256, 256), (512, 136))  # inputs, outputs
# Long sums, with each row alone: libraries may split K if there are few rows.
LONG_PRODUCT = (2048, 96)
LONG_ROWS = 256
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 24, 40)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def probe_linear(pack: PackLinear, dtype: torch.dtype) -> bool:
    """Return whether the products of `pack` are batch-invariant."""
    for inputs, outputs in PRODUCTS:
        linear = pack(_random(outputs, inputs, seed=inputs).to(dtype), None)
        x = _random(ROWS, inputs, seed=outputs).to(dtype)
        context = RowContext(ROWS)
        whole = linear(x, context)
        for count in ROW_COUNTS:
            first = (count * 5) % (ROWS - count)
            part = slice(first, first + count)
            if not torch.equal(linear(x[part], context.part(part)), whole[part]):
                return False
    inputs, outputs = LONG_PRODUCT
    linear = pack(_random(outputs, inputs, seed=inputs).to(dtype), None)
    x = _random(LONG_ROWS, inputs, seed=outputs).to(dtype)
    one = RowContext(1)
    rows = [linear(row, one) for row in torch.split(x, 1)]
    return torch.equal(torch.cat(rows), linear(x, RowContext(LONG_ROWS)))


def host_step(
    blocks_RN: Tensor,
    block_size: int,
    starts: Sequence[int],
    offsets: Sequence[int],
    **seen: int | None,
) -> tuple[GroupInputs, StepInputs]:
    """Return the inputs of `plan_attention` on CPUs. seen: window or chunk of the group.

    Fields that planning does not use are empty.
    """
    nothing = torch.empty(0)
    starts_R = np.array(starts, np.int32)
    offsets_R1 = np.array(offsets, np.int32)
    step = StepInputs(
        ids_T=nothing,
        positions=Positions.of_text(nothing),
        groups=(),
        logits_indices_N=nothing,
        offsets_R1=offsets_R1,
        starts_R=starts_R,
        rows_on_device=(nothing, nothing),
    )
    return GroupInputs(nothing, blocks_RN, block_size, **seen), step


def probe_native(dtype: torch.dtype) -> str:
    """Compare the native kernels with torch's. Returns what is wrong; empty if nothing is."""
    if not probe_linear(NativeLinear, dtype):
        return "the bits of products depend on the row count"
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    weight = _random(136, 264, seed=0).to(dtype)
    x = _random(9, 264, seed=1).to(dtype)
    norm_D = _random(264, seed=2).abs()
    q = _random(70, 4, 64, seed=3).to(dtype)
    caches = [_random(8, 10, 2, 64, seed=seed) for seed in (4, 5)]
    group, step = host_step(torch.arange(1, 8)[None], 10, [0], [0, 70])
    shape = HeadShape(num_heads=4, num_kv_heads=2, dim=64, v_dim=64)
    pairs = {
        "products": (NativeLinear(weight)(x), x.double() @ weight.double().T),
        "norms": (
            native_rows.rms_norm(x, norm_D, 1e-6),
            elementwise.rms_norm(x.float(), norm_D, 1e-6),
        ),
    }
    for cache_type in (dtype, torch.int8):
        k, v = (to_entries(cache, cache_type) for cache in caches)
        pairs[f"attention over {cache_type}"] = (
            native_layer.attention(q / 8, k, v, native_layer.plan_attention(group, step, shape)),
            attention(q / 8, k, v, plan_attention(group, step, shape)),
        )
    for what, (ours, reference) in pairs.items():
        if not torch.allclose(ours.double(), reference.double(), rtol=tolerance, atol=tolerance):
            return (
                f"{what} differ from torch's by up to "
                f"{(ours.double() - reference.double()).abs().max():.3g}"
            )
    return ""


def probe_attention(dtype: torch.dtype) -> bool:
    """Return whether attention of a query has the same bits alone as within a chunk."""
    return all(
        _probe_attention(shape, dtype)
        for shape in (HeadShape(4, 2, 64, 64), HeadShape(4, 1, 576, 512))
    )


def _probe_attention(shape: HeadShape, dtype: torch.dtype) -> bool:
    tokens = 3 * TILE
    size = 16
    q = _random(tokens, shape.num_heads, shape.dim, seed=4).to(dtype)
    k = _random(tokens // size, size, shape.num_kv_heads, shape.dim, seed=2).to(dtype)
    blocks = torch.arange(tokens // size)[None]

    def run(start: int, end: int) -> Tensor:
        """Return the attention of the tokens start to end - 1. Values are parts of keys."""
        plan = plan_attention(*host_step(blocks, size, [start], [0, end - start]), shape)
        return attention(q[start:end], k, k[..., : shape.v_dim], plan)

    whole = run(0, tokens)
    parts = ((0, 1), (5, 12), (70, 71), (tokens - 1, tokens))
    return all(torch.equal(run(start, end), whole[start:end]) for start, end in parts)
