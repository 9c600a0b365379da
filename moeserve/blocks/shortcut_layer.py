"""The residual connection with a shortcut over several blocks. T tokens, D model width."""

from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.norm import Norm
from moeserve.blocks.residual_layer import Residual
from moeserve.blocks.shortcut import Shortcut


class ShortcutLayer:
    """The connection of one block with the residual stream."""

    def __init__(self, spec: Shortcut, build: Builder, name: str) -> None:
        self._norm = Norm(build.ops, build.eps, build.norm(name + "norm"))
        self._sets_aside = spec.sets_aside
        self._adds_aside = spec.adds_aside

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the normed stream, and the stream."""
        return self._norm(residual.streams_TC), residual

    def write(self, out_TD: Tensor, residual: Residual) -> Residual:
        """Return the stream after the output has been added, and what is set aside."""
        stream_TD, carried = residual
        if self._sets_aside:
            out_TD, aside_TD = out_TD.chunk(2, 1)
            carried = (aside_TD,)
        stream_TD = stream_TD + out_TD
        if self._adds_aside:
            stream_TD = stream_TD + carried[0]
            carried = ()
        return Residual(stream_TD, carried)
