"""A router's scores by an MLP (ZAYA): a norm and three products, with GELU between them.

T: tokens. R: inner width. E: experts.
"""

from dataclasses import dataclass

from torch import Tensor

from moeserve.ops.elementwise import gelu
from moeserve.ops.inputs import RowContext
from moeserve.ops.linear import LinearMethod
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True, eq=False)
class RouterMLP:
    """Maps the router's inputs [T, R] to logits [T, E]; a `LinearMethod`."""

    ops: Ops
    norm_R: Tensor
    eps: float
    first: LinearMethod
    second: LinearMethod
    last: LinearMethod

    def __call__(self, x_MK: Tensor, context: RowContext) -> Tensor:
        """Return the logits [T, E]."""
        if not len(x_MK):  # in a step without tokens, rows have the width of the model
            x_MK = x_MK.new_empty((0, len(self.norm_R)))
        x_TR = self.ops.rms_norm(x_MK, self.norm_R, self.eps)
        for layer in (self.first, self.second):
            x_TR = gelu(layer(x_TR, context).float()).to(x_TR.dtype)
        return self.last(x_TR, context)
