"""One rank, no communication: the specification that every other backend must agree with, bit for bit."""

from __future__ import annotations

from torch import Tensor

from moeserve.moe.all2all.base import All2AllCaps, Done, Inbound, Layout, Ticket
from moeserve.moe.all2all.layout import group_rows, weighted_sum
from moeserve.moe.lane import Lane
from moeserve.moe.routing import Routing


class LocalAll2All:
    """All experts are here; dispatch is a sort, combine is a sum."""

    caps = All2AllCaps(
        name="local",
        layouts=frozenset({Layout.GROUPED}),
        wires=frozenset({"float32", "bfloat16", "float16"}),
        world_sizes=lambda size: size == 1,
    )

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def dispatch(self, x_TD: Tensor, routing: Routing, lane: Lane) -> Done[Ticket]:
        rows = group_rows(routing.ids_TK, self._num_experts)
        lane.note_load(rows.counts_e)
        x_PD = x_TD.index_select(0, rows.order_P // routing.ids_TK.shape[1])
        inbound = Inbound(Layout.GROUPED, x_PD, rows.counts_e, rows.counts_e.cumsum())
        return Done(Ticket(inbound, routing, rows))

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, lane: Lane) -> Done[Tensor]:
        ticket.use()
        return Done(weighted_sum(y, ticket.private, ticket.routing, out_TD))
