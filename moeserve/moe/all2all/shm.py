"""Ranks of one host: rows are pulled from the senders' shared memory (csrc/shm/exchange.hpp).

T tokens of this rank, K experts per token, D model width, P rows received, e experts of this rank.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.comm.shm import ShmGroup, module
from moeserve.errors import PeerLost
from moeserve.moe.all2all.base import All2AllCaps, Inbound, Layout, Ticket
from moeserve.moe.all2all.registry import BackendFacts, Unavailable
from moeserve.moe.all2all.wire_format import RAW
from moeserve.moe.pending import Transfer
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from moeserve.ops.native import native

if TYPE_CHECKING:
    from moeserve._native import Exchange, Region


@dataclass(slots=True)
class _ShmChannel:
    """One micro-batch's end of the exchange.

    For each buffer: where rows are gathered, how many fit there, its address (asking a tensor takes
    a microsecond), and shared memory for results.
    """

    exchange: "Exchange"
    num_local: int
    deadline_s: float
    rows: list[Tensor]
    room: list[int]
    address: list[int]
    y: list[Tensor]


def make(facts: BackendFacts) -> "ShmAll2All":
    """Return the backend for CPU ranks of one machine."""
    if facts.num_hosts > 1:
        raise Unavailable(f"shm serves one machine, these ranks are on {facts.num_hosts}")
    if facts.device != "cpu":
        raise Unavailable(f"shm moves rows between CPU ranks, these are on {facts.device}")
    if native() is None:
        raise Unavailable(
            "shm needs moeserve's native code; reinstall moeserve with a C++20 compiler"
        )
    return ShmAll2All(facts)


class ShmAll2All:
    """Moves rows between any number of CPU ranks on one host.

    Up to two dispatches of a micro-batch may be in flight; all ranks must wait for their results in
    the same order.
    """

    def __init__(self, facts: BackendFacts) -> None:
        self._facts = facts
        self._hidden = facts.hidden_size
        self._dtype = facts.dtype
        self._wire = (
            facts.wire if facts.wire.lossy else None
        )  # None: rows travel as they lie in memory
        self._element = getattr(module().Element, str(facts.dtype).removeprefix("torch."))
        self._group: ShmGroup | None = None
        self._channels: list[_ShmChannel] = []
        self.caps = All2AllCaps(
            name="shm",
            layouts=frozenset({Layout.GROUPED}),
            wires=frozenset(RAW),
            max_tokens=facts.max_tokens,
            copies=2 if self._wire is None else 3,
            devices=frozenset({"cpu"}),
            max_in_flight=module().Exchange.TURNS,
        )

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        self.leave()
        self.caps = replace(self.caps, max_tokens=self._facts.round_tokens(members.size))
        row_bytes = self._facts.row_bytes
        facts = {
            "experts_per_rank": experts_per_rank,
            "max_tokens": self.caps.max_tokens,
            "top_k": self._facts.top_k,
            "x_row_bytes": row_bytes if self._wire is None else self._wire.row_bytes(self._hidden),
            "y_row_bytes": row_bytes,
        }
        exchange = module().Exchange
        shape = module().Shape(**facts)
        group = self._group = ShmGroup(members, range(members.size), "all2all", ubatches)
        region_bytes = exchange.region_bytes(members.size, shape)
        opened = group.open_channels(
            region_bytes, f"{facts} {self._dtype} {self._wire and self._wire.name}"
        )
        self._channels = [
            self._channel(exchange(channel, shape), region, experts_per_rank, members.deadline_s)
            for channel, region in opened
        ]

    def _channel(
        self, exchange: "Exchange", region: "Region", num_local: int, deadline_s: float
    ) -> _ShmChannel:
        buffers = range(exchange.TURNS)
        elements = exchange.y_capacity * self._hidden
        y = [
            torch.frombuffer(
                region, dtype=self._dtype, count=elements, offset=exchange.y_offset(buffer)
            )
            for buffer in buffers
        ]
        rows = [self._row_buffer(0) for _ in buffers]
        nothing = [0 for _ in buffers]
        return _ShmChannel(
            exchange,
            num_local,
            deadline_s,
            rows,
            nothing,
            [*nothing],
            [f.view(-1, self._hidden) for f in y],
        )

    def leave(self) -> None:
        group = self._group
        self._group = None
        if group is not None:
            group.leave()
        self._channels = []  # memory goes with the last call and the last tensor that use it

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Transfer[Ticket]:
        channels = self._channels
        if not channels:
            raise PeerLost("this rank is in no group")
        tokens, top_k = routing.ids_TK.shape
        if x_TD.shape != (tokens, self._hidden) or x_TD.dtype != self._dtype:
            asked = f"{list(x_TD.shape)} {x_TD.dtype} with {tokens} rows of ids"
            raise ValueError(
                f"cannot dispatch {asked}; this backend takes [T, {self._hidden}] {self._dtype}"
            )
        ids_TK = _plain(routing.ids_TK, torch.int32)
        rows = (
            _plain(x_TD, x_TD.dtype) if self._wire is None else self._wire.encode(x_TD).contiguous()
        )
        channel = channels[ubatch.index]
        buffer = channel.exchange.dispatch(ids_TK.data_ptr(), tokens, top_k, rows.data_ptr())
        return Transfer(
            partial(self._receive, channel, buffer, routing),
            partial(channel.exchange.arrived_ns, buffer),
        )

    def _receive(self, channel: _ShmChannel, buffer: int, routing: Routing) -> Ticket:
        """Pull the rows x_PD of all ranks; they are valid until the micro-batch's buffer is
        dispatched again.
        """
        counts_e, ends_e = counts_and_ends = np.empty((2, channel.num_local), np.int64)
        room = channel.room[buffer]
        timeout_s = channel.deadline_s
        num_rows = channel.exchange.await_rows(
            buffer, timeout_s, counts_and_ends, channel.address[buffer], room
        )
        if num_rows > room:
            grown = channel.rows[buffer] = self._row_buffer(num_rows)
            channel.room[buffer], channel.address[buffer] = num_rows, grown.data_ptr()
            channel.exchange.take_rows(buffer, channel.address[buffer])
        x_PD = channel.rows[buffer].narrow(0, 0, num_rows)
        if self._wire is not None:
            x_PD = self._wire.decode(x_PD, self._dtype, self._hidden)
        inbound = Inbound(Layout.GROUPED, x_PD, counts_e, ends_e)
        return Ticket(inbound, routing, (channel, buffer), channel.y[buffer].narrow(0, 0, num_rows))

    def _row_buffer(self, num_rows: int) -> Tensor:
        if self._wire is None:
            return torch.empty((num_rows, self._hidden), dtype=self._dtype)
        return torch.empty((num_rows, self._wire.row_bytes(self._hidden)), dtype=torch.uint8)

    def combine(
        self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch
    ) -> Transfer[Tensor]:
        ticket.use()
        channel, buffer = ticket.private
        assert ticket.y is not None
        if y is not ticket.y and y.data_ptr() != ticket.y.data_ptr():
            ticket.y.copy_(y[: ticket.y.shape[0]])
        exchange = channel.exchange
        weights_TK = _plain(ticket.routing.weights_TK, torch.float32)
        exchange.combine(buffer)

        def add_up() -> Tensor:
            """Add the results up where they lie in the other ranks' memory."""
            plain_TD = out_TD if out_TD.is_contiguous() else out_TD.new_empty(out_TD.shape)
            weights = weights_TK.data_ptr()
            width = plain_TD.shape[1]
            out = plain_TD.data_ptr()
            exchange.await_sums(buffer, channel.deadline_s, weights, self._element, width, out)
            return out_TD if plain_TD is out_TD else out_TD.copy_(plain_TD)

        return Transfer(add_up, partial(exchange.arrived_ns, buffer))


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as the native code reads it, without a torch call (a microsecond each) where
    nothing has to change.
    """
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()
