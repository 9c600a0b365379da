"""The connection `DelayedOutput`. T tokens, D model width."""

from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.delayed_output import DelayedOutput
from moeserve.blocks.residual_layer import Residual


class DelayedOutputLayer:
    """The connection of one block with the residual stream."""

    def __init__(self, spec: DelayedOutput, build: Builder, name: str) -> None:
        self._takes = spec.takes
        self._holds = spec.holds

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the held output or the stream, and the stream."""
        stream_TD, held = residual
        return held[0] if self._takes else stream_TD, Residual(stream_TD)

    def write(self, out_TD: Tensor, residual: Residual) -> Residual:
        """Hold the block's output, or add it to the stream."""
        stream_TD = residual.streams_TC
        if self._holds:
            return Residual(stream_TD, (out_TD,))
        return Residual(stream_TD + out_TD)
