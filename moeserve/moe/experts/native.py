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
from moeserve.ops.native_linear import native_type, pack, packed_memory, packing_of
from moeserve.ops.quantised import Weight


@dataclass(frozen=True, slots=True)
class Form:
    """What the bytes of a slot mean. width: D, hidden: I. gate_up: how each of the two is packed."""

    width: int
    hidden: int
    dtype: torch.dtype
    gate_up: Any
    down: Any

    @staticmethod
    def of(w13: Weight, w2: Weight) -> Form:
        """Of weights [..., 2I, D] and [..., D, I]."""
        width, hidden = w2.shape[-2:]
        return Form(width, hidden, w2.dtype, packing_of(w13, hidden), packing_of(w2))

    @property
    def slot_bytes(self) -> int:
        num_bytes: int = 2 * self.gate_up.bytes + self.down.bytes
        return num_bytes


@dataclass(frozen=True, slots=True)
class One:
    """One expert's packed bytes, and what they mean."""

    packed: Tensor
    form: Form


class Packed:
    """Slots of equal size: bytes_eS [e, bytes of a slot]."""

    __slots__ = ("bytes_eS", "form", "type")

    def __init__(self, num_slots: int, form: Form) -> None:
        self.form, self.type = form, native_type(form.dtype)
        self.bytes_eS = packed_memory(num_slots * form.slot_bytes).view(num_slots, form.slot_bytes)

    def fill(self, slot: int, w13_FD: Weight, w2_DI: Weight, all_threads: bool) -> None:
        """Packs one expert's weights into a slot."""
        gate_up, down = self.form.gate_up, self.form.down
        to, block = self.bytes_eS[slot].data_ptr(), gate_up.block_bytes
        halves: Sequence[Weight] = w13_FD.chunk(2)
        for i, half in enumerate(halves):
            pack(gate_up, half, to + i * block, 2 * block, all_threads)
        pack(down, w2_DI, to + 2 * gate_up.bytes, down.block_bytes, all_threads)


class NativeExperts:
    """SwiGLU experts over grouped rows."""

    caps = ExpertsCaps(
        name="native",
        layouts=frozenset({Layout.GROUPED}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        devices=frozenset({"cpu"}),
    )

    def pack(self, weights: ExpertWeights) -> Packed:
        packed = Packed(weights.num_slots, Form.of(weights.w13_eFD, weights.w2_eDI))
        for slot in range(weights.num_slots):
            packed.fill(slot, weights.w13_eFD[slot], weights.w2_eDI[slot], all_threads=True)
        return packed

    def pack_slot(self, w13_FD: Weight, w2_DI: Weight) -> One:
        one = Packed(1, Form.of(w13_FD, w2_DI))
        one.fill(0, w13_FD, w2_DI, all_threads=False)  # the pool is for those who compute
        return One(one.bytes_eS[0], one.form)

    def put(self, packed: Packed, slot: int, one: One) -> None:
        packed.bytes_eS[slot].copy_(one.packed)

    def take(self, packed: Packed, slot: int) -> One:
        return One(packed.bytes_eS[slot].clone(), packed.form)

    def stack(self, ones: Sequence[One]) -> Packed:
        packed = Packed(len(ones), ones[0].form)
        for slot, one in enumerate(ones):
            self.put(packed, slot, one)
        return packed

    def run(self, inbound: Inbound, weights: Packed, out: Tensor, scratch: Scratch) -> None:
        x_PD, form = inbound.x, weights.form
        assert x_PD.dtype == out.dtype == form.dtype
        assert x_PD.shape[1] == out.shape[1] == form.width
        assert x_PD.stride(1) == out.stride(1) == 1
        assert len(inbound.counts_e) == len(weights.bytes_eS)
        module: Any = native()
        module.experts(
            weights.type, form.gate_up, form.down, weights.bytes_eS.data_ptr(), weights.bytes_eS.shape[1],
            inbound.counts_e, x_PD.data_ptr(), x_PD.stride(0), out.data_ptr(), out.stride(0),
        )  # fmt: skip
