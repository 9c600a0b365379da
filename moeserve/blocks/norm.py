"""Norms of the residual stream and of the outputs of blocks. T tokens, D model width."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """An RMS norm (Zhang and Sennrich 2019), or a layer norm (Ba et al. 2016) if `centred`.

    Weights and bias are fp32 [D].
    """

    ops: Ops
    eps: float
    weight_D: Tensor
    bias_D: Tensor | None = None
    centred: bool = False

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the normed activations, in x's dtype."""
        if not self.centred:
            return self.ops.rms_norm(x_TD, self.weight_D, self.eps)
        normed = torch.nn.functional.layer_norm(
            x_TD.float(), self.weight_D.shape, self.weight_D, self.bias_D, self.eps
        )
        return normed.to(x_TD.dtype)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum, and the sum. May overwrite the arguments."""
        if not self.centred:
            return self.ops.add_rms_norm(x_TD, residual_TD, self.weight_D, self.eps)
        total_TD = x_TD + residual_TD
        return self(total_TD), total_TD
