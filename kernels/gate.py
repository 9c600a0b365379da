"""The sigmoid gate of a shared expert.

T tokens, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 16_384
PER_WARP = 512


@triton.jit
def gated_kernel(x_ptr, gate_ptr, y_ptr, out_ptr, x_stride, y_stride, width, BLOCK: tl.constexpr):
    """One program: one row; its product with the gate is one tree in fp32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + columns, mask=inside, other=0.0).to(tl.float32)
    y *= tl.sigmoid(tl.sum(x * gate, axis=0))
    tl.store(out_ptr + row * width + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def gated_reference(x_TD: Tensor, gate_D: Tensor, y_TD: Tensor) -> Tensor:
    """The definition, rounded once."""
    return (torch.sigmoid(x_TD.float() @ gate_D.float()).unsqueeze(1) * y_TD.float()).to(y_TD.dtype)


def gated(x_TD: Tensor, gate_D: Tensor, y_TD: Tensor) -> Tensor:
    """sigmoid(x . gate) * y, in fp32, rounded once (the shared expert of Qwen2-MoE); rows may be strided.

    x [1, 2], gate [3, -1], y [10, 20] -> sigmoid(1) * y = [7.3106, 14.6212]
    """
    rows, width = x_TD.shape
    assert width <= MAX_WIDTH, width
    assert y_TD.shape == x_TD.shape, (x_TD.shape, y_TD.shape)
    assert gate_D.shape == (width,), (gate_D.shape, x_TD.shape)
    assert width == 1 or x_TD.stride(1) == y_TD.stride(1) == gate_D.stride(0) == 1, (x_TD.stride(), y_TD.stride())
    out_TD = y_TD.new_empty((rows, width))
    if rows:
        block = triton.next_power_of_2(width)
        strides = x_TD.stride(0), y_TD.stride(0)
        num_warps = max(1, min(16, block // PER_WARP))
        gated_kernel[(rows,)](x_TD, gate_D, y_TD, out_TD, *strides, width, BLOCK=block, num_warps=num_warps)
    return out_TD
