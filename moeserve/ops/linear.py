"""The interface of linear layers, y = x W^T + b, and its implementation with torch's products.

A row's bits do not depend on the other rows (batch invariance), and a column's not on the other
columns, because tensor-parallel ranks compute some columns each. M rows, K inputs, N outputs.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from moeserve.ops.inputs import RowContext


class LinearMethod(Protocol):
    """A linear layer, created at start and called in every step.

    Layers from `Ops.pack_linear` have a packed weight, plain or quantized, and do not use
    `context`. A layer with a different product per row, such as one with LoRA adapters, can wrap
    the method from `Builder.linear` (blocks/build.py) and add its own product, chosen by `context`.
    Fused blocks (`Ops.attention_block` and others) take packed weights only, so a layer with a
    wrapped method calls each method by itself (`can_fuse`).
    """

    def __call__(self, x_MK: Tensor, context: RowContext) -> Tensor:
        """Return y [M, N] in the dtype of x [M, K]. context: of these rows."""


def can_fuse(*methods: LinearMethod | None) -> bool:
    """Return whether a fused block can read the weights of these layers. None: no layer."""
    return all(method is None or hasattr(method, "matrix") for method in methods)


# (weight [N, K], bias [N] or None) -> linear layer. Native and Triton tables also take `Quantized`.
PackLinear = Callable[[Any, Tensor | None], LinearMethod]

ROW_BUCKET = 16
LARGEST_PAD = 32  # the largest multiple of rows that `pick_ops` may choose
# Weights with fewer outputs are padded with zeros. torch has other kernels for up to 8 outputs, and
# oneDNN for 1; these sum in another order.
NARROW = 16


def padded_rows(rows: int, pad: int) -> int:
    """Return the number of rows to compute for `rows`: a multiple of `pad`, and at least 1.

    It has few different values, because oneDNN compiles a kernel for each (0.3 ms) and caches about
    a thousand. Above 16 rows, at most 15 rows or a sixteenth are padding.

    (1, 1) -> 1, (3, 8) -> 8, (17, 1) -> 32, (1000, 1) -> 1024.
    """
    step = max(pad, ROW_BUCKET, 1 << max(0, rows.bit_length() - 5)) if rows > ROW_BUCKET else pad
    return max(1, -(-rows // step)) * step


class PlainLinear:
    """F.linear, batch-invariant by padding of rows to a multiple of `pad`.

    torch chooses its kernel by the number of rows. x [[1, 2]], weight [[3, 4]], bias [5] -> [[16]].
    """

    __slots__ = ("bias", "columns", "pad", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pad: int = 1) -> None:
        if weight.untyped_storage().nbytes() > weight.nbytes:
            weight = weight.clone()  # a view would keep the whole tensor in memory
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
        """Return x W^T + bias, [M, N]."""
        rows = x_MK.shape[0]
        if extra := -rows % self.pad:
            x_MK = F.pad(x_MK, (0, 0, 0, extra))
        y_MN = F.linear(x_MK, self.weight, self.bias)[:rows]
        return y_MN if self.columns >= NARROW else y_MN[:, : self.columns].contiguous()
