"""Experts in C++: all slots with rows in one call, gate and up read as pairs of blocks with SwiGLU on the fp32 sums.

A slot is one piece of memory, gate and up in alternating blocks and then down, so moving an expert copies a row of
bytes. Rows cost what their experts' weights and their own products cost, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertsCaps, ExpertWeights
from moeserve.moe.lane import Scratch
from moeserve.ops.native import native
from moeserve.ops.native_linear import native_type, packed_memory


@dataclass(frozen=True, slots=True)
class One:
    """One expert's packed bytes, and what they mean. width: D, hidden: I."""

    packed: Tensor
    width: int
    hidden: int
    dtype: torch.dtype


class Packed:
    """Slots of equal size: bytes_eS [e, bytes of a slot]."""

    __slots__ = ("bytes_eS", "down", "dtype", "gate_up", "hidden", "type", "width")

    def __init__(self, num_slots: int, width: int, hidden: int, dtype: torch.dtype) -> None:
        module: Any = native()
        self.width, self.hidden, self.dtype, self.type = width, hidden, dtype, native_type(dtype)
        self.gate_up = module.Packing(self.type, width, hidden)
        self.down = module.Packing(self.type, hidden, width)
        slot_bytes = 2 * self.gate_up.bytes + self.down.bytes
        self.bytes_eS = packed_memory(num_slots * slot_bytes).view(num_slots, slot_bytes)

    def fill(self, slot: int, w13_FD: Tensor, w2_DI: Tensor, all_threads: bool) -> None:
        """Packs one expert's weights into a slot."""
        module: Any = native()
        w13_FD, w2_DI = w13_FD.contiguous(), w2_DI.contiguous()
        to, block = self.bytes_eS[slot].data_ptr(), self.gate_up.block_bytes
        for i, half in enumerate(w13_FD.chunk(2)):
            module.pack(
                self.gate_up, half.data_ptr(), self.width, 0, 0, to + i * block, 2 * block, all_threads,
            )  # fmt: skip
        down = to + 2 * self.gate_up.bytes
        module.pack(self.down, w2_DI.data_ptr(), self.hidden, 0, 0, down, self.down.block_bytes, all_threads)


class NativeExperts:
    """SwiGLU experts over grouped rows."""

    caps = ExpertsCaps(
        name="native",
        layouts=frozenset({Layout.GROUPED}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        devices=frozenset({"cpu"}),
    )

    def pack(self, weights: ExpertWeights) -> Packed:
        slots, width, hidden = weights.w2_eDI.shape
        packed = Packed(slots, width, hidden, weights.w2_eDI.dtype)
        for slot in range(slots):
            packed.fill(slot, weights.w13_eFD[slot], weights.w2_eDI[slot], all_threads=True)
        return packed

    def pack_slot(self, w13_FD: Tensor, w2_DI: Tensor) -> One:
        width, hidden = w2_DI.shape
        one = Packed(1, width, hidden, w2_DI.dtype)
        one.fill(0, w13_FD, w2_DI, all_threads=False)  # the pool is for those who compute
        return One(one.bytes_eS[0], one.width, one.hidden, one.dtype)

    def put(self, packed: Packed, slot: int, one: One) -> None:
        packed.bytes_eS[slot].copy_(one.packed)

    def take(self, packed: Packed, slot: int) -> One:
        return One(packed.bytes_eS[slot].clone(), packed.width, packed.hidden, packed.dtype)

    def stack(self, ones: Sequence[One]) -> Packed:
        packed = Packed(len(ones), ones[0].width, ones[0].hidden, ones[0].dtype)
        for slot, one in enumerate(ones):
            self.put(packed, slot, one)
        return packed

    def run(self, inbound: Inbound, weights: Packed, out: Tensor, scratch: Scratch) -> None:
        x_PD = inbound.x
        assert x_PD.dtype == out.dtype == weights.dtype
        assert x_PD.shape[1] == out.shape[1] == weights.width
        assert x_PD.stride(1) == out.stride(1) == 1
        assert len(inbound.counts_e) == len(weights.bytes_eS)
        module: Any = native()
        module.experts(
            weights.type, weights.gate_up, weights.down, weights.bytes_eS.data_ptr(), weights.bytes_eS.shape[1],
            inbound.counts_e, x_PD.data_ptr(), x_PD.stride(0), out.data_ptr(), out.stride(0),
        )  # fmt: skip
