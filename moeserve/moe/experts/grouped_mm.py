"""All experts in two launches of torch's grouped matrix product.

Not for CPUs: there the bits of a row depend on how many rows its expert has (seen with fp32), and a request's bits must
not depend on the others in its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertsCaps, ExpertWeights
from moeserve.moe.ubatch import Scratch
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class Packed:
    """w13_eDF and w2_eID: each slot's weights as the product takes them, views of slot-major memory."""

    w13_eDF: Tensor
    w2_eID: Tensor


class GroupedMM:
    """SwiGLU experts over grouped rows."""

    caps = ExpertsCaps(
        name="grouped_mm",
        layouts=frozenset({Layout.GROUPED}),
        dtypes=frozenset({"bfloat16"}),
        devices=frozenset({"cuda"}),
        not_on={"cpu": "grouped_mm's bits depend on the number of rows on CPUs"},
        width_step=8,  # bfloat16: every row of an operand must fill whole 16 bytes
    )

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def pack(self, weights: ExpertWeights) -> Packed:
        return Packed(weights.w13_eFD.transpose(1, 2), weights.w2_eDI.transpose(1, 2))

    def pack_expert(self, w13_FD: Tensor, w2_DI: Tensor) -> tuple[Tensor, Tensor]:
        return w13_FD.t(), w2_DI.t()

    def put(self, packed: Packed, slot: int, one: tuple[Tensor, Tensor]) -> None:
        packed.w13_eDF[slot].copy_(one[0])
        packed.w2_eID[slot].copy_(one[1])

    def take(self, packed: Packed, slot: int) -> tuple[Tensor, Tensor]:
        return packed.w13_eDF[slot].clone(), packed.w2_eID[slot].clone()

    def stack(self, ones: Sequence[tuple[Tensor, Tensor]]) -> Packed:
        w13_eFD, w2_eDI = (torch.stack([one[i].t() for one in ones]) for i in range(2))
        return self.pack(ExpertWeights(w13_eFD, w2_eDI))

    def run(self, inbound: Inbound, weights: Packed, out: Tensor, scratch: Scratch) -> None:
        ends = inbound.host_counts_e.cumsum()
        rows = int(ends[-1])
        if not rows:
            return
        ends_e = torch.from_numpy(ends).to(inbound.x.device, torch.int32)
        hidden_PF = torch._grouped_mm(inbound.x[:rows], weights.w13_eDF, offs=ends_e)
        out[:rows] = torch._grouped_mm(self._ops.silu_mul(hidden_PF), weights.w2_eID, offs=ends_e)
