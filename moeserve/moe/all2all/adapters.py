"""Puts a kernel for GROUPED rows behind a backend with SLOTTED ones.

e local experts, C rows that each has room for, D model width, P rows.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.moe.all2all.base import All2All, Inbound, Layout, Pending, Ticket
from moeserve.moe.all2all.layout import grouped_of, slotted_of
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch


class GroupedFromSlotted:
    """A backend that copies the valid rows of `inner`'s [e, C, D] to [P, D], and the results back."""

    def __init__(self, inner: All2All) -> None:
        self._inner = inner
        self.caps = replace(inner.caps, layouts=inner.caps.layouts | {Layout.GROUPED})

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        """See `All2All`."""
        self._inner.join(members, experts_per_rank, ubatches)
        self.caps = replace(self.caps, max_tokens=self._inner.caps.max_tokens)

    def leave(self) -> None:
        """See `All2All`."""
        self._inner.leave()

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Pending[Ticket]:
        """See `All2All`."""
        return _GroupedRows(self._inner.dispatch(x_TD, routing, ubatch))

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch) -> Pending[Tensor]:
        """See `All2All`."""
        ticket.use()
        inner: Ticket = ticket.private
        y_eCD = torch.empty_like(inner.inbound.x) if inner.y is None else inner.y
        slotted_of(y, inner.inbound.host_counts_e, y_eCD)
        return self._inner.combine(inner, y_eCD, out_TD, ubatch)


@dataclass(frozen=True, slots=True)
class _GroupedRows(Pending[Ticket]):
    inner: Pending[Ticket]

    @property
    def arrived_ns(self) -> int:
        return self.inner.arrived_ns

    def arrive(self) -> None:
        self.inner.arrive()

    def wait(self) -> Ticket:
        ticket = self.inner.wait()
        counts_e = ticket.inbound.host_counts_e
        rows_PD = grouped_of(ticket.inbound.x, counts_e)
        return Ticket(Inbound(Layout.GROUPED, rows_PD, counts_e, counts_e.cumsum()), ticket.routing, ticket)
