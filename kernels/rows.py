"""RMS norm, alone and fused with the residual addition before it, and the embedding lookup.

T tokens, D width, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 16_384
ELEMENTS = 2048  # elements per program if rows are shorter than that
PER_WARP = 512  # elements
EMBEDDING_BLOCK = 2048  # elements per program


@triton.jit
def normed(x, weight, eps, width):
    """Return x / sqrt(mean(x^2) + eps) * weight in fp32.

    The order of a row's sum depends only on the shape of the tile.
    """
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None] * weight[None, :]


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program normalizes ROWS whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    y = normed(x, weight, eps, width)
    tl.store(
        out_ptr + row[:, None] * width + column[None, :],
        y.to(out_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, x_stride, residual_stride, rows, width, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program adds and normalizes ROWS whole rows, and overwrites x and residual."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    x_ptrs = x_ptr + row[:, None] * x_stride + column[None, :]
    residual_ptrs = residual_ptr + row[:, None] * residual_stride + column[None, :]
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    # Round the sum first, so that the norm's input is the residual that the next layer reads.
    total = (x + residual).to(x_ptr.dtype.element_ty)
    tl.store(residual_ptrs, total, mask=inside)
    tl.store(
        x_ptrs,
        normed(total.to(tl.float32), weight, eps, width).to(x_ptr.dtype.element_ty),
        mask=inside,
    )


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    It is computed in fp32 and rounded once. The weight is fp32; rows may be strided. A row's bits
    depend only on D and the dtype, as long as either all rows start at multiples of 16 bytes or
    none does.

    x [3, 4], weight 1, eps 0 -> [0.8485, 1.1314]
    """
    rows, width = x_TD.shape
    _check(x_TD, weight_D)
    out_TD = x_TD.new_empty((rows, width))
    if rows:
        tile, grid, num_warps = _launch(rows, width)
        rms_norm_kernel[grid](
            x_TD, weight_D, out_TD, x_TD.stride(0), rows, width, eps, **tile, num_warps=num_warps
        )
    return out_TD


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Write rms_norm(x + residual) to x and x + residual to residual, and return both.

    The sum is rounded before the norm.

    x [2, 4], residual [1, 0], weight 1, eps 0 -> x [0.8485, 1.1314], residual [3, 4]
    """
    rows, width = x_TD.shape
    _check(x_TD, weight_D)
    _check(residual_TD, weight_D)
    assert residual_TD.dtype is x_TD.dtype, (x_TD.dtype, residual_TD.dtype)
    assert residual_TD.shape == x_TD.shape, (x_TD.shape, residual_TD.shape)
    assert x_TD.data_ptr() != residual_TD.data_ptr() or not rows, "x and residual must not overlap"
    if rows:
        tile, grid, num_warps = _launch(rows, width)
        strides = x_TD.stride(0), residual_TD.stride(0)
        add_rms_norm_kernel[grid](
            x_TD, residual_TD, weight_D, *strides, rows, width, eps, **tile, num_warps=num_warps
        )
    return x_TD, residual_TD


def _launch(rows: int, width: int) -> tuple[dict[str, int], tuple[int], int]:
    """Return tile, grid and number of warps.

    The tile depends on the width alone, because its shape determines the order of the sums.
    """
    block = triton.next_power_of_2(width)
    tile = {"ROWS": max(1, ELEMENTS // block), "BLOCK": block}
    return tile, (triton.cdiv(rows, tile["ROWS"]),), min(16, max(ELEMENTS, block) // PER_WARP)


def _check(x_TD: Tensor, weight_D: Tensor) -> None:
    width = x_TD.shape[1]
    assert width <= MAX_WIDTH, width
    assert weight_D.shape == (width,), (weight_D.shape, x_TD.shape)
    assert weight_D.dtype is torch.float32, weight_D.dtype
    assert width == 1 or x_TD.stride(1) == weight_D.stride(0) == 1, (
        x_TD.stride(),
        weight_D.stride(),
    )


@triton.jit
def embedding_kernel(ids_ptr, table_ptr, out_ptr, table_stride, width, scale, BLOCK: tl.constexpr):
    """One program copies BLOCK elements of one row."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    row = tl.load(ids_ptr + token).to(tl.int64)
    x = (
        tl.load(table_ptr + row * table_stride + columns, mask=inside, other=0.0).to(tl.float32)
        * scale
    )
    tl.store(out_ptr + token * width + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


def embedding(ids_T: Tensor, table_VD: Tensor, scale: float = 1.0) -> Tensor:
    """Return table[ids] * scale, rounded once. Every id must be a row of the table.

    table [[1, 2], [3, 4]], ids [1, 0], scale 2 -> [[6, 8], [2, 4]]
    """
    tokens = ids_T.shape[0]
    width = table_VD.shape[1]
    assert table_VD.stride(1) == 1, table_VD.stride()
    assert ids_T.is_contiguous(), ids_T.stride()
    out_TD = table_VD.new_empty((tokens, width))
    if tokens:
        grid = (tokens, triton.cdiv(width, EMBEDDING_BLOCK))
        embedding_kernel[grid](
            ids_T,
            table_VD,
            out_TD,
            table_VD.stride(0),
            width,
            float(scale),
            BLOCK=EMBEDDING_BLOCK,
            num_warps=4,
        )
    return out_TD
