"""Dense feed-forward blocks: SwiGLU, and SwiGLU behind a sigmoid gate (Qwen2-MoE's shared expert).

T tokens, D model width, I inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.ops.elementwise import GATE_LANES
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up as one product D -> 2I."""

    def __init__(self, ops: Ops, gate_up: Linear, down: Linear) -> None:
        self._ops = ops
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._down(self._ops.silu_mul(self._gate_up(x_TD)))


class SigmoidGatedMLP:
    """sigmoid(gate . x) * mlp(x); gate_D is one row, widened so that its product and sigmoid are row-invariant."""

    def __init__(self, ops: Ops, gate_1D: Tensor, mlp: GatedMLP) -> None:
        self._ops = ops
        self._gate = ops.pack_linear(torch.nn.functional.pad(gate_1D, (0, 0, 0, GATE_LANES - 1)), None)
        self._mlp = mlp

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate_T1 = self._ops.sigmoid_gate(self._gate(x_TD))
        return (self._mlp(x_TD) * gate_T1).to(x_TD.dtype)
