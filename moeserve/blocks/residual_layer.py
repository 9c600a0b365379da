"""The computation between two blocks: the output of the first one is added to the residual stream,
and the second one's input is read from it.

Shapes: T' tokens, padded for the kernels, D model width, C width of all residual streams together.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from moeserve.blocks.norm import Norm


class Residual(NamedTuple):
    """The residual streams of a model that has several."""

    streams_TC: Tensor  # one stream after the other
    # Results of a `read` that the following `write`, or a later `read`, needs.
    carried: tuple[Tensor, ...] = ()


class ConnectionLayer(Protocol):
    """The connection of one block, ready to run."""

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the block's input [T', D] before its norm, and the streams."""

    def write(self, out_TD: Tensor, residual: Residual) -> Residual:
        """Return the streams after the block's output has been added."""


class Junction(Protocol):
    """Maps a block's output [T', D] and the residual stream to the next block's input and the new
    residual stream: [T', D], or `Residual` if the model has several.
    """

    def __call__(self, out_TD: Tensor, residual: Any) -> tuple[Tensor, Any]: ...


@dataclass(frozen=True, slots=True, eq=False)
class AddNorm:
    """The junction of models with one residual stream."""

    norm: Norm | None  # of the next block's input
    post_norm: Norm | None = None  # of the block's output, before it is added
    output_scale: float = 1.0  # multiplies the block's output
    scale: Tensor | None = None  # multiplies the new residual stream

    def __call__(self, out_TD: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """May overwrite the arguments."""
        if self.post_norm is not None:
            out_TD = self.post_norm(out_TD)
        if self.output_scale != 1.0:
            out_TD = out_TD * self.output_scale
        if self.norm is not None and self.scale is None:
            return self.norm.add(out_TD, residual)
        total_TD = out_TD + residual
        if self.scale is not None:
            total_TD = (total_TD * self.scale).to(total_TD.dtype)
        x_TD = total_TD if self.norm is None else self.norm(total_TD)
        return x_TD, total_TD


@dataclass(frozen=True, slots=True, eq=False)
class Reconnect:
    """The junction of two blocks that have connections."""

    first: ConnectionLayer
    second: ConnectionLayer
    norm: Norm | None  # of the second block's input

    def __call__(self, out_TD: Tensor, residual: Residual) -> tuple[Tensor, Residual]:
        return read(self.second, self.norm, self.first.write(out_TD, residual))


def read(
    connection: ConnectionLayer, norm: Norm | None, residual: Residual
) -> tuple[Tensor, Residual]:
    """Return a block's input, normed, and the streams."""
    x_TD, residual = connection.read(residual)
    return x_TD if norm is None else norm(x_TD), residual
