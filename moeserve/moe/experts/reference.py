"""Experts one after another with the matrix products of the ops table: the reference of every expert kernel.

An expert's weights are read once per step, experts without rows are skipped, and row counts are rounded up over the
following rows instead of being copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertsCaps, ExpertWeights
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops

Products = tuple[Linear, Linear]  # w13 and w2 of one expert


class ReferenceExperts:
    """SwiGLU experts as two products and an activation for each expert that has rows."""

    caps = ExpertsCaps(
        name="reference",
        layouts=frozenset({Layout.GROUPED}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        devices=frozenset({"cpu", "cuda"}),
    )

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def pack(self, weights: ExpertWeights) -> list[Products]:
        """See `Experts`."""
        return [self.pack_expert(w13, w2) for w13, w2 in zip(weights.w13_eFD, weights.w2_eDI, strict=True)]

    def pack_expert(self, w13_FD: Any, w2_DI: Any) -> Products:
        """See `Experts`."""
        return self._ops.pack_linear(w13_FD, None), self._ops.pack_linear(w2_DI, None)

    def put(self, packed: list[Products], index: int, expert: Products) -> None:
        """See `Experts`."""
        packed[index] = expert

    def take(self, packed: list[Products], index: int) -> Products:
        """See `Experts`."""
        return packed[index]

    def stack(self, experts: Sequence[Products]) -> list[Products]:
        """See `Experts`."""
        return list(experts)

    def run(self, inbound: Inbound, weights: list[Products], out: Tensor) -> None:
        """See `Experts`."""
        ops = self._ops
        x_PD = inbound.x
        start = 0
        counts_e = inbound.host_counts_e
        for expert in counts_e.nonzero()[0].tolist():
            end = start + int(counts_e[expert])
            padded = start + ops.pad_rows(end - start)
            w13, w2 = weights[expert]
            if padded <= x_PD.shape[0]:
                x_MD = x_PD[start:padded]  # the next experts' rows fill up the shape; their results are dropped
            else:
                x_MD = torch.nn.functional.pad(x_PD[start:end], (0, 0, 0, padded - end))
            out[start:end] = w2(ops.silu_mul(w13(x_MD)))[: end - start]
            start = end
