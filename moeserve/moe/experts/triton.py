"""Experts by the Triton kernels: grouped products over rows sorted by expert, gate and up with SwiGLU in one of them.

Weights of 16 or 32 bits stay as checkpoints have them; those of 4 or 8 are laid out for their kernels.

T tokens, P received rows, D model width, I expert width, e local experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.kernels.align import Alignment, align, align_groups
from moeserve.kernels.combine import combine
from moeserve.kernels.configs import Config
from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertsCaps, ExpertWeights, FusedExperts, StackedExperts
from moeserve.moe.routing import Router
from moeserve.ops.triton_weights import Kernels, kernels_for, parts_of, with_parts


@dataclass(frozen=True, slots=True)
class PackedTriton:
    """Both weights [e, ...] in the layout of the kernels that serve their format; in w13 gate rows, then up rows."""

    kernels: Kernels
    w13: Any
    w2: Any

    @property
    def parts(self) -> list[Tensor]:
        """See `StackedExperts`."""
        return [*parts_of(self.w13), *parts_of(self.w2)]

    def of_parts(self, parts: Sequence[Tensor]) -> PackedTriton:
        """See `StackedExperts`."""
        split = len(parts_of(self.w13))
        return PackedTriton(self.kernels, with_parts(self.w13, parts[:split]), with_parts(self.w2, parts[split:]))

    def launch(self, num_rows: int, x: Tensor) -> Config:
        """Returns how products of so many rows like x with these weights run."""
        return self.kernels.launch(num_rows, self.w2, x)

    def run(self, x: Tensor, to: Alignment, config: Config, out: Tensor, top_k: int = 1) -> None:
        """Runs both products, from rows x to rows of out."""
        kernels = self.kernels
        hidden = kernels.gate_up(kernels.rows(x), self.w13, to, config, top_k)
        kernels.down(hidden, self.w2, to, config, out)


class TritonExperts(StackedExperts):
    """SwiGLU experts over grouped rows."""

    caps = ExpertsCaps(
        name="triton",
        layouts=frozenset({Layout.GROUPED}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        devices=frozenset({"cuda", "cpu"}),  # cpu: interpreted, in tests
        device_counts=True,
    )

    def pack(self, weights: ExpertWeights) -> PackedTriton:
        """See `Experts`."""
        kernels = kernels_for(weights.w13_eFD, weights.w2_eDI)
        return PackedTriton(kernels, kernels.lay(weights.w13_eFD), kernels.lay(weights.w2_eDI))

    def run(self, inbound: Inbound, weights: PackedTriton, out: Tensor) -> None:
        """See `Experts`."""
        ends_e = inbound.ends_e
        if isinstance(ends_e, Tensor):
            rows, expected = inbound.x.shape[0], inbound.expected
        else:
            rows = expected = int(ends_e[-1])
            ends_e = torch.from_numpy(ends_e).to(inbound.x.device, torch.int32)
        if not rows:
            return
        x_PD = inbound.x[:rows]
        config = weights.launch(expected, x_PD)
        weights.run(x_PD, align_groups(ends_e, rows, config["block_m"]), config, out[:rows])

    def fuse(self, router: Router) -> FusedExperts:
        """See `Fusible`."""
        return partial(_run_fused, router)


def _run_fused(router: Router, x_TD: Tensor, packed: PackedTriton, num_tokens: int | Tensor) -> tuple[Tensor, Tensor]:
    """See `FusedExperts`; the host never waits for the device."""
    tokens, width = x_TD.shape
    routing = router(x_TD, num_tokens)
    top_k = routing.ids_TK.shape[1]
    config = packed.launch(tokens * top_k, x_TD)
    to = align(routing.ids_TK, packed.w2.shape[0], config["block_m"])
    y_ND = x_TD.new_empty((tokens * top_k, width))
    packed.run(x_TD, to, config, y_ND, top_k)
    out_TD = combine(y_ND.view(tokens, top_k, width), routing.weights_TK, routing.ids_TK)
    return out_TD, to.counts_e
