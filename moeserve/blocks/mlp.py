"""Dense feed-forward blocks: SwiGLU, and SwiGLU behind a sigmoid gate (Qwen2-MoE's shared expert).

T tokens, D model width, I inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.blocks.columns import ColumnLinear, whole
from moeserve.comm.tensor import TensorParallel
from moeserve.ops.elementwise import LANES
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with this rank's columns of gate and up as one product D -> 2i, i of I."""

    def __init__(self, ops: Ops, gate_up: Linear, down: ColumnLinear, inner_size: int, tp: TensorParallel) -> None:
        self._ops = ops
        self._gate_up = gate_up
        self._down = down
        self._inner_size = inner_size
        self._tp = tp
        self._run = ops.trace(self._all)

    def __call__(self, x_TD: Tensor, channel: int) -> Tensor:
        y_TD: Tensor = self._run(x_TD, channel)
        return y_TD

    def _all(self, x_TD: Tensor, channel: int) -> Tensor:
        part_Ti = self._ops.silu_mul(self._gate_up(x_TD))
        return self._down(whole(part_Ti, self._inner_size, self._tp, channel), channel)


class SigmoidGatedMLP:
    """sigmoid(gate . x) * mlp(x) on one rank, for any number of rows.

    The gate's single row is widened so that its product and sigmoid are row-invariant.
    """

    def __init__(self, ops: Ops, gate_1D: Tensor, mlp: GatedMLP) -> None:
        self._ops = ops
        self._gate = ops.pack_linear(torch.nn.functional.pad(gate_1D, (0, 0, 0, LANES - 1)), None)
        self._mlp = mlp

    def __call__(self, x_TD: Tensor) -> Tensor:
        rows = x_TD.shape[0]
        if extra := self._ops.pad_rows(rows) - rows:
            x_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, extra))
        gate_T1 = self._ops.sigmoid_gate(self._gate(x_TD))
        return (self._mlp(x_TD, 0) * gate_T1).to(x_TD.dtype)[:rows]
