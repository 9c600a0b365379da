"""Products whose output columns are sharded over an engine's ranks.

Each column is one sum over all inputs, computed by one rank, so its bits are those of the undivided product. M rows,
K inputs, N outputs in all, n of this rank (zeros beyond N).
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from moeserve.comm.tensor import TensorParallel
from moeserve.ops.linear import Linear
from moeserve.ops.quantised import Quantised

W = TypeVar("W", Tensor, Quantised)


def whole(part_Mn: Tensor, num_columns: int, tp: TensorParallel, channel: int) -> Tensor:
    """Gathers [M, N], contiguous: the columns of all ranks without those that pad the last ranks' shares."""
    all_MN = tp.gather_columns(part_Mn, channel)
    return all_MN if all_MN.shape[1] == num_columns else all_MN[:, :num_columns].contiguous()


def widened(part_nK: W, num_columns: int, tp: TensorParallel, *, parts: int = 1) -> W:
    """Pads a rank's rows of a weight (or elements of a bias) of `num_columns` with zeros to the length of every rank's.

    parts: the number of weights that lie one below the other, each sharded by itself.
    """
    if isinstance(part_nK, Quantised):
        return part_nK.each(lambda part: widened(part, num_columns, tp, parts=parts))
    missing = -(-num_columns // tp.size) - part_nK.shape[0] // parts
    if not missing:
        return part_nK
    stacked = part_nK.reshape(parts, -1, *part_nK.shape[1:])
    filler = part_nK.new_zeros((parts, missing, *part_nK.shape[1:]))
    return torch.cat((stacked, filler), 1).flatten(0, 1)


class ColumnLinear:
    """x [M, K] -> [M, N], whole on every rank; `part` computes this rank's columns."""

    def __init__(self, part: Linear, num_columns: int, tp: TensorParallel) -> None:
        self.part = part
        self._num_columns = num_columns
        self._tp = tp

    def __call__(self, x_MK: Tensor, channel: int) -> Tensor:
        return whole(self.part(x_MK), self._num_columns, self._tp, channel)
