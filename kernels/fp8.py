"""Rows in e4m3 with a scale for every 128 elements.

M rows, K elements, G = K / 128 blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # elements that share a scale
BLOCKS = 16  # of one program
E4M3 = torch.float8_e4m3fn
E4M3_MAX = tl.constexpr(448.0)
LEAST_AMAX = tl.constexpr(1e-4)


@triton.jit
def round_blocks(x, AXIS: tl.constexpr):
    """(e4m3 values, fp32 scales) of 2-D x, whose blocks lie along AXIS. What is not finite becomes NaN and leaves its
    block unharmed."""
    finite = tl.abs(x) < float("inf")
    largest = tl.max(tl.where(finite, tl.abs(x), 0.0), AXIS)
    scales = tl.div_rn(tl.maximum(largest, LEAST_AMAX), E4M3_MAX + tl.zeros_like(largest))
    values = tl.div_rn(x, tl.expand_dims(scales, AXIS) + tl.zeros_like(x))
    return tl.where(finite, values, float("nan")).to(tl.float8e4nv), scales


@triton.jit
def quantise_kernel(x_ptr, values_ptr, scales_ptr, row_stride, width, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCKS blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * row_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    values, scales = round_blocks(x, 1)
    tl.store(values_ptr + row * width + columns, values, mask=columns < width)
    num_blocks = tl.cdiv(width, BLOCK)
    tl.store(scales_ptr + row * num_blocks + blocks, scales, mask=blocks < num_blocks)


def quantise(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [M, K], fp32 scales [M, G]); a scale is its block's largest magnitude, at least 1e-4, over 448.

    [[448, -1]] -> values [[448, -1]], scales [[1]]; [[896, 1]] -> values [[448, 0.5]], scales [[2]]
    """
    rows, width = x_MK.shape
    assert x_MK.stride(1) == 1, x_MK.stride()
    values_MK = x_MK.new_empty((rows, width), dtype=E4M3)
    scales_MG = x_MK.new_empty((rows, triton.cdiv(width, BLOCK)), dtype=torch.float32)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK * BLOCKS))
        quantise_kernel[grid](
            x_MK, values_MK, scales_MG, x_MK.stride(0), width, BLOCKS=BLOCKS, BLOCK=BLOCK, num_warps=4
        )
    return values_MK, scales_MG
