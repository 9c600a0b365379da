"""Ranks of one host: rows are pulled from the senders' shared memory (csrc/shm/exchange.hpp).

T tokens of this rank, K experts per token, D model width, P rows received, e slots of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.comm.shm import ShmGroup, module
from moeserve.errors import PeerLost
from moeserve.moe.all2all.base import All2AllCaps, Inbound, Layout, Ticket
from moeserve.moe.all2all.rounds import round_tokens
from moeserve.moe.all2all.wire_format import RAW, WireFormat
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch

if TYPE_CHECKING:
    from moeserve._native import Element, Exchange, Region


@dataclass(slots=True)
class _ShmMembership:
    """One micro-batch's end of the exchange. Of each turn: where rows are gathered, how many fit there and its
    address, and
    shared memory for results. Asking a tensor for these would take a microsecond each."""

    exchange: Exchange
    slots: int
    deadline_s: float
    rows: list[Tensor]
    room: list[int]
    address: list[int]
    y: list[Tensor]


class ShmAll2All:
    """Any number of ranks on one host. max_tokens: of a step on one rank.

    Up to two dispatches of a micro-batch may be in flight; all ranks must wait for their results in the same order as
    well.
    """

    def __init__(
        self, hidden: int, dtype: torch.dtype, top_k: int, max_tokens: int, wire: WireFormat | None = None
    ) -> None:
        self._hidden = hidden
        self._dtype = dtype
        self._top_k = top_k
        self._wire = wire if wire is not None and wire.lossy else None  # None: rows travel as they lie in memory
        self._element = getattr(module().Element, str(dtype).removeprefix("torch."))
        self._round_tokens = partial(round_tokens, max_tokens, top_k, hidden * dtype.itemsize)
        self._group: ShmGroup | None = None
        self._memberships: list[_ShmMembership] = []
        self.caps = All2AllCaps(
            name="shm",
            layouts=frozenset({Layout.GROUPED}),
            wires=frozenset(RAW),
            max_tokens=max_tokens,
            copies=2 if self._wire is None else 3,
            devices=frozenset({"cpu"}),
            max_in_flight=module().Exchange.TURNS,
        )

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        self.leave()
        self.caps = replace(self.caps, max_tokens=self._round_tokens(members.size))
        row_bytes = self._hidden * self._dtype.itemsize
        facts = {
            "slots_per_rank": experts_per_rank,
            "max_tokens": self.caps.max_tokens,
            "top_k": self._top_k,
            "x_row_bytes": row_bytes if self._wire is None else self._wire.row_bytes(self._hidden),
            "y_row_bytes": row_bytes,
        }
        exchange, shape = module().Exchange, module().Shape(**facts)
        group = self._group = ShmGroup(members, range(members.size), "all2all", ubatches)
        region_bytes = exchange.region_bytes(members.size, shape)
        opened = group.open_channels(region_bytes, f"{facts} {self._dtype} {self._wire and self._wire.name}")
        self._memberships = [
            self._membership(exchange(channel, shape), region, experts_per_rank, members.deadline_s)
            for channel, region in opened
        ]

    def _membership(self, exchange: Exchange, region: Region, slots: int, deadline_s: float) -> _ShmMembership:
        turns, elements = range(exchange.TURNS), exchange.y_capacity * self._hidden
        y = [
            torch.frombuffer(region, dtype=self._dtype, count=elements, offset=exchange.y_offset(turn))
            for turn in turns
        ]
        rows, nothing = [self._row_buffer(0) for _ in turns], [0 for _ in turns]
        return _ShmMembership(
            exchange, slots, deadline_s, rows, nothing, [*nothing], [f.view(-1, self._hidden) for f in y]
        )

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()
        self._memberships = []  # memory goes with the last call and the last tensor that use it

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> _ShmRows:
        memberships = self._memberships
        if not memberships:
            raise PeerLost("this rank is in no group")
        tokens, top_k = routing.ids_TK.shape
        if x_TD.shape != (tokens, self._hidden) or x_TD.dtype != self._dtype:
            asked = f"{list(x_TD.shape)} {x_TD.dtype} with {tokens} rows of ids"
            raise ValueError(f"cannot dispatch {asked}; this backend takes [T, {self._hidden}] {self._dtype}")
        ids_TK = _plain(routing.ids_TK, torch.int32)
        rows = _plain(x_TD, x_TD.dtype) if self._wire is None else self._wire.encode(x_TD).contiguous()
        membership = memberships[ubatch.index]
        turn = membership.exchange.dispatch(ids_TK.data_ptr(), tokens, top_k, rows.data_ptr())
        return _ShmRows(self, membership, turn, routing)

    def take(
        self, membership: _ShmMembership, turn: int, counts_and_ends: NDArray[np.int64], timeout_s: float
    ) -> tuple[Tensor, int]:
        """x_PD, gathered from all ranks, and P; valid until the micro-batch's turn is dispatched again."""
        room = membership.room[turn]
        num_rows = membership.exchange.await_rows(turn, timeout_s, counts_and_ends, membership.address[turn], room)
        if num_rows > room:
            grown = membership.rows[turn] = self._row_buffer(num_rows)
            membership.room[turn], membership.address[turn] = num_rows, grown.data_ptr()
            membership.exchange.take_rows(turn, membership.address[turn])
        rows = membership.rows[turn].narrow(0, 0, num_rows)
        return rows if self._wire is None else self._wire.decode(rows, self._dtype, self._hidden), num_rows

    def _row_buffer(self, num_rows: int) -> Tensor:
        if self._wire is None:
            return torch.empty((num_rows, self._hidden), dtype=self._dtype)
        return torch.empty((num_rows, self._wire.row_bytes(self._hidden)), dtype=torch.uint8)

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch) -> _Sums:
        ticket.use()
        membership, turn = ticket.private
        assert ticket.y is not None
        if y is not ticket.y and y.data_ptr() != ticket.y.data_ptr():
            ticket.y.copy_(y[: ticket.y.shape[0]])
        membership.exchange.combine(turn)
        return _Sums(self._element, membership, turn, ticket.routing, out_TD)


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as the native code reads it. A tensor that needs nothing costs nothing: each torch call takes a microsecond."""
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()


class _ShmRows:
    """A dispatch on its way."""

    def __init__(self, owner: ShmAll2All, membership: _ShmMembership, turn: int, routing: Routing) -> None:
        self._owner = owner
        self._membership = membership
        self._turn = turn
        self._routing = routing
        self.arrived_ns = 0

    def arrive(self) -> None:
        """Nothing to launch: the senders' rows lie where they will be read."""

    def wait(self, deadline_s: float | None = None) -> Ticket:
        membership, turn = self._membership, self._turn
        counts_e, ends_e = counts_and_ends = np.empty((2, membership.slots), np.int64)
        timeout_s = membership.deadline_s if deadline_s is None else deadline_s
        x_PD, num_rows = self._owner.take(membership, turn, counts_and_ends, timeout_s)
        self.arrived_ns = membership.exchange.arrived_ns(turn)
        inbound = Inbound(Layout.GROUPED, x_PD, counts_e, ends_e)
        return Ticket(inbound, self._routing, (membership, turn), membership.y[turn].narrow(0, 0, num_rows))


class _Sums:
    """A combine on its way."""

    def __init__(
        self, element: Element, membership: _ShmMembership, turn: int, routing: Routing, out_TD: Tensor
    ) -> None:
        self._element = element
        self._membership = membership
        self._turn = turn
        self._weights_TK = _plain(routing.weights_TK, torch.float32)
        self._out_TD = out_TD
        self.arrived_ns = 0

    def arrive(self) -> None:
        """Nothing to launch."""

    def wait(self, deadline_s: float | None = None) -> Tensor:
        membership, turn, asked_TD = self._membership, self._turn, self._out_TD
        out_TD = (
            asked_TD if asked_TD.is_contiguous() else torch.empty_like(asked_TD, memory_format=torch.contiguous_format)
        )
        timeout_s = membership.deadline_s if deadline_s is None else deadline_s
        weights, width = self._weights_TK.data_ptr(), out_TD.shape[1]
        membership.exchange.await_sums(turn, timeout_s, weights, self._element, width, out_TD.data_ptr())
        self.arrived_ns = membership.exchange.arrived_ns(turn)
        return asked_TD if out_TD is asked_TD else asked_TD.copy_(out_TD)
