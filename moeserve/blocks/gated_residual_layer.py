"""Computes gated residuals (blocks/gated_residual.py). Gates and sums are fp32.

Sums over streams run in the order of the streams, so that bits do not depend on the batch.

Shapes: T tokens (including padding), D model width, S streams, C = S * D width of a token's
streams, R width between `down` and `up`.
"""

import torch
from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.gated_residual import AllStreams, GatedResidual
from moeserve.blocks.residual_layer import Residual
from moeserve.ops.inputs import RowContext
from moeserve.ops.table import Ops


class StreamNorms:
    """RMS norms of a token's streams, with weights for each stream."""

    def __init__(self, build: Builder, name: str, streams: int) -> None:
        """name: of the parameter with the weights [C]."""
        self._ops = build.ops
        self._eps = build.eps
        self._weight_SD = build.norm(name).view(streams, -1)
        self._ones_D = torch.ones_like(self._weight_SD[0])  # rounds once: after the weights

    def __call__(self, streams_TC: Tensor) -> Tensor:
        """Return the normed streams [T, S, D] in fp32."""
        rows = streams_TC.float().view(-1, self._weight_SD.shape[1])
        normed = self._ops.rms_norm(rows, self._ones_D, self._eps)
        return normed.view(-1, *self._weight_SD.shape) * self._weight_SD


class GatedResidualLayer:
    """Connects one block with the streams."""

    def __init__(self, spec: GatedResidual, build: Builder, name: str) -> None:
        self._spec = spec
        self._ops = build.ops
        self._norms = StreamNorms(build, name + "norm", spec.streams)
        self._down = build.linear(name + "down")  # C -> R
        self._up = build.linear(name + "up")  # R -> C
        self._inject = build.linear(name + "inject") if spec.injects else None  # C -> S

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the gated mean of the normed streams, and the streams with the weights of the
        block's output.
        """
        streams_TC = residual.streams_TC
        count = self._spec.streams
        context = RowContext(len(streams_TC))
        normed_TSD = self._norms(streams_TC).to(streams_TC.dtype)
        normed_TC = normed_TSD.flatten(1)
        low_TR = silu(self._ops, self._down(normed_TC, context).float() / count)
        gates_TC = self._ops.sigmoid(self._up(low_TR.to(streams_TC.dtype), context).float())
        gated_TSD = gates_TC.view_as(normed_TSD) * normed_TSD
        x_TD = (in_order(gated_TSD) / count).to(streams_TC.dtype)
        if self._inject is None:
            return x_TD, residual
        weights_TS = 2 * self._ops.sigmoid(self._inject(normed_TC, context).float() / count)
        return x_TD, Residual(streams_TC, (weights_TS,))

    def write(self, out_TD: Tensor, residual: Residual) -> Residual:
        """Add the block's output to each stream, multiplied by the stream's weight."""
        streams_TC, (weights_TS,) = residual
        added_TSD = weights_TS[:, :, None] * out_TD[:, None].float()
        total_TC = streams_TC.float() + added_TSD.flatten(1)
        return Residual(total_TC.to(streams_TC.dtype))


class AllStreamsLayer:
    """Passes the streams to a block, and adds its output [T, C] to them."""

    def __init__(self, spec: AllStreams, build: Builder, name: str) -> None:
        pass

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the streams."""
        return residual.streams_TC, residual

    def write(self, out_TC: Tensor, residual: Residual) -> Residual:
        """Add the block's output."""
        return Residual(residual.streams_TC + out_TC)


def silu(ops: Ops, x_TN: Tensor) -> Tensor:
    """Return x * sigmoid(x), fp32, batch-invariant."""
    return x_TN * ops.sigmoid(x_TN)


def in_order(x_TSD: Tensor) -> Tensor:
    """Return the sum over the second dimension, [T, D], in ascending order."""
    total_TD = x_TSD[:, 0].clone()
    for i in range(1, x_TSD.shape[1]):
        total_TD += x_TSD[:, i]
    return total_TD
