"""Experts in C++: all slots with rows in one call, gate and up read as pairs of blocks with SwiGLU on the fp32 sums.

A slot is one piece of memory, gate and up in alternating blocks and then down, so moving an expert copies a row of
bytes. Rows cost what their experts' weights and their own products cost, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertsCaps, ExpertWeights
from moeserve.moe.routing import Router
from moeserve.moe.ubatch import Scratch
from moeserve.ops.native import native
from moeserve.ops.native_layer import ExpertsBlock
from moeserve.ops.native_linear import NativeLinear, Room, native_type, new_room, pack, packing_of
from moeserve.ops.quantised import Weight


@dataclass(frozen=True, slots=True)
class Packed:
    """Slots of equal size, and what their bytes mean.

    bytes_eS: [e, bytes of a slot]. width: D. gate_up: how each of the two is packed.
    """

    bytes_eS: Tensor
    width: int
    dtype: torch.dtype
    type: Any
    gate_up: Any
    down: Any

    @staticmethod
    def of(num_slots: int, w13: Weight, w2: Weight, room: Room = new_room) -> tuple[Packed, bool]:
        """For weights such as these, [..., 2I, D] and [..., D, I], and whether they are there already."""
        width, hidden = w2.shape[-2:]
        gate_up, down = packing_of(w13, hidden), packing_of(w2)
        slot_bytes = 2 * gate_up.bytes + down.bytes
        memory, is_there = room(num_slots * slot_bytes)
        bytes_eS = memory.view(num_slots, slot_bytes)
        return Packed(bytes_eS, width, w2.dtype, native_type(w2.dtype), gate_up, down), is_there

    def fill(self, slot: int, w13_FD: Weight, w2_DI: Weight, all_threads: bool) -> None:
        """Packs one expert's weights into a slot."""
        to, block = self.bytes_eS[slot].data_ptr(), self.gate_up.block_bytes
        halves: Sequence[Weight] = w13_FD.chunk(2)
        for i, half in enumerate(halves):
            pack(self.gate_up, half, to + i * block, 2 * block, all_threads)
        pack(self.down, w2_DI, to + 2 * self.gate_up.bytes, self.down.block_bytes, all_threads)


class NativeExperts:
    """SwiGLU experts over grouped rows."""

    caps = ExpertsCaps(
        name="native",
        layouts=frozenset({Layout.GROUPED}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        devices=frozenset({"cpu"}),
    )

    def __init__(self, room: Room = new_room) -> None:
        self._room = room

    def pack(self, weights: ExpertWeights) -> Packed:
        packed, is_there = Packed.of(weights.num_slots, weights.w13_eFD, weights.w2_eDI, self._room)
        for slot in range(0 if is_there else weights.num_slots):
            packed.fill(slot, weights.w13_eFD[slot], weights.w2_eDI[slot], all_threads=True)
        return packed

    def pack_expert(self, w13_FD: Weight, w2_DI: Weight) -> Packed:
        one, _ = Packed.of(1, w13_FD, w2_DI)
        one.fill(0, w13_FD, w2_DI, all_threads=False)  # the pool is for those who compute
        return one

    def put(self, packed: Packed, slot: int, one: Packed) -> None:
        packed.bytes_eS[slot].copy_(one.bytes_eS[0])

    def take(self, packed: Packed, slot: int) -> Packed:
        return replace(packed, bytes_eS=packed.bytes_eS[slot : slot + 1].clone())

    def stack(self, ones: Sequence[Packed]) -> Packed:
        bytes_eS = new_room(sum(one.bytes_eS.nbytes for one in ones))[0].view(len(ones), -1)
        return replace(ones[0], bytes_eS=torch.cat([one.bytes_eS for one in ones], out=bytes_eS))

    def run(self, inbound: Inbound, weights: Packed, out: Tensor, scratch: Scratch) -> None:
        x_PD = inbound.x
        assert x_PD.dtype == out.dtype == weights.dtype
        assert x_PD.shape[1] == out.shape[1] == weights.width
        assert x_PD.stride(1) == out.stride(1) == 1
        assert len(inbound.counts_e) == len(weights.bytes_eS)
        module: Any = native()
        module.experts(
            weights.type, weights.gate_up, weights.down, weights.bytes_eS.data_ptr(), weights.bytes_eS.shape[1],
            inbound.host_counts_e, x_PD.data_ptr(), x_PD.stride(0), out.data_ptr(), out.stride(0),
        )  # fmt: skip

    def fuse(self, router: Router) -> ExpertsBlock:
        """Returns one native call for router, experts and weighted sum."""
        assert isinstance(router.gate, NativeLinear)
        rule = router.rule
        return ExpertsBlock(router.gate, router.top_k, rule.score, rule.renormalize, router.ops.dtype)
