"""Quantize activations to FP8 (e4m3) with one scale per 128 elements, and widen them again.

Sizes: M rows of K elements, G = K / 128 blocks; in slots, e local experts, C rows allocated for
each, D <= K elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels.activation import Act, gated
from moeserve.kernels.align import Alignment

BLOCK = 128  # elements that share a scale
BLOCKS = 16  # blocks per program of `quantize_kernel`
ROWS = 64  # rows per program of `widen_kernel`
E4M3 = torch.float8_e4m3fn
E4M3_MAX = tl.constexpr(448.0)
LEAST_AMAX = tl.constexpr(1e-4)


@triton.jit
def round_blocks(x, AXIS: tl.constexpr):
    """Return (e4m3 values, fp32 scales) of 2-D x, whose blocks lie along AXIS.

    Elements that are not finite become NaN and do not affect the rest of their block.
    """
    finite = tl.abs(x) < float("inf")
    largest = tl.max(tl.where(finite, tl.abs(x), 0.0), AXIS)
    scales = tl.div_rn(tl.maximum(largest, LEAST_AMAX), E4M3_MAX + tl.zeros_like(largest))
    values = tl.div_rn(x, tl.expand_dims(scales, AXIS) + tl.zeros_like(x))
    return tl.where(finite, values, float("nan")).to(tl.float8e4nv), scales


@triton.jit
def quantize_kernel(
    x_ptr, values_ptr, scales_ptr, ends_ptr, expert_ptr, row_ptr, row_stride, width,
    BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr = None,
):  # fmt: skip
    """One program quantizes BLOCKS blocks of a row.

    If `expert_ptr` is given, program i takes row i % BLOCK_M of tile i // BLOCK_M.
    """
    row = tl.program_id(0)
    if expert_ptr is not None:
        expert = tl.load(expert_ptr + row // BLOCK_M)
        if expert < 0:
            return
        row = tl.load(row_ptr + row // BLOCK_M) + row % BLOCK_M
        if row >= tl.load(ends_ptr + expert):
            return
    row = row.to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * row_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    if ACT is not None:
        up = tl.load(
            x_ptr + row * row_stride + width + columns, mask=columns < width, other=0.0
        ).to(tl.float32)
        x = gated(x, up, ACT)
    values, scales = round_blocks(x, 1)
    tl.store(values_ptr + row * width + columns, values, mask=columns < width)
    num_blocks = tl.cdiv(width, BLOCK)
    tl.store(scales_ptr + row * num_blocks + blocks, scales, mask=blocks < num_blocks)


def quantize(
    x_MK: Tensor, alignment: Alignment | None = None, act: Act | None = None
) -> tuple[Tensor, Tensor]:
    """Return e4m3 values [M, K] and fp32 scales [M, G].

    A scale is the largest magnitude of its block, at least 1e-4, divided by 448.

    alignment: quantize only the rows of these experts' tiles; all other results are undefined.
    act: apply this activation first; x then has 2 K columns, gate and up.

    [[448, -1]] -> values [[448, -1]], scales [[1]]; [[896, 1]] -> values [[448, 0.5]], scales [[2]]
    """
    rows = x_MK.shape[0]
    width = x_MK.shape[1] // (1 if act is None else 2)
    assert x_MK.stride(1) == 1, x_MK.stride()
    values_MK = x_MK.new_empty((rows, width), dtype=E4M3)
    scales_MG = x_MK.new_empty((rows, triton.cdiv(width, BLOCK)), dtype=torch.float32)
    if alignment is None:
        tables: tuple[Tensor | None, ...] = (None, None, None)
        programs = rows
    else:
        tables = (alignment.ends_e, alignment.expert_Z, alignment.row_Z)
        programs = len(alignment.expert_Z) * alignment.block_m
    if programs:
        grid = (programs, triton.cdiv(width, BLOCK * BLOCKS))
        quantize_kernel[grid](
            x_MK, values_MK, scales_MG, *tables, x_MK.stride(0), width,
            BLOCK_M=alignment.block_m if alignment else 1, BLOCKS=BLOCKS,
            BLOCK=BLOCK, ACT=act, num_warps=4,
        )  # fmt: skip
    return values_MK, scales_MG


@triton.jit
def widen_kernel(
    values_ptr, scales_ptr, counts_ptr, out_ptr, room, width, out_width, expert_stride, row_stride,
    block_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program widens one block of ROWS rows of an expert, as far as the expert has them."""
    expert = tl.program_id(0)
    block = tl.program_id(2)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    live = rows < tl.load(counts_ptr + expert)
    places = (expert * room + rows).to(tl.int64)[:, None]
    values = tl.load(
        values_ptr + places * width + columns[None, :], mask=live[:, None], other=0.0
    ).to(tl.float32)
    scale_ptrs = scales_ptr + expert * expert_stride + rows * row_stride + block * block_stride
    y = (values * tl.load(scale_ptrs, mask=live, other=0.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + places * out_width + columns[None, :],
        y,
        mask=live[:, None] & (columns < out_width)[None, :],
    )


def widen(values_eCK: Tensor, scales_eCG: Tensor, counts_e: Tensor, out_eCD: Tensor) -> Tensor:
    """Write values times scales to `out_eCD`, rounded once, and return it.

    Only the first `counts_e` rows of each expert are written.

    values [[[448, -1], [1, 1]]], scales [[[2], [1]]], counts [1] -> [[[896, -2], [undefined]]]
    """
    experts, room, _ = values_eCK.shape
    _, width, step = values_eCK.stride()
    out_width = out_eCD.shape[2]
    assert (values_eCK.stride(0), step) == (room * width, 1), values_eCK.stride()
    assert out_eCD.is_contiguous(), out_eCD.stride()
    widen_kernel[(experts, triton.cdiv(room, ROWS), triton.cdiv(out_width, BLOCK))](
        values_eCK,
        scales_eCG,
        counts_e,
        out_eCD,
        room,
        width,
        out_width,
        *scales_eCG.stride(),
        ROWS=ROWS,
        BLOCK=BLOCK,
    )
    return out_eCD
