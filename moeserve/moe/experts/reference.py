"""Two expert kernels: the reference, which computes one expert after another with the matrix
products of the ops table; and `grouped_mm`, which computes all experts in two calls of torch's
grouped matrix product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import Experts, ExpertsCaps, ExpertWeights, StackedExperts
from moeserve.moe.experts.registry import ExpertFacts
from moeserve.ops.inputs import RowContext
from moeserve.ops.linear import LinearMethod
from moeserve.ops.rules import SWIGLU, Activation
from moeserve.ops.table import Ops

Products = tuple[LinearMethod, LinearMethod]  # w13 and w2 of one expert


def make(facts: ExpertFacts) -> "ReferenceExperts":
    """Return the reference kernel."""
    return ReferenceExperts(facts.ops)


def make_grouped_mm(facts: ExpertFacts) -> "GroupedMM":
    """Return the kernel with torch's grouped matrix product."""
    return GroupedMM(facts.ops)


class ReferenceExperts(Experts):
    """Two matrix products and an activation for each expert that has rows."""

    caps = ExpertsCaps(
        name="reference",
        layouts=frozenset(Layout),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        devices=frozenset({"cpu", "cuda"}),
        ungated=True,
    )

    def __init__(self, ops: Ops, activation: Activation = SWIGLU) -> None:
        self._ops = ops
        self._activation = activation

    def pack(self, weights: ExpertWeights) -> list[Products]:
        packed = []
        for expert in range(weights.num_experts):
            b13_F = None if weights.b13_eF is None else weights.b13_eF[expert]
            b2_D = None if weights.b2_eD is None else weights.b2_eD[expert]
            packed.append(
                self.pack_expert(weights.w13_eFD[expert], weights.w2_eDI[expert], b13_F, b2_D)
            )
        return packed

    def pack_expert(
        self, w13_FD: Any, w2_DI: Any, b13_F: Tensor | None = None, b2_D: Tensor | None = None
    ) -> Products:
        bias13_F = None if b13_F is None else b13_F.to(w13_FD.dtype)
        bias2_D = None if b2_D is None else b2_D.to(w2_DI.dtype)
        return self._ops.pack_linear(w13_FD, bias13_F), self._ops.pack_linear(w2_DI, bias2_D)

    def put(self, packed: list[Products], index: int, expert: Products) -> None:
        packed[index] = expert

    def take(self, packed: list[Products], index: int) -> Products:
        return packed[index]

    def stack(self, experts: Sequence[Products]) -> list[Products]:
        return list(experts)

    def run(self, inbound: Inbound, weights: list[Products], out: Tensor) -> None:
        ops = self._ops
        x, out = (part.view(-1, part.shape[-1]) for part in (inbound.x, out))
        counts_e = inbound.host_counts_e
        starts_e = counts_e.cumsum() - counts_e
        if inbound.layout is Layout.SLOTTED:
            starts_e = np.arange(len(counts_e)) * inbound.rows.shape[1]
        for expert in counts_e.nonzero()[0].tolist():
            start = int(starts_e[expert])
            end = start + int(counts_e[expert])
            padded = start + ops.pad_rows(end - start)
            w13, w2 = weights[expert]
            if padded <= x.shape[0]:
                # The rows that follow serve as padding, without a copy. Their results are dropped.
                x_MD = x[start:padded]
            else:
                x_MD = torch.nn.functional.pad(x[start:end], (0, 0, 0, padded - end))
            context = RowContext(end - start)
            inner = ops.act_mul(w13(x_MD, context), self._activation)
            out[start:end] = w2(inner, context)[: end - start]


@dataclass(frozen=True, slots=True)
class PackedGroupedMM:
    """Weights in the layout of checkpoints. The products use transposed views."""

    parts: tuple[Tensor, ...]  # w13 [e, 2I, D] and w2 [e, D, I]

    def of_parts(self, parts: Sequence[Tensor]) -> "PackedGroupedMM":
        return PackedGroupedMM(tuple(parts))


class GroupedMM(StackedExperts):
    """Experts without biases, for GROUPED rows on GPUs.

    It is not used on CPUs, because there the bits of a row depend on how many rows its expert has
    (measured with fp32). The bits of an answer must not depend on other requests in its batch.
    """

    caps = ExpertsCaps(
        name="grouped_mm",
        layouts=frozenset({Layout.GROUPED}),
        dtypes=frozenset({"bfloat16"}),
        devices=frozenset({"cuda"}),
        not_on={"cpu": "grouped_mm's bits depend on the number of rows on CPUs"},
        biases=False,
        width_step=8,  # rows of operands must be multiples of 16 bytes, in bfloat16
    )

    def __init__(self, ops: Ops, activation: Activation = SWIGLU) -> None:
        self._ops = ops
        self._activation = activation

    def pack(self, weights: ExpertWeights) -> PackedGroupedMM:
        assert weights.b13_eF is None, "plan_moe does not give biases to a kernel without them"
        return PackedGroupedMM((weights.w13_eFD, weights.w2_eDI))

    def run(self, inbound: Inbound, weights: PackedGroupedMM, out: Tensor) -> None:
        ends = inbound.host_counts_e.cumsum()
        rows = int(ends[-1])
        if not rows:
            return
        w13_eDF, w2_eID = (part.transpose(1, 2) for part in weights.parts)
        ends_e = torch.from_numpy(ends).to(inbound.rows.device, torch.int32)
        hidden_PF = torch._grouped_mm(inbound.x[:rows], w13_eDF, offs=ends_e)
        out[:rows] = torch._grouped_mm(
            self._ops.act_mul(hidden_PF, self._activation), w2_eID, offs=ends_e
        )
