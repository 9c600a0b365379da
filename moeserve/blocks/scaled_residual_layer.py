"""ZAYA's residual connections (blocks/scaled_residual.py).

Shapes: T tokens, D model width, R width of the projection that routers read.
"""

import torch
from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.norm import Norm
from moeserve.blocks.residual_layer import Residual
from moeserve.blocks.scaled_residual import HeldOutput, ScaledResidual
from moeserve.ops.inputs import RowContext


class HeldOutputLayer:
    """A block reads the normed stream, and the next block reads its output."""

    def __init__(self, spec: HeldOutput, build: Builder, name: str) -> None:
        self._norm = Norm(build.ops, build.eps, build.norm(name + "norm"))
        self._dtype = build.ops.dtype
        self._embeddings = None  # bias and factor of embeddings
        if spec.embeddings:
            self._embeddings = build.fp32(name + "bias"), build.fp32(name + "scale")

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the normed stream, and the stream in fp32."""
        stream_TD = residual.streams_TC.float()
        if self._embeddings is not None:
            bias_D, scale_D = self._embeddings
            stream_TD = (stream_TD + bias_D) * scale_D
        return self._norm(stream_TD.to(self._dtype)), residual._replace(streams_TC=stream_TD)

    def write(self, out_TD: Tensor, residual: Residual) -> Residual:
        """Carry the output to the next block."""
        return residual._replace(carried=(*residual.carried, out_TD))


class ScaledResidualLayer:
    """Adds the output of a block to the stream, both scaled.

    What is carried: the router's input of the layer before, if any; and the output of the block
    before, if it is this block's input.
    """

    def __init__(self, spec: ScaledResidual, build: Builder, name: str) -> None:
        self._spec = spec
        self._dtype = build.ops.dtype
        self._of_output = tuple(
            build.fp32(name + part) for part in ("hidden_states_bias", "hidden_states_scale")
        )
        self._of_stream = tuple(
            build.fp32(name + part) for part in ("residual_bias", "residual_scale")
        )
        self._norm = None
        if spec.norm:
            self._norm = Norm(build.ops, build.eps, build.norm(name + "norm"))
        self._down = build.linear(name + "down") if spec.router else None
        self._earlier_scale_R = None
        if spec.router and not spec.is_first_router:
            self._earlier_scale_R = build.fp32(name + "earlier_scale")

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the block's input. For a block with a router, the router's input follows it:
        [T, D + R].
        """
        stream_TD, carried = residual
        if self._norm is None:
            return carried[-1], Residual(stream_TD, carried[:-1])
        x_TD = self._norm(stream_TD.to(self._dtype))
        if self._down is None:
            return x_TD, residual
        state_TR = self._down(x_TD, RowContext(len(x_TD)))
        if self._earlier_scale_R is not None:
            earlier_TR = carried[0].float() * self._earlier_scale_R
            state_TR = (state_TR.float() + earlier_TR).to(state_TR.dtype)
        return torch.cat((x_TD, state_TR), 1), Residual(stream_TD, (state_TR,))

    def write(self, out_TD: Tensor, residual: Residual) -> Residual:
        """Return the stream after the output has been added."""
        stream_bias_D, stream_scale_D = self._of_stream
        bias_D, scale_D = self._of_output
        output_TD = (out_TD.float() + bias_D) * scale_D
        stream_TD = (residual.streams_TC + stream_bias_D) * stream_scale_D
        return residual._replace(streams_TC=output_TD + stream_TD)
