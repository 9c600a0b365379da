"""The seam of linear layers, and torch's products: y = x W^T + b.

The bits of a row do not depend on the other rows, nor those of a column on the other columns:
tensor-parallel ranks compute some columns each. M rows, K inputs, N outputs.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from moeserve.ops.inputs import RowContext


class LinearMethod(Protocol):
    """A linear layer, made once at start and called every step.

    Those of a kernel table (`Ops.pack_linear`) have a packed weight, plain or quantised, and read
    x alone. A layer whose product differs from row to row, such as one with an adapter for each
    request, wraps the method that `Builder.linear` (blocks/build.py) made of a name: it adds its
    own product, chosen by `context`. The fused blocks of a table (`Ops.attention_block` and others)
    take packed weights alone; layers then call their methods one by one.
    """

    def __call__(self, x_MK: Tensor, context: RowContext) -> Tensor:
        """Return y [M, N] in the dtype of x [M, K]. context: of these rows."""


# Weight [N, K] (native and triton tables: Quantised, too) and bias [N] or None.
PackLinear = Callable[[Any, Tensor | None], LinearMethod]

ROW_BUCKET = 16
LARGEST_PAD = 32  # rows; that pick_ops may choose
# torch has kernels of their own for up to 8 columns, and oneDNN, which it calls, for 1: they sum in
# another order. Weights with fewer columns than this are padded with zeros.
NARROW = 16


def padded_rows(rows: int, pad: int) -> int:
    """The row count to compute `rows` with: a multiple of `pad`, and one of few sizes, because
    oneDNN compiles a kernel for each (0.3 ms) and keeps about a thousand. Above 16 at most a
    sixteenth or 15 rows are padding; 0 becomes 1.

    (1, 1) -> 1, (3, 8) -> 8, (17, 1) -> 32, (1000, 1) -> 1024
    """
    step = max(pad, ROW_BUCKET, 1 << max(0, rows.bit_length() - 5)) if rows > ROW_BUCKET else pad
    return max(1, -(-rows // step)) * step


class PlainLinear:
    """F.linear on rows padded with zeros to a multiple of `pad`, because torch picks its kernel by
    the row count.

    x [[1, 2]], weight [[3, 4]], bias [5] -> [[16]]
    """

    __slots__ = ("bias", "columns", "pad", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pad: int = 1) -> None:
        if weight.untyped_storage().nbytes() > weight.nbytes:
            weight = weight.clone()  # a part of a larger tensor would keep all of it in memory
        self.columns = weight.shape[0]
        self.pad = pad
        missing = max(0, NARROW - self.columns)
        self.weight = F.pad(weight, (0, 0, 0, missing)) if missing else weight
        self.bias = F.pad(bias, (0, missing)) if missing and bias is not None else bias

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """The tensors that hold the weight and the bias."""
        return self.weight, self.bias

    def __call__(self, x_MK: Tensor, context: RowContext | None = None) -> Tensor:
        """Return x W^T + bias [M, N]; rows are padded so that their bits do not depend on M."""
        rows = x_MK.shape[0]
        if extra := -rows % self.pad:
            x_MK = F.pad(x_MK, (0, 0, 0, extra))
        y_MN = F.linear(x_MK, self.weight, self.bias)[:rows]
        return y_MN if self.columns >= NARROW else y_MN[:, : self.columns].contiguous()
