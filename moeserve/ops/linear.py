"""Matrix products with constant weights: y = x W^T + b, where a row's bits never depend on the other rows, nor a
column's on the other columns: tensor-parallel ranks compute some columns each.

M rows, K inputs, N outputs. A `Linear` is packed once at start and called every step. Two kinds: `PlainLinear` is
torch's own and the reference; `PackedLinear` holds the weight in oneDNN's blocked layout, which saves reordering it in
every call (2 to 3 times faster at decode sizes, and the same bits in bfloat16).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]  # x [M, K] -> y [M, N], both of the weight's dtype
PackLinear = Callable[[Any, Tensor | None], Linear]  # weight [N, K] (native, triton: Quantised, too), bias [N] or None

# torch computes bfloat16 products of fewer multiplications (rows * columns * inner) with another kernel.
MKLDNN_MIN = 4096
# Below this many elements a bfloat16 weight stays plain: oneDNN's packed call costs about 10 us before it starts.
SMALL_WEIGHT = 32 * 1024
ROW_BUCKET = 16
# Both libraries have kernels of their own for fewer columns (torch's for 1 to 8, oneDNN's for 1) that sum in another
# order: such weights are widened with zeros.
NARROW = 16


def padded_rows(rows: int, pad: int) -> int:
    """The row count to compute `rows` with: a multiple of `pad`, and one of few sizes, since oneDNN compiles a kernel
    for each (0.3 ms) and keeps about a thousand. Above 16 at most a sixteenth or 15 rows are padding; 0 becomes 1.

    (1, 1) -> 1, (3, 8) -> 8, (17, 1) -> 32, (1000, 1) -> 1024
    """
    step = max(pad, ROW_BUCKET, 1 << max(0, rows.bit_length() - 5)) if rows > ROW_BUCKET else pad
    return max(1, -(-rows // step)) * step


def mkldnn_rows(num_elements: int) -> int:
    """Rows, a power of two, from which every bfloat16 product with so many elements goes through one kernel.

    A 64 x 64 weight -> 2, an 8 x 256 one -> 4, anything larger than 4,096 elements -> 1
    """
    return 1 << (MKLDNN_MIN // num_elements).bit_length()


class PlainLinear:
    """F.linear on rows padded with zeros to a multiple of `pad`, because torch picks its kernel by the row count.

    x [[1, 2]], weight [[3, 4]], bias [5] -> [[16]]
    """

    __slots__ = ("bias", "columns", "pad", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pad: int = 1) -> None:
        self.columns = weight.shape[0]
        self.weight, self.bias = _widened(weight, bias)
        self.pad = pad

    def __call__(self, x_MK: Tensor) -> Tensor:
        rows = x_MK.shape[0]
        if extra := -rows % self.pad:
            x_MK = F.pad(x_MK, (0, 0, 0, extra))
        return _narrowed(F.linear(x_MK, self.weight, self.bias)[:rows], self.columns)


class PackedLinear:
    """The same product with the weight reordered once for oneDNN. It keeps no reference to `weight`.

    A single row is computed as two: oneDNN has a kernel of its own for one row, which sums long inputs (K > 1,024) in
    another order. The weight is read once all the same.
    """

    __slots__ = ("bias", "columns", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.columns = weight.shape[0]
        weight, self.bias = _widened(weight, bias)
        # 64 is the row count that oneDNN lays the weight out for; any other count may use it.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)

    def __call__(self, x_MK: Tensor) -> Tensor:
        if x_MK.shape[0] == 1:
            return self(x_MK.repeat(2, 1))[:1]
        y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, self.packed, self.bias, "none", [], "")
        return _narrowed(y_MN, self.columns)


def _widened(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    missing = max(0, NARROW - weight.shape[0])
    if not missing:
        return weight, bias
    return F.pad(weight, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing))


def _narrowed(y_MN: Tensor, columns: int) -> Tensor:
    return y_MN if columns >= NARROW else y_MN[:, :columns].contiguous()


def plain_packer(pad: int) -> PackLinear:
    """Linear layers by torch, rows padded to a multiple of `pad`."""

    def pack(weight: Tensor, bias: Tensor | None) -> Linear:
        if weight.untyped_storage().nbytes() > weight.nbytes:
            weight = weight.clone()  # a part of a larger tensor would keep all of it in memory
        return PlainLinear(weight, bias, pad=pad)

    return pack


def onednn_pack(weight: Tensor, bias: Tensor | None) -> Linear:
    """Linear layers by oneDNN, small bfloat16 weights by torch (which calls the same kernel, with the same bits)."""
    if weight.dtype == torch.bfloat16 and weight.numel() < SMALL_WEIGHT:
        return PlainLinear(weight, bias, pad=mkldnn_rows(weight.numel()))
    return PackedLinear(weight, bias)
