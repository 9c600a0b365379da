"""Activations of gated MLPs, for the elementwise kernel and the grouped GEMMs of experts.

M tokens, I inner width.
"""

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from moeserve.ops.rules import Activation

# An activation as a kernel constant, a tuple of:
#   kind
#   alpha: act(gate) = gate * sigmoid(alpha * gate)
#   upper limit of gate
#   upper limit of act(gate)
#   limit of the magnitude of up
#   constant added to up
Act = tuple[str, float, float, float, float, float]
SWIGLU_ACT: Act = ("swiglu", 1.0, math.inf, math.inf, math.inf, 0.0)
UP_FIRST_ACT: Act = ("up first", *SWIGLU_ACT[1:])  # SwiGLU with gate and up swapped
ACT_BLOCK = 1024  # outputs per program


@lru_cache
def act_of(activation: "Activation") -> Act:
    """Return an activation as kernel constants."""
    a = activation
    return (
        SWIGLU_ACT if a.plain else (a.kind, a.alpha, a.gate_limit, a.act_limit, a.limit, a.up_shift)
    )


@triton.jit
def gated(gate, up, ACT: tl.constexpr):
    """Return act(gate) * up in fp32.

    GELU's 0.5 (1 + tanh(u)) equals sigmoid(2u), for u = sqrt(2 / pi) (x + 0.044715 x^3).
    """
    if ACT[0] == "swiglu":
        return gate * tl.sigmoid(gate) * up
    if ACT[0] == "up first":
        return up * tl.sigmoid(up) * gate
    if ACT[2] < float("inf"):
        gate = tl.minimum(gate, ACT[2], propagate_nan=tl.PropagateNan.ALL)
    if ACT[0] == "gelu_tanh":
        gate = gate * tl.sigmoid(gate * (1.5957691216057 + 0.0713548162726 * gate * gate))
    else:
        gate = gate * tl.sigmoid(ACT[1] * gate)
    if ACT[3] < float("inf"):
        gate = tl.minimum(gate, ACT[3], propagate_nan=tl.PropagateNan.ALL)
    if ACT[4] < float("inf"):
        up = tl.minimum(tl.maximum(up, -ACT[4], propagate_nan=tl.PropagateNan.ALL), ACT[4],
                        propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
    return gate * (up + ACT[5])


@triton.jit
def act_mul_kernel(gate_up_ptr, out_ptr, row_stride, width, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes BLOCK outputs of one token in fp32 and rounds once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + width + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    tl.store(
        out_ptr + row * width + columns,
        gated(gate, up, ACT).to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def act_mul(gate_up_MI: Tensor, activation: "Activation") -> Tensor:
    """Return act(first half) * (second half + up_shift) of the last dimension. Rows may be strided.

    [[1, 2]], SwiGLU -> [[1 / (1 + e^-1) * 2]] = [[1.4621]]
    """
    rows = gate_up_MI.shape[0]
    width = gate_up_MI.shape[1] // 2
    act = act_of(activation)
    assert gate_up_MI.stride(1) == 1, gate_up_MI.stride()
    out = gate_up_MI.new_empty((rows, width))
    if rows:
        grid = (rows, triton.cdiv(width, ACT_BLOCK))
        act_mul_kernel[grid](
            gate_up_MI, out, gate_up_MI.stride(0), width, ACT=act, BLOCK=ACT_BLOCK, num_warps=4
        )
    return out
