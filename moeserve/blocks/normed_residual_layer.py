"""The residual connection whose residual is the block's normed input. T tokens, D model width."""

from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.norm import Norm
from moeserve.blocks.normed_residual import NormedResidual
from moeserve.blocks.residual_layer import Residual


class NormedResidualLayer:
    """The connection of one block with the residual stream."""

    def __init__(self, spec: NormedResidual, build: Builder, name: str) -> None:
        self._norm = Norm(build.ops, build.eps, build.norm(name + "norm"))
        self._alpha = spec.alpha
        self._beta = spec.beta

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the normed stream, which is the block's input and the residual."""
        normed_TD = self._norm(residual.streams_TC)
        return normed_TD, Residual(normed_TD)

    def write(self, out_TD: Tensor, residual: Residual) -> Residual:
        """Return alpha * residual + beta * output, computed in fp32 and rounded once."""
        kept_TD = residual.streams_TC.float() * self._alpha
        total_TD = kept_TD + out_TD.float() * self._beta
        return Residual(total_TD.to(out_TD.dtype))
