"""Linear layers and MLPs whose output columns are sharded over an engine's ranks.

One rank computes each column, with all inputs. So results have the bits of the unsharded product.
 Shapes: M rows, K inputs, N outputs, of which this rank has n (padded with zeros), T
tokens, D model width, I inner width.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from moeserve.comm.tensor import TensorParallel
from moeserve.ops.elementwise import LANES
from moeserve.ops.inputs import RowContext
from moeserve.ops.linear import LinearMethod, can_fuse
from moeserve.ops.quantized import Quantized
from moeserve.ops.rules import SWIGLU, Activation
from moeserve.ops.table import Ops

W = TypeVar("W", Tensor, Quantized)
FP32 = 4  # bytes
INT64 = 8  # bytes
# Copies of gathered columns in memory: as sent (kept for a while), as received, and in order.
GATHERED_COPIES = 3


def gather_unpadded(part_Mn: Tensor, num_columns: int, tp: TensorParallel, channel: int) -> Tensor:
    """Return the columns of all ranks without their padding, contiguous [M, N]."""
    all_MN = part_Mn if tp.size == 1 else tp.gather_columns(part_Mn, channel)
    return all_MN if all_MN.shape[1] == num_columns else all_MN[:, :num_columns].contiguous()


def gathered_bytes(rows: int, columns: int, itemsize: int, tp_size: int) -> int:
    """Return the bytes that gathering columns needs. itemsize: bytes of an element."""
    return 0 if tp_size == 1 else GATHERED_COPIES * rows * (columns + tp_size) * itemsize


def pad_part(part_nK: W, num_columns: int, tp: TensorParallel, *, parts: int = 1) -> W:
    """Pad a rank's rows of a weight (or elements of a bias) with zeros, to one size on all ranks.

    num_columns: outputs of the unsharded product. parts: number of stacked weights, each of which
    is sharded by itself.
    """
    if isinstance(part_nK, Quantized):
        return part_nK.each(lambda part: pad_part(part, num_columns, tp, parts=parts))
    missing = -(-num_columns // tp.size) - part_nK.shape[0] // parts
    if not missing:
        return part_nK
    stacked = part_nK.reshape(parts, -1, *part_nK.shape[1:])
    filler = part_nK.new_zeros((parts, missing, *part_nK.shape[1:]))
    return torch.cat((stacked, filler), 1).flatten(0, 1)


@dataclass(eq=False, repr=False, slots=True)
class ColumnLinear:
    """A product [M, K] -> [M, N]. `part` computes this rank's columns; all ranks gather all."""

    part: LinearMethod
    num_columns: int
    tp: TensorParallel

    def __call__(self, x_MK: Tensor, context: RowContext) -> Tensor:
        """Return all columns [M, N]."""
        return gather_unpadded(self.part(x_MK, context), self.num_columns, self.tp, context.channel)


@dataclass(eq=False, repr=False)
class GatedMLP:
    """An MLP, down(act(gate(x)) * up(x)), or down(act(up(x))) without gates.

    `gate_up` computes this rank's columns of gate and up as one product.
    """

    ops: Ops
    gate_up: LinearMethod
    down: ColumnLinear
    inner_size: int
    tp: TensorParallel
    activation: Activation = SWIGLU

    def __post_init__(self) -> None:
        self._run = self.ops.compile(self._compute)
        self.fused_call = None  # computes the whole MLP, if the kernels have such a call
        if (
            self.ops.mlp_block is not None
            and self.tp.size == 1
            and can_fuse(self.gate_up, self.down.part)
        ):
            self.fused_call = self.ops.mlp_block(
                self.gate_up, self.down.part, self.activation, self.ops.dtype
            )

    def __call__(self, x_TD: Tensor, context: RowContext) -> Tensor:
        """Return the MLP's output [T, D] on every rank."""
        if self.fused_call is not None:
            return self.fused_call(x_TD)
        y_TD: Tensor = self._run(x_TD, context)
        return y_TD

    def _compute(self, x_TD: Tensor, context: RowContext) -> Tensor:
        part_Ti = self.ops.act_mul(self.gate_up(x_TD, context), self.activation)
        all_TI = gather_unpadded(part_Ti, self.inner_size, self.tp, context.channel)
        return self.down(all_TI, context)


def pack_gate(ops: Ops, gate_1D: Tensor) -> LinearMethod:
    """Pack the gate of a shared expert, padded so that its bits do not depend on the batch."""
    return ops.pack_linear(torch.nn.functional.pad(gate_1D, (0, 0, 0, LANES - 1)), None)


class SharedMLP:
    """A shared expert on one rank: scale * mlp(x), or sigmoid(gate(x)) * mlp(x) (Qwen2-MoE)."""

    def __init__(
        self, ops: Ops, gate: LinearMethod | None, mlp: GatedMLP, scale: float = 1.0
    ) -> None:
        """gate: from `pack_gate`."""
        self._ops = ops
        self._gate = gate
        self._mlp = mlp
        self._scale = scale

    def __call__(self, x_TD: Tensor, context: RowContext) -> Tensor:
        """Return the shared expert's output, [T, D]."""
        rows = x_TD.shape[0]
        if extra := self._ops.pad_rows(rows) - rows:
            x_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, extra))
        y_TD = self._mlp(x_TD, context)
        if self._gate is not None:
            y_TD = (y_TD * self._ops.sigmoid_gate(self._gate(x_TD, context))).to(x_TD.dtype)
        return y_TD[:rows] if self._scale == 1.0 else y_TD[:rows] * self._scale


@dataclass(frozen=True, slots=True, eq=False)
class ConstantExpert:
    """A shared expert whose output is the same for every token: a bias of the sum of experts."""

    bias_D: Tensor

    def __call__(self, x_TD: Tensor, context: RowContext) -> Tensor:
        """Return the output, [T, D]."""
        return self.bias_D.expand_as(x_TD)


@dataclass(frozen=True, slots=True, eq=False)
class SoftCapped:
    """A product whose results are capped, cap * tanh(y / cap), in fp32."""

    linear: LinearMethod
    cap: float
    ops: Ops

    def __call__(self, x_MK: Tensor, context: RowContext) -> Tensor:
        """Return the capped results, fp32 [M, N]."""
        return self.ops.soft_cap(self.linear(x_MK, context).float(), self.cap)
