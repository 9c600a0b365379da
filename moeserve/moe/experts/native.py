"""The expert kernel in C++, which computes all local experts in one call.

An expert's packed weights are contiguous: gate and up in alternating blocks (only up, if there are
no gates), then down, then the biases, if there are any. So an expert is moved by copying one row of
bytes. The activation is applied to the fp32 sums of a pair of gate and up blocks. Rows are not
padded, so the cost of a row does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertsCaps, ExpertWeights, StackedExperts
from moeserve.moe.experts.registry import ExpertFacts
from moeserve.moe.routing import Router
from moeserve.ops.linear import can_fuse
from moeserve.ops.native import native
from moeserve.ops.native_layer import (
    BLOCK,
    Allocate,
    ExpertsBlock,
    NativeLinear,
    WriteExperts,
    allocate_new,
    pack,
    packing_of,
)
from moeserve.ops.native_rows import TYPES, can_route, native_activation
from moeserve.ops.quantized import Quantized, Weight
from moeserve.ops.rules import SWIGLU, Activation


@dataclass(frozen=True, slots=True)
class PackedNative:
    """The packed weights of a layer's local experts."""

    bytes_eB: Tensor  # [e, bytes of an expert]
    width: int  # model width
    dtype: torch.dtype
    type: Any  # the native code's name of dtype
    gate_up: Any  # packing of each of gate and up
    down: Any  # packing of down
    has_biases: bool
    num_halves: int  # 2: gate and up; 1: no gates
    # The weights' cache, if they are on disk (loader/expert_memory.py); then bytes_eB is on "meta".
    cached: Any = None

    @staticmethod
    def empty(
        num_experts: int,
        w13: Weight,
        w2: Weight,
        has_biases: bool,
        allocate: Allocate = allocate_new,
        lossless: bool = False,
    ) -> tuple[PackedNative, bool]:
        """Allocate memory for weights like w13 [..., 2I, D] and w2 [..., D, I].

        Return it, and whether it already holds the weights (from the cache of packed weights).
        """
        width, inner = w2.shape[-2:]
        gate_up = packing_of(w13, inner, lossless)
        down = packing_of(w2, lossless=lossless)
        num_halves = w13.shape[-2] // inner
        num_bytes = num_halves * gate_up.bytes + down.bytes
        if has_biases:  # fp32: those of gate and up, then those of down
            num_bytes += 4 * (num_halves * padded(inner) + padded(width))
        memory, is_packed = allocate(num_experts * num_bytes)
        bytes_eB = memory.view(num_experts, num_bytes)
        packed = PackedNative(
            bytes_eB=bytes_eB,
            width=width,
            dtype=w2.dtype,
            type=TYPES[w2.dtype],
            gate_up=gate_up,
            down=down,
            has_biases=has_biases,
            num_halves=num_halves,
        )
        return packed, is_packed

    @property
    def parts(self) -> tuple[Tensor]:
        assert self.cached is None, "experts on disk cannot move"
        return (self.bytes_eB,)

    def of_parts(self, parts: Sequence[Tensor]) -> PackedNative:
        return replace(self, bytes_eB=parts[0])

    def fill(
        self,
        index: int,
        w13_FD: Weight,
        w2_DI: Weight,
        b13_F: Tensor | None,
        b2_D: Tensor | None,
        all_threads: bool,
    ) -> None:
        """Pack one expert's weights to row `index`. all_threads: use the native thread pool."""
        address = self.bytes_eB[index].data_ptr()
        block_bytes = self.gate_up.block_bytes
        halves: Sequence[Weight] = w13_FD.chunk(self.num_halves)
        for i, half in enumerate(halves):
            pack(
                self.gate_up,
                half,
                target=address + i * block_bytes,
                block_stride=self.num_halves * block_bytes,
                all_threads=all_threads,
            )
        pack(
            self.down,
            w2_DI,
            target=address + self.num_halves * self.gate_up.bytes,
            block_stride=self.down.block_bytes,
            all_threads=all_threads,
        )
        if b13_F is None or b2_D is None:
            return
        bias_blocks = [pad_bias(half).view(-1, BLOCK) for half in b13_F.chunk(self.num_halves)]
        # The blocks of gate and up alternate, as those of their weights do.
        biases = torch.cat((torch.stack(bias_blocks, 1).flatten(), pad_bias(b2_D)))
        self.bytes_eB[index, -biases.nbytes :] = biases.view(torch.uint8)


def _fill_all(packed: PackedNative, weights: ExpertWeights) -> None:
    """Pack all experts to `packed`."""
    w13_eFD = weights.w13_eFD
    values = w13_eFD.values if isinstance(w13_eFD, Quantized) else w13_eFD
    # Dummy weights are views of one random expert (loader/dummy.py): pack it once, and copy.
    are_copies = weights.num_experts > 1 and values.stride(0) == 0
    for index in range(1 if are_copies else weights.num_experts):
        b13_F = None if weights.b13_eF is None else weights.b13_eF[index]
        b2_D = None if weights.b2_eD is None else weights.b2_eD[index]
        packed.fill(index, w13_eFD[index], weights.w2_eDI[index], b13_F, b2_D, all_threads=True)
    if are_copies:
        first, *others = packed.bytes_eB.numpy()
        # In threads, because page faults take longer than the copy.
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda other: np.copyto(other, first), others))  # `list` waits


def padded(columns: int) -> int:
    """Return the number of columns, rounded up to whole blocks."""
    return columns + -columns % BLOCK


def pad_bias(bias_N: Tensor) -> Tensor:
    """Return a bias in fp32, padded with zeros to whole blocks."""
    return torch.nn.functional.pad(bias_N.float(), (0, -len(bias_N) % BLOCK))


def make(facts: ExpertFacts) -> NativeExperts:
    """Return the native kernel."""
    ops = facts.ops
    return NativeExperts(
        ops.allocate, write_experts=ops.write_experts, lossless=ops.lossless != "off"
    )


class NativeExperts(StackedExperts):
    """The native kernel, for GROUPED rows."""

    caps = ExpertsCaps(
        name="native",
        layouts=frozenset({Layout.GROUPED}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        devices=frozenset({"cpu"}),
        ungated=True,
        fuses_ungated=True,
    )

    def __init__(
        self,
        allocate: Allocate = allocate_new,
        activation: Activation = SWIGLU,
        write_experts: WriteExperts | None = None,
        lossless: bool = False,
    ) -> None:
        self._allocate = allocate
        self._activation = activation
        self._write_experts = write_experts
        self._lossless = lossless

    def pack(self, weights: ExpertWeights) -> PackedNative:
        packed, is_packed = PackedNative.empty(
            weights.num_experts,
            weights.w13_eFD,
            weights.w2_eDI,
            has_biases=weights.b13_eF is not None,
            allocate=self._allocate,
            lossless=self._lossless,
        )
        if not is_packed:
            _fill_all(packed, weights)
        if self._write_experts is None:
            return packed
        handle = self._write_experts(packed.bytes_eB)
        return replace(packed, bytes_eB=packed.bytes_eB.to("meta"), cached=handle)

    def pack_expert(
        self, w13_FD: Weight, w2_DI: Weight, b13_F: Tensor | None = None, b2_D: Tensor | None = None
    ) -> PackedNative:
        expert, _ = PackedNative.empty(
            1, w13_FD, w2_DI, has_biases=b13_F is not None, lossless=self._lossless
        )
        # Without the native thread pool, which other threads are using to compute.
        expert.fill(0, w13_FD, w2_DI, b13_F, b2_D, all_threads=False)
        return expert

    def stack(self, experts: Sequence[PackedNative]) -> PackedNative:
        memory, _ = allocate_new(sum(expert.bytes_eB.nbytes for expert in experts))
        bytes_eB = memory.view(len(experts), -1)
        return experts[0].of_parts(
            [torch.cat([expert.bytes_eB for expert in experts], out=bytes_eB)]
        )

    def run(self, inbound: Inbound, weights: PackedNative, out: Tensor) -> None:
        x_PD = inbound.x
        assert x_PD.dtype == out.dtype == weights.dtype
        assert x_PD.shape[1] == out.shape[1] == weights.width
        assert x_PD.stride(1) == out.stride(1) == 1
        assert len(inbound.counts_e) == len(weights.bytes_eB)
        assert weights.num_halves == self._activation.parts
        module: Any = native()
        module.experts(
            weights.type, weights.gate_up, weights.down, weights.bytes_eB.data_ptr(),
            weights.bytes_eB.shape[1],
            native_activation(self._activation), weights.has_biases, inbound.host_counts_e,
            x_PD.data_ptr(),
            x_PD.stride(0), out.data_ptr(), out.stride(0), weights.cached,
        )  # fmt: skip

    def can_fuse(self, router: Router) -> bool:
        return router.fusible and can_fuse(router.gate) and can_route(router.rule)

    def fuse(self, router: Router) -> ExpertsBlock:
        assert isinstance(router.gate, NativeLinear)
        return ExpertsBlock(
            router.gate, router.top_k, router.rule, router.ops.dtype, self._activation,
            router.bias_E,
            router.expert_scale_E,
        )  # fmt: skip
