"""All experts in two launches of torch's grouped matrix product.

CPUs are excluded: there the bits of a row depend on how many rows its expert has (seen with fp32), and a request's bits
must not depend on the other requests in its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertsCaps, ExpertWeights, StackedExperts
from moeserve.ops.rules import SWIGLU, Activation
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class PackedGroupedMM:
    """parts: w13 [e, 2I, D] and w2 [e, D, I], as checkpoints have them; the products take transposed views."""

    parts: tuple[Tensor, ...]

    def of_parts(self, parts: Sequence[Tensor]) -> "PackedGroupedMM":
        """See `StackedExperts`."""
        return PackedGroupedMM(tuple(parts))


class GroupedMM(StackedExperts):
    """Experts without biases over grouped rows."""

    caps = ExpertsCaps(
        name="grouped_mm",
        layouts=frozenset({Layout.GROUPED}),
        dtypes=frozenset({"bfloat16"}),
        devices=frozenset({"cuda"}),
        not_on={"cpu": "grouped_mm's bits depend on the number of rows on CPUs"},
        biases=False,
        width_step=8,  # bfloat16: every row of an operand must fill whole 16 bytes
    )

    def __init__(self, ops: Ops, activation: Activation = SWIGLU) -> None:
        self._ops, self._activation = ops, activation

    def pack(self, weights: ExpertWeights) -> PackedGroupedMM:
        """See `Experts`."""
        assert weights.b13_eF is None, "plan_moe does not give biases to a kernel without them"
        return PackedGroupedMM((weights.w13_eFD, weights.w2_eDI))

    def run(self, inbound: Inbound, weights: PackedGroupedMM, out: Tensor) -> None:
        """See `Experts`."""
        ends = inbound.host_counts_e.cumsum()
        rows = int(ends[-1])
        if not rows:
            return
        w13_eDF, w2_eID = (part.transpose(1, 2) for part in weights.parts)
        ends_e = torch.from_numpy(ends).to(inbound.rows.device, torch.int32)
        hidden_PF = torch._grouped_mm(inbound.x[:rows], w13_eDF, offs=ends_e)
        out[:rows] = torch._grouped_mm(self._ops.act_mul(hidden_PF, self._activation), w2_eID, offs=ends_e)
