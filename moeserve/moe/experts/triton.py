"""Experts by the Triton kernels: grouped products over rows sorted by slot, gate and up with SwiGLU in one of them.

Weights stay as checkpoints have them, slot by slot. T tokens, P received rows, D model width, I expert width, e slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.align import align, align_groups
from moeserve.kernels.combine import combine
from moeserve.kernels.configs import Config
from moeserve.kernels.grouped_gemm import device_name, down, gate_up, launch_of
from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertsCaps, ExpertWeights
from moeserve.moe.lane import Scratch
from moeserve.moe.routing import Router


@dataclass(frozen=True, slots=True)
class Packed:
    """w13_eFD: gate rows, then up rows. Both contiguous."""

    w13_eFD: Tensor
    w2_eDI: Tensor

    def launch(self, num_rows: int) -> Config:
        """How products of so many rows with these weights run."""
        (slots, width, inner), like = self.w2_eDI.shape, self.w2_eDI
        return launch_of(num_rows, slots, inner, width, like.dtype, device_name(like.device))


class TritonExperts:
    """SwiGLU experts over grouped rows."""

    caps = ExpertsCaps(
        name="triton",
        layouts=frozenset({Layout.GROUPED}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        devices=frozenset({"cuda", "cpu"}),  # cpu: interpreted, in tests
        device_counts=True,
    )

    def pack(self, weights: ExpertWeights) -> Packed:
        return Packed(weights.w13_eFD.contiguous(), weights.w2_eDI.contiguous())

    def pack_slot(self, w13_FD: Tensor, w2_DI: Tensor) -> tuple[Tensor, Tensor]:
        return w13_FD, w2_DI

    def put(self, packed: Packed, slot: int, one: tuple[Tensor, Tensor]) -> None:
        packed.w13_eFD[slot].copy_(one[0])
        packed.w2_eDI[slot].copy_(one[1])

    def take(self, packed: Packed, slot: int) -> tuple[Tensor, Tensor]:
        return packed.w13_eFD[slot].clone(), packed.w2_eDI[slot].clone()

    def stack(self, ones: Sequence[tuple[Tensor, Tensor]]) -> Packed:
        return Packed(*(torch.stack([one[i] for one in ones]) for i in range(2)))

    def run(self, inbound: Inbound, weights: Packed, out: Tensor, scratch: Scratch) -> None:
        ends_e = inbound.ends_e
        if isinstance(ends_e, Tensor):
            rows, expected = inbound.x.shape[0], inbound.expected
        else:
            rows = expected = int(ends_e[-1])
            ends_e = torch.from_numpy(ends_e).to(inbound.x.device, torch.int32)
        if not rows:
            return
        config = weights.launch(expected)
        to = align_groups(ends_e, rows, config["block_m"])
        down(gate_up(inbound.x[:rows], weights.w13_eFD, to, config), weights.w2_eDI, to, config, out[:rows])


class TritonBlock:
    """Router, experts and weighted sum of rows that stay on their rank: x [T, D] -> [T, D], without asking the device
    for anything."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def __call__(self, x_TD: Tensor, packed: Packed, num_tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(result, rows of each expert). Expert e is in slot e. Rows from num_tokens on are padding."""
        tokens, width = x_TD.shape
        routing = self._router(x_TD, tokens if num_tokens is None else num_tokens)
        top_k = routing.ids_TK.shape[1]
        config = packed.launch(tokens * top_k)
        to = align(routing.ids_TK, len(packed.w2_eDI), config["block_m"])
        y_ND = down(gate_up(x_TD, packed.w13_eFD, to, config, top_k), packed.w2_eDI, to, config)
        out_TD = combine(y_ND.view(tokens, top_k, width), routing.weights_TK, routing.ids_TK)
        return out_TD, to.counts_e
