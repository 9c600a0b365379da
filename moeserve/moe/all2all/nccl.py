"""`torch` and `allgather` between GPUs, by NCCL: a stream of their own, one GPU per rank.

Rows and results stay on the device. The host learns how many rows there are, since `all_to_all_single` and `Inbound`
say so on the host: it waits once in `dispatch`, for the own rows to be computed and for the others' counts, which come
over Gloo. Thus neither can be part of a graph. `wait` waits for nobody (`allgather`'s for the counts in what it has
gathered); so a rank that falls silent between is found by NCCL's watchdog, and everybody else by `check`.

T tokens of this rank, K experts per token, D model width, R ranks, e slots of one rank, S = R * e, N tokens received,
P rows for this rank's experts, B bytes of a row on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.errors import PeerLost
from moeserve.moe.all2all.allgather import AllGatherAll2All, Gathered, launch_all
from moeserve.moe.all2all.base import All2AllCaps, Inbound, Layout, Ticket
from moeserve.moe.all2all.layout import Grouping, weighted_sum
from moeserve.moe.all2all.rounds import round_tokens
from moeserve.moe.all2all.wire import ALIGNMENT, RAW, Wire, bytes_of
from moeserve.moe.lane import Lane
from moeserve.moe.routing import Routing
from moeserve.moe.streams import comm_stream
from moeserve.parallel.gloo import ON_DEVICE
from moeserve.parallel.members import Members
from moeserve.parallel.nccl import DeviceChannel, DeviceCollective, DeviceMesh

I64 = NDArray[np.int64]


def device_mesh(members: Members, lanes: int, name: str, terms: str, max_sms: int) -> DeviceMesh:
    """Whose collectives run on the device's stream for communication."""
    comm = comm_stream("cuda")
    return DeviceMesh(members, lanes, name, terms, launch=lambda work: comm.launch(work).join, max_sms=max_sms)


class DeviceAllGather(AllGatherAll2All):
    """The sums are of integers, of which one is not zero: NCCL may add them up in any order."""

    def __init__(
        self, wire: Wire, hidden_size: int, dtype: torch.dtype, top_k: int, max_tokens: int, max_sms: int
    ) -> None:
        super().__init__(wire, hidden_size, dtype, top_k, max_tokens)
        self.caps = replace(self.caps, devices=frozenset({"cuda"}))
        self._max_sms = max_sms

    def mesh_of(self, members: Members, lanes: int, terms: str) -> DeviceMesh:
        return device_mesh(members, lanes, "allgather", terms, self._max_sms)

    def dispatch(self, x_TD: Tensor, routing: Routing, lane: Lane) -> Gathered:
        """The gather begins at once: later, it would come behind what the other lane has launched meanwhile."""
        pending = super().dispatch(x_TD, routing, lane)
        launch_all(self._waiting[lane.index])
        return pending

    def check(self) -> None:
        """See `DeviceMesh`."""
        mesh = self.mesh
        assert isinstance(mesh, DeviceMesh)
        mesh.check()


class DeviceAll2All:
    """`torch`. A token's row travels once to each rank that has experts for it, and which of that rank's slots it is
    for along with it, as K int32; results come back one per (token, k) pair.

    wire: of dispatched rows; results travel in the model's dtype. max_tokens: of a step on one rank.
    """

    def __init__(
        self, wire: Wire, hidden_size: int, dtype: torch.dtype, top_k: int, max_tokens: int, max_sms: int
    ) -> None:
        self.caps = All2AllCaps(
            name="torch",
            layouts=frozenset({Layout.GROUPED}),
            wires=frozenset({wire.name} if wire.name in RAW else RAW),
            max_tokens=max_tokens,
            copies=5,
            devices=frozenset({"cuda"}),
        )
        self.wire = wire
        self.width = hidden_size
        self.dtype = dtype
        self.num_slots = 0
        self._max_sms = max_sms
        self._round_tokens = partial(round_tokens, max_tokens, top_k, hidden_size * dtype.itemsize)
        self._mesh: DeviceMesh | None = None

    def join(self, members: Members, slots_per_rank: int, lanes: int) -> None:
        self.num_slots = slots_per_rank
        self.caps = replace(self.caps, max_tokens=self._round_tokens(members.size))
        terms = f"{self.wire.name} rows of {self.width}, {self.dtype}, {self.caps.max_tokens} tokens"
        terms += f", {slots_per_rank} slots, {lanes} lanes"
        self._mesh = device_mesh(members, lanes, "torch", terms, self._max_sms)
        self._mesh.connect()

    def leave(self) -> None:
        if self._mesh is not None:
            self._mesh.close()

    @property
    def mesh(self) -> DeviceMesh:
        if self._mesh is None:
            raise PeerLost("this rank has not joined a group yet")
        return self._mesh

    def check(self) -> None:
        """See `DeviceMesh`."""
        self.mesh.check()

    def dispatch(self, x_TD: Tensor, routing: Routing, lane: Lane) -> _Dispatched:
        mesh, ids_TK = self.mesh, routing.ids_TK
        limit = self.caps.max_tokens
        assert limit is None or x_TD.shape[0] <= limit, f"{x_TD.shape[0]} tokens of at most {limit}"
        channel = mesh.channel(lane.index)
        assert isinstance(channel, DeviceChannel)
        size, slots = mesh.members.size, self.num_slots
        is_chosen_RT = torch.stack([((ids_TK >= r * slots) & (ids_TK < (r + 1) * slots)).any(1) for r in range(size)])
        ours = torch.cat((_counts(ids_TK, size * slots).view(size, slots), is_chosen_RT.sum(1, keepdim=True)), 1)
        counts = _exchange(channel, ours.cpu().numpy())  # the host waits: for the device, and for the others
        letter_NB = self._letters(x_TD, ids_TK, is_chosen_RT, int(counts.to_R.sum()))
        taken_NB = letter_NB.new_empty((int(counts.from_R.sum()), letter_NB.shape[1]))
        flight = channel.all_to_all(taken_NB, letter_NB, counts.from_R.tolist(), counts.to_R.tolist())
        by_rank = _sorted(ids_TK.div(slots, rounding_mode="floor"), size, int(counts.ours_Re.sum()))
        return _Dispatched(self, channel, flight, routing, by_rank, counts, taken_NB)

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, lane: Lane) -> _Combined:
        ticket.use()
        trip: _Trip = ticket.private
        back_PD = y.index_select(0, trip.place_P)
        home_PD = back_PD.new_empty((int(trip.counts.ours_Re.sum()), y.shape[1]))
        theirs, ours = trip.counts.theirs_Re.sum(1).tolist(), trip.counts.ours_Re.sum(1).tolist()
        flight = trip.channel.all_to_all(bytes_of(home_PD), bytes_of(back_PD), ours, theirs)
        return _Combined(flight, ticket.routing, trip.by_rank, home_PD, out_TD)

    def _letters(self, x_TD: Tensor, ids_TK: Tensor, is_chosen_RT: Tensor, count: int) -> Tensor:
        """[count, B + 4 K]: the rows for each rank, token by token, each with the local slots that it is for."""
        slots, tokens = self.num_slots, x_TD.shape[0]
        row_M = _first(is_chosen_RT.flatten(), count)
        token_M = row_M % max(1, tokens)
        local_MK = ids_TK.index_select(0, token_M) - (row_M // max(1, tokens) * slots)[:, None]
        local_MK = local_MK.masked_fill((local_MK < 0) | (local_MK >= slots), -1).int()
        missing = -4 * local_MK.shape[1] % ALIGNMENT // 4
        local_MK = torch.nn.functional.pad(local_MK, (0, missing), value=-1)
        return torch.cat((self.wire.encode(x_TD).index_select(0, token_M), bytes_of(local_MK)), 1)

    def open(self, taken_NB: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """(rows for this rank's experts [P, D], the pair n * K + k of each)."""
        row_bytes = self.wire.row_bytes(self.width)
        slots_NK = taken_NB[:, row_bytes:].contiguous().view(torch.int32)
        order_P = _sorted(slots_NK, self.num_slots, rows).order_P
        encoded_PB = taken_NB[:, :row_bytes].index_select(0, order_P // max(1, slots_NK.shape[1]))
        return self.wire.decode(encoded_PB, self.dtype, self.width), order_P


@dataclass(frozen=True, slots=True)
class _Counts:
    """Of one dispatch, on the host. ours_Re: own pairs for each slot; theirs_Re: each rank's pairs for each own slot.
    to_R, from_R: rows that travel."""

    ours_Re: I64
    theirs_Re: I64
    to_R: I64
    from_R: I64


@dataclass(frozen=True, slots=True)
class _Trip:
    """The way back. place_P: of each received pair, in the order of tokens, among the inbound rows. by_rank: own pairs
    as their results come home."""

    channel: DeviceChannel
    counts: _Counts
    place_P: Tensor
    by_rank: Grouping


@dataclass(slots=True)
class _Dispatched:
    owner: DeviceAll2All
    channel: DeviceChannel
    flight: DeviceCollective
    routing: Routing
    by_rank: Grouping
    counts: _Counts
    taken_NB: Tensor
    arrived_ns: int = ON_DEVICE

    def arrive(self) -> None:
        """Everything was launched by `dispatch`."""

    def wait(self, deadline_s: float | None = None) -> Ticket:
        self.flight.wait()
        counts_e = self.counts.theirs_Re.sum(0)
        x_PD, order_P = self.owner.open(self.taken_NB, int(counts_e.sum()))
        trip = _Trip(self.channel, self.counts, order_P.argsort(), self.by_rank)
        return Ticket(Inbound(Layout.GROUPED, x_PD, counts_e, counts_e.cumsum()), self.routing, trip)


@dataclass(slots=True)
class _Combined:
    flight: DeviceCollective
    routing: Routing
    by_rank: Grouping
    home_PD: Tensor
    out_TD: Tensor
    arrived_ns: int = ON_DEVICE

    def arrive(self) -> None:
        """Everything was launched by `combine`."""

    def wait(self, deadline_s: float | None = None) -> Tensor:
        self.flight.wait()
        return weighted_sum(self.home_PD, self.by_rank, self.routing, self.out_TD)


def _exchange(channel: DeviceChannel, ours: I64) -> _Counts:
    """ours: pairs for each slot, and rows, of every rank [R, e + 1]. Waits for all others'. Raises PeerLost."""
    me, size = channel.mesh.members.rank, len(ours)
    sent, taken = torch.from_numpy(ours.astype(np.int32)), torch.empty(ours.shape, dtype=torch.int32)
    taken[me] = sent[me]
    others = [rank for rank in range(size) if rank != me]
    receive = {rank: taken[rank].view(torch.uint8) for rank in others}
    channel.post(receive, {rank: sent[rank].view(torch.uint8) for rank in others}).wait()
    theirs = taken.numpy().astype(np.int64)
    return _Counts(ours[:, :-1], theirs[:, :-1], ours[:, -1], theirs[:, -1])


def _counts(ids_TK: Tensor, num_slots: int) -> Tensor:
    """Pairs for each slot, int64, without asking the device how many there are."""
    counts = ids_TK.new_zeros(num_slots + 1, dtype=torch.int64)
    ids_N = ids_TK.flatten().long() + 1
    return counts.index_add_(0, ids_N, torch.ones_like(ids_N))[1:]


def _first(is_there_N: Tensor, count: int) -> Tensor:
    """Where it is true, in order: `count` places, as the host knows. `nonzero` would ask the device."""
    return (~is_there_N).to(torch.uint8).sort(stable=True).indices[:count]


def _sorted(ids_TK: Tensor, num_ids: int, count: int) -> Grouping:
    """`group_rows` on the device, where the host knows that `count` pairs go somewhere; without counts."""
    ids_N = ids_TK.flatten()
    order_N = ids_N.where(ids_N >= 0, num_ids).sort(stable=True).indices
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return Grouping(order_N[:count], place_N.where(ids_N >= 0, -1), np.empty(0, np.int64))
