"""All-to-all between CPU ranks of one host, through shared memory (csrc/shm/exchange.hpp).

`dispatch` writes this rank's activations to its own region of shared memory. Each rank then copies
the rows for its experts out of the other ranks' regions. `combine` does the same with the results:
each rank adds up its tokens' results while it reads them from the other ranks' regions.

A region holds two buffers per micro-batch, so two dispatches may be in flight.

T: tokens of this rank. K: experts per token. D: model width. P: rows received. e: local experts.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.comm.shm import ShmGroup, native_module
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
class _RowBuffer:
    """The memory of one dispatch in flight."""

    y: Tensor  # shared memory for results, [most rows of a dispatch, D]
    rows: Tensor  # private memory for received rows; replaced by a larger one when it is full
    capacity: int = 0  # length of `rows`
    address: int = 0  # rows.data_ptr(), cached because that call takes a microsecond

    def replace_rows(self, rows: Tensor) -> None:
        self.rows = rows
        self.capacity = len(rows)
        self.address = rows.data_ptr()


@dataclass(slots=True)
class _ShmChannel:
    """This rank's end of the exchange for one micro-batch."""

    exchange: "Exchange"
    num_local: int
    deadline_s: float
    buffers: list[_RowBuffer]


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
    """The backend for any number of CPU ranks on one host.

    Up to two dispatches of a micro-batch may be in flight. All ranks must wait for their results in
    the same order.
    """

    def __init__(self, facts: BackendFacts) -> None:
        self._facts = facts
        self._hidden = facts.hidden_size
        self._dtype = facts.dtype
        # The encoding of dispatched rows; None: rows are sent as they are, as results always are.
        self._wire = facts.wire if facts.wire.lossy else None
        self._element = getattr(native_module().Element, str(facts.dtype).removeprefix("torch."))
        self._group: ShmGroup | None = None
        self._channels: list[_ShmChannel] = []
        self.caps = All2AllCaps(
            name="shm",
            layouts=frozenset({Layout.GROUPED}),
            row_dtypes=frozenset(RAW),
            max_tokens=facts.max_tokens,
            copies=2 if self._wire is None else 3,  # received rows, results, and decoded rows
            devices=frozenset({"cpu"}),
            # The native code allows this many for each micro-batch.
            max_in_flight=native_module().Exchange.TURNS,
        )

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        self.leave()
        self.caps = replace(self.caps, max_tokens=self._facts.round_tokens(members.size))
        row_bytes = self._facts.row_bytes
        sizes = {
            "experts_per_rank": experts_per_rank,
            "max_tokens": self.caps.max_tokens,
            "top_k": self._facts.top_k,
            "x_row_bytes": row_bytes if self._wire is None else self._wire.row_bytes(self._hidden),
            "y_row_bytes": row_bytes,
        }
        exchange_class = native_module().Exchange
        shape = native_module().Shape(**sizes)
        group = ShmGroup(members, range(members.size), name="all2all", ubatches=ubatches)
        self._group = group
        wire_name = None if self._wire is None else self._wire.name
        channels = group.open_channels(
            exchange_class.region_bytes(members.size, shape),
            f"{sizes} {self._dtype} {wire_name}",
        )
        self._channels = [
            self._channel(
                exchange_class(channel, shape), region, experts_per_rank, members.deadline_s
            )
            for channel, region in channels
        ]

    def _channel(
        self, exchange: "Exchange", region: "Region", num_local: int, deadline_s: float
    ) -> _ShmChannel:
        elements = exchange.y_capacity * self._hidden
        buffers = []
        for index in range(exchange.TURNS):
            y = torch.frombuffer(
                region, dtype=self._dtype, count=elements, offset=exchange.y_offset(index)
            )
            buffers.append(_RowBuffer(y=y.view(-1, self._hidden), rows=self._empty_rows(0)))
        return _ShmChannel(exchange, num_local, deadline_s, buffers)

    def leave(self) -> None:
        group = self._group
        self._group = None
        if group is not None:
            group.leave()
        self._channels = []  # the memory is freed with the last call or tensor that uses it

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Transfer[Ticket]:
        channels = self._channels
        if not channels:
            raise PeerLost("this rank has not joined a group, or has left it")
        tokens, top_k = routing.ids_TK.shape
        if x_TD.shape != (tokens, self._hidden) or x_TD.dtype != self._dtype:
            given = f"{list(x_TD.shape)} {x_TD.dtype} with {tokens} rows of ids"
            raise ValueError(
                f"cannot dispatch {given}; this backend takes [T, {self._hidden}] {self._dtype}"
            )
        ids_TK = _contiguous_as(routing.ids_TK, torch.int32)
        rows = (
            _contiguous_as(x_TD, x_TD.dtype)
            if self._wire is None
            else self._wire.encode(x_TD).contiguous()
        )
        channel = channels[ubatch.index]
        index = channel.exchange.dispatch(ids_TK.data_ptr(), tokens, top_k, rows.data_ptr())
        return Transfer(
            finish=partial(self._receive, channel, index, routing),
            arrived=partial(channel.exchange.arrived_ns, index),
        )

    def _receive(self, channel: _ShmChannel, index: int, routing: Routing) -> Ticket:
        """Copy the rows of all ranks to the buffer `index`. They are valid until the micro-batch's
        next dispatch to the same buffer.
        """
        buffer = channel.buffers[index]
        counts_and_ends = np.empty((2, channel.num_local), np.int64)
        # This copies the rows only if all of them fit in the buffer; otherwise, it only counts.
        num_rows = channel.exchange.await_rows(
            index, channel.deadline_s, counts_and_ends, buffer.address, buffer.capacity
        )
        if num_rows > buffer.capacity:
            buffer.replace_rows(self._empty_rows(num_rows))
            channel.exchange.take_rows(index, buffer.address)
        x_PD = buffer.rows.narrow(0, 0, num_rows)
        if self._wire is not None:
            x_PD = self._wire.decode(x_PD, self._dtype, self._hidden)
        counts_e, ends_e = counts_and_ends
        inbound = Inbound(Layout.GROUPED, x_PD, counts_e=counts_e, ends_e=ends_e)
        y_PD = buffer.y.narrow(0, 0, num_rows)
        return Ticket(inbound, routing, private=(channel, index), y=y_PD)

    def _empty_rows(self, num_rows: int) -> Tensor:
        if self._wire is None:
            return torch.empty((num_rows, self._hidden), dtype=self._dtype)
        return torch.empty((num_rows, self._wire.row_bytes(self._hidden)), dtype=torch.uint8)

    def combine(
        self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch
    ) -> Transfer[Tensor]:
        ticket.use()
        channel, index = ticket.private
        assert ticket.y is not None
        if y is not ticket.y and y.data_ptr() != ticket.y.data_ptr():
            ticket.y.copy_(y[: ticket.y.shape[0]])
        exchange = channel.exchange
        weights_TK = _contiguous_as(ticket.routing.weights_TK, torch.float32)
        exchange.combine(index)

        def add_up() -> Tensor:
            plain_TD = out_TD if out_TD.is_contiguous() else out_TD.new_empty(out_TD.shape)
            weights = weights_TK.data_ptr()
            width = plain_TD.shape[1]
            out = plain_TD.data_ptr()
            # Reads the results directly from the other ranks' regions.
            exchange.await_sums(index, channel.deadline_s, weights, self._element, width, out)
            return out_TD if plain_TD is out_TD else out_TD.copy_(plain_TD)

        return Transfer(finish=add_up, arrived=partial(exchange.arrived_ns, index))


def _contiguous_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x contiguous and in `dtype`, as the native code reads it.

    Makes no torch call (about a microsecond each) if x is so already.
    """
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()
