"""Computes hyper-connections (blocks/hyper_connection.py). Coefficients and sums are fp32.

Sums over streams run in the order of the streams, so that bits do not depend on the batch.

Shapes: T tokens (including padding), D model width, S streams, C = S * D width of a token's
streams, N coefficients of a token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.hyper_connection import HyperCollapse, HyperConnection, MeanCollapse
from moeserve.blocks.residual_layer import Residual
from moeserve.ops.elementwise import exp
from moeserve.ops.inputs import RowContext


class Coefficients:
    """Computes W rms_norm(streams) * scale + base."""

    def __init__(self, build: Builder, name: str, parts: Sequence[int], eps: float) -> None:
        """parts: the number of coefficients with a common scale. name: prefix of parameters."""
        self._ops = build.ops
        self._eps = eps
        self._product = build.linear(name + "fn")
        self._base_N = build.fp32(name + "base")
        counts = torch.tensor(parts)

        def expand(scale: Tensor) -> Tensor:
            return scale.repeat_interleave(counts.to(scale.device))

        self._scale_N = build.fp32(name + "scale", expand)
        self._ones_C: Tensor | None = None  # the norm has no weights

    def __call__(self, streams_TC: Tensor) -> Tensor:
        """Return the coefficients, fp32 [T, N]."""
        if self._ones_C is None:
            self._ones_C = streams_TC.new_ones(streams_TC.shape[1], dtype=torch.float32)
        normed_TC = self._ops.rms_norm(streams_TC.float(), self._ones_C, self._eps)
        mixed_TN = self._product(normed_TC, RowContext(len(normed_TC)))
        return mixed_TN * self._scale_N + self._base_N


class HyperConnectionLayer:
    """Connects one block with the streams."""

    def __init__(self, spec: HyperConnection, build: Builder, name: str) -> None:
        self._spec = spec
        self._ops = build.ops
        self._coefficients = Coefficients(build, name, spec.parts, spec.norm_eps)

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the block's input, and the streams with the coefficients that `write` needs."""
        spec = self._spec
        count = spec.streams
        streams_TC = residual.streams_TC
        coefficients_TN = self._coefficients(streams_TC)
        gates_TN = self._ops.sigmoid(coefficients_TN[:, : 2 * count].contiguous())
        x_TD = weighted_sum(streams_TC, gates_TN[:, :count] + spec.eps)
        post_TS = gates_TN[:, count:] * spec.post_factor + spec.post_eps
        if not spec.rounds:
            return x_TD, Residual(streams_TC, (post_TS,))
        mix_TSS = coefficients_TN[:, 2 * count :].reshape(-1, count, count)
        return x_TD, Residual(streams_TC, (post_TS, normalized(mix_TSS, spec.rounds, spec.eps)))

    def write(self, out_TD: Tensor, residual: Residual) -> Residual:
        """Mix the streams, and add the block's output to each."""
        count = self._spec.streams
        streams_TC = residual.streams_TC
        streams_TSD = streams_TC.view(len(streams_TC), count, -1).float()
        post_TS, *mix = residual.carried
        total_TSD = post_TS[:, :, None] * out_TD[:, None].float()
        if not mix:
            total_TSD += streams_TSD
        for j in range(count if mix else 0):
            total_TSD += mix[0][:, j, :, None] * streams_TSD[:, j, None]
        return Residual(total_TSD.flatten(1).to(streams_TC.dtype))


class HyperCollapseLayer:
    """Reduces the streams to one, before the last norm."""

    def __init__(self, spec: HyperCollapse, build: Builder, name: str) -> None:
        self._ops = build.ops
        self._eps = spec.eps
        self._coefficients = Coefficients(build, name, (spec.streams,), spec.norm_eps)

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the weighted sum of the streams."""
        weights_TS = self._ops.sigmoid(self._coefficients(residual.streams_TC)) + self._eps
        return weighted_sum(residual.streams_TC, weights_TS), residual

    def write(self, out_TD: Tensor, residual: Residual) -> Residual:
        """Is never called: no block follows."""
        raise AssertionError("the last norm has no output to add")


class MeanCollapseLayer:
    """Reduces the streams to their mean, before the last norm."""

    def __init__(self, spec: MeanCollapse, build: Builder, name: str) -> None:
        self._count = spec.streams

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Return the mean of the streams."""
        streams_TC = residual.streams_TC
        total_TD = _sum(streams_TC.view(len(streams_TC), self._count, -1).float().unbind(1))
        return (total_TD / self._count).to(streams_TC.dtype), residual

    def write(self, out_TD: Tensor, residual: Residual) -> Residual:
        """Is never called: no block follows."""
        raise AssertionError("the last norm has no output to add")


def weighted_sum(streams_TC: Tensor, weights_TS: Tensor) -> Tensor:
    """Return the sum of a token's streams with these weights, [T, D] in the dtype of the streams.

    streams [[1, 2, 3, 4]], weights [[10, 1]] -> [[13, 24]].
    """
    streams_TSD = streams_TC.view(*weights_TS.shape, -1)
    terms = [
        streams_TSD[:, j].float() * weights_TS[:, j : j + 1] for j in range(weights_TS.shape[1])
    ]
    return _sum(terms).to(streams_TC.dtype)


def normalized(mix_TSS: Tensor, rounds: int, eps: float) -> Tensor:
    """Return the softmax of rows + eps, with columns, then rows and columns in turns, divided by
    their sums + eps. rounds: how often columns are divided.
    """
    # [S, S, T], so that a sum over rows or columns is a sum of slices.
    mix_SST = mix_TSS.permute(1, 2, 0)
    powers_SST = exp((mix_SST - mix_SST.amax(1, keepdim=True)).contiguous())
    mix_SST = powers_SST / _sum(powers_SST.unbind(1))[:, None] + eps
    mix_SST = mix_SST / (_sum(mix_SST.unbind(0)) + eps)
    for _ in range(rounds - 1):
        mix_SST = mix_SST / (_sum(mix_SST.unbind(1)) + eps)[:, None]
        mix_SST = mix_SST / (_sum(mix_SST.unbind(0)) + eps)
    return mix_SST.permute(2, 0, 1).contiguous()


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """Add terms in their order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
