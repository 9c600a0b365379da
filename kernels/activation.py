"""SwiGLU's elementwise half: silu(gate) * up.

M rows, I inner width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # outputs of one program


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, width, BLOCK: tl.constexpr):
    """One program: BLOCK outputs of one row. fp32 inside, one rounding."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up_MI: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension (SwiGLU, Shazeer 2020); rows may be strided.

    [[1, 2]] -> [[1 / (1 + e^-1) * 2]] = [[1.4621]]
    """
    rows, width = gate_up_MI.shape[0], gate_up_MI.shape[1] // 2
    assert gate_up_MI.stride(1) == 1, gate_up_MI.stride()
    out = gate_up_MI.new_empty((rows, width))
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        silu_mul_kernel[grid](gate_up_MI, out, gate_up_MI.stride(0), width, BLOCK=BLOCK, num_warps=4)
    return out
