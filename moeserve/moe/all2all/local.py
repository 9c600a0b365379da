"""The backend of a single rank, which needs no communication. It is the specification: every exact
backend returns the same bits.
"""

from dataclasses import replace

import torch
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.moe.all2all.base import All2AllCaps, Inbound, Layout, Ticket
from moeserve.moe.all2all.layout import group_rows, grouped_rows, weighted_sum
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.all2all.wire_format import WireFormat
from moeserve.moe.pending import Completed
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch


def make(facts: BackendFacts) -> "LocalAll2All":
    """Return the backend of a single rank."""
    return LocalAll2All(facts.experts_per_rank, facts.wire)


class LocalAll2All:
    """The backend of a rank that has all experts: dispatch is a sort, combine is a sum.

    A lossy wire format is applied here too, so that one rank computes the same bits as many.
    """

    caps = All2AllCaps(
        name="local",
        layouts=frozenset({Layout.GROUPED}),
        row_dtypes=frozenset({"float32", "bfloat16", "float16"}),
        supports_world_size=lambda size: size == 1,
        in_place=True,
    )

    def __init__(self, num_experts: int, wire: WireFormat | None = None) -> None:
        self._num_experts = num_experts
        self._wire = wire if wire is not None and wire.lossy else None
        if self._wire is not None:  # a fused kernel would not round the rows
            self.caps = replace(self.caps, in_place=False)

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        self._num_experts = experts_per_rank

    def leave(self) -> None:
        """Do nothing: there are no connections."""

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Completed[Ticket]:
        rows = group_rows(routing.ids_TK, self._num_experts)
        if self._wire is not None:
            x_TD = self._wire.decode(self._wire.encode(x_TD), x_TD.dtype, x_TD.shape[1])
        x_PD = grouped_rows(x_TD, rows, routing.ids_TK.shape[1])
        inbound = Inbound(
            Layout.GROUPED, x_PD, counts_e=rows.counts_e, ends_e=rows.counts_e.cumsum()
        )
        return Completed(Ticket(inbound, routing, private=rows))

    def combine(
        self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch
    ) -> Completed[Tensor]:
        ticket.use()
        return Completed(weighted_sum(y, ticket.private, ticket.routing, out_TD))


class OwnExpertsOnly(LocalAll2All):
    """The backend with which a rank warms up before the ranks with the other experts have joined.

    It sends the rows for their experts to local experts. So kernels and shapes are those of a real
    step, but results are not.
    """

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Completed[Ticket]:
        ids_TK = torch.where(routing.ids_TK < 0, routing.ids_TK, routing.ids_TK % self._num_experts)
        return super().dispatch(x_TD, Routing(ids_TK, routing.weights_TK), ubatch)
