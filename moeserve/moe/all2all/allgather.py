"""All-gather and reduce-scatter: every rank sees every row and computes those of its own experts.

Results come back as a reduce-scatter of integers: each (token, k) pair has one rank that puts the bits of its result in
place, all others put zeros, and x + 0 keeps every bit. The owner then sums over k as always.

T tokens of this rank, K experts per token, D model width, R ranks, M most tokens of any rank, B bytes of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moeserve.comm.gloo import Channel, Collective, Exchange, Mesh
from moeserve.comm.members import Members
from moeserve.errors import PeerLost
from moeserve.moe.all2all.base import All2AllCaps, Inbound, Layout, Pending, Ticket
from moeserve.moe.all2all.layout import Grouping, group_rows, weighted_sum
from moeserve.moe.all2all.rounds import round_tokens
from moeserve.moe.all2all.wire_format import RAW, RawWire, WireFormat, bytes_of
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch

Group = Callable[[Tensor, int], Grouping]


class AllGatherAll2All:
    """wire: of gathered rows; results travel in the model's dtype. max_tokens: of a step on one rank."""

    name = "allgather"
    device = "cpu"

    def __init__(self, wire: WireFormat, hidden_size: int, dtype: torch.dtype, top_k: int, max_tokens: int) -> None:
        self._results = RawWire(dtype)
        self._round_tokens = partial(round_tokens, max_tokens, top_k, hidden_size * dtype.itemsize)
        self.caps = All2AllCaps(
            name=self.name,
            layouts=frozenset({Layout.GROUPED}),
            wires=frozenset({wire.name} if wire.name in RAW else RAW),
            max_tokens=max_tokens,
            copies=6,
            devices=frozenset({self.device}),
        )
        self._wire = wire
        self._width = hidden_size
        self._dtype = dtype
        self._mesh: Mesh | None = None
        self._num_slots = 0
        self._waiting: list[deque[Gathered]] = []  # by micro-batch: dispatches whose gather has not begun

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        self._num_slots = experts_per_rank
        self._waiting = [deque() for _ in range(ubatches)]
        self.caps = replace(self.caps, max_tokens=self._round_tokens(members.size))
        terms = f"{self._wire.name} rows of {self._width}, {self._dtype}, {self.caps.max_tokens} tokens"
        self._mesh = self.mesh_of(members, ubatches, f"{terms}, {experts_per_rank} slots, {ubatches} micro-batches")
        self._mesh.connect()

    def mesh_of(self, members: Members, ubatches: int, terms: str) -> Mesh:
        """What to meet the others by."""
        return Mesh(members, ubatches, self.name, terms)

    def leave(self) -> None:
        if self._mesh is not None:
            self._mesh.close()

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise PeerLost("this rank has not joined a group yet")
        return self._mesh

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Pending[Ticket]:
        """Tells the others how many rows will come; the gather itself begins with `arrive` or `wait`."""
        mesh = self.mesh
        size, me = mesh.members.size, mesh.members.rank
        tokens_R = torch.empty(size, dtype=torch.int32)
        tokens_R[me] = x_TD.shape[0]
        by_rank = tokens_R.view(torch.uint8).view(size, 4)
        others = [rank for rank in range(size) if rank != me]
        channel = mesh.channel(ubatch.index)
        exchange = channel.post({rank: by_rank[rank] for rank in others}, dict.fromkeys(others, by_rank[me]))
        rows_TB = self.encode(x_TD, routing)
        pending = Gathered(self, channel, exchange, routing, rows_TB, tokens_R, self._waiting[ubatch.index])
        self._waiting[ubatch.index].append(pending)
        return pending

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch) -> Pending[Tensor]:
        ticket.use()
        handle: _GatherHandle = ticket.private
        channel = self.mesh.channel(ubatch.index)
        launch_all(self._waiting[ubatch.index])  # they come first on every rank
        pairs = handle.most_tokens * ticket.routing.ids_TK.shape[1]
        row_bytes = self._results.row_bytes(self._width)
        all_NB = y.new_zeros((self.mesh.members.size * pairs, row_bytes), dtype=torch.uint8)
        if handle.order_P.numel():
            all_NB[handle.order_P] = self._results.encode(y[: len(handle.order_P)])
        own_NB = all_NB.new_empty((pairs, row_bytes))
        collective = None
        if pairs and self.mesh.members.size > 1:
            collective = channel.reduce_scatter(own_NB.view(torch.int64), all_NB.view(torch.int64))
        elif pairs:
            own_NB = all_NB
        return _Reduced(self, collective, ticket.routing, own_NB, out_TD)

    def encode(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Rows as they travel, each with its ids."""
        limit = self.caps.max_tokens
        assert limit is None or x_TD.shape[0] <= limit, f"{x_TD.shape[0]} tokens of at most {limit}"
        return torch.cat((self._wire.encode(x_TD), bytes_of(routing.ids_TK.to(torch.int32))), 1)

    def inbound(self, gathered_NB: Tensor, top_k: int, group: Group = group_rows) -> tuple[Inbound, Tensor]:
        """This rank's rows among all, and where their pairs are among all pairs."""
        row_bytes = self._wire.row_bytes(self._width)
        slots_NK = gathered_NB[:, row_bytes:].contiguous().view(torch.int32)
        slots_NK = slots_NK - self.mesh.members.rank * self._num_slots
        elsewhere = (slots_NK < 0) | (slots_NK >= self._num_slots)
        rows = group(slots_NK.masked_fill_(elsewhere, -1), self._num_slots)
        encoded_PB = gathered_NB.index_select(0, rows.order_P // top_k)[:, :row_bytes].contiguous()
        x_PD = self._wire.decode(encoded_PB, self._dtype, self._width)
        return Inbound(Layout.GROUPED, x_PD, rows.counts_e, rows.counts_e.cumsum()), rows.order_P

    def results(self, own_NB: Tensor) -> Tensor:
        return self._results.decode(own_NB, self._dtype, self._width)


def launch_all(waiting: deque[Gathered]) -> None:
    """Begin the gathers of a micro-batch in the order of their dispatches, which is the same on every rank."""
    while waiting:
        waiting.popleft().launch()


@dataclass(frozen=True, slots=True)
class _GatherHandle:
    """order_P: pair of each inbound row, counted over all ranks with `most_tokens` rows each."""

    order_P: Tensor
    most_tokens: int


@dataclass(slots=True, eq=False)
class Gathered:
    owner: AllGatherAll2All
    channel: Channel
    exchange: Exchange
    routing: Routing
    rows_TB: Tensor
    tokens_R: Tensor
    waiting: deque[Gathered]
    collective: Collective | None = None
    lost: PeerLost | None = None
    gathered_NB: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def arrived_ns(self) -> int:
        return self.exchange.arrived_ns if self.collective is None else self.collective.arrived_ns

    @property
    def most_tokens(self) -> int:
        return int(self.tokens_R.max())

    def arrive(self) -> None:
        launch_all(self.waiting)

    def launch(self) -> None:
        """Begins the gather. Errors are for `wait`: it may be the other micro-batch that launches."""
        try:
            self._launch()
        except PeerLost as lost:
            self.lost = lost

    def _launch(self) -> None:
        self.exchange.wait()
        missing = self.most_tokens - self.rows_TB.shape[0]
        mine_MB = torch.nn.functional.pad(self.rows_TB, (0, 0, 0, missing), value=255)  # ids -1
        self.gathered_NB = mine_MB
        if mine_MB.numel() and len(self.tokens_R) > 1:
            self.gathered_NB = mine_MB.new_empty((len(self.tokens_R) * mine_MB.shape[0], mine_MB.shape[1]))
            self.collective = self.channel.all_gather(self.gathered_NB, mine_MB)

    def wait(self, deadline_s: float | None = None) -> Ticket:
        launch_all(self.waiting)
        if self.lost is not None:
            raise self.lost
        if self.collective is not None:
            self.collective.wait(deadline_s)
        inbound, order_P = self.owner.inbound(self.gathered_NB, self.routing.ids_TK.shape[1])
        return Ticket(inbound, self.routing, _GatherHandle(order_P, self.most_tokens))


@dataclass(slots=True)
class _Reduced:
    owner: AllGatherAll2All
    collective: Collective | None
    routing: Routing
    own_NB: Tensor
    out_TD: Tensor

    @property
    def arrived_ns(self) -> int:
        return 0 if self.collective is None else self.collective.arrived_ns

    def arrive(self) -> None:
        """The reduction began with `combine`."""

    def wait(self, deadline_s: float | None = None) -> Tensor:
        if self.collective is not None:
            self.collective.wait(deadline_s)
        # Nobody put anything in place for a pair that went nowhere: its result is zero, whatever its weight.
        ids_TK, weights_TK = self.routing.ids_TK, self.routing.weights_TK
        routing = Routing(ids_TK, weights_TK.masked_fill(ids_TK < 0, 0))
        pair_N = torch.arange(ids_TK.numel(), device=ids_TK.device)
        rows = Grouping(pair_N, pair_N, np.empty(0, np.int64))
        return weighted_sum(self.owner.results(self.own_NB), rows, routing, self.out_TD)
