"""`torch` between GPUs, by NCCL, one GPU per rank: rows stay on the device.

In small steps messages have sizes that all ranks know beforehand: every row goes to every rank, and
a place for the result of each pair comes home from every rank. No host waits, and graphs can record
that. What travels for nothing would take longer than a host in larger steps. There it learns how
many rows there are, and waits in `dispatch`: for the own routing to be computed, and for the other
ranks' counts, which come over Gloo; a rank that is gone or silent is named there. `wait` only makes
the stream wait, so the backend is `Checked`.

T tokens of this rank, M most tokens of any rank, K experts per token, D model width, R ranks, e
experts of one rank, N rows received, P pairs for this rank's experts, B bytes of a row on the wire.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.comm.gloo import Channel
from moeserve.comm.members import Members
from moeserve.comm.nccl import DeviceMesh
from moeserve.moe.all2all.base import Inbound, Layout, Ticket
from moeserve.moe.all2all.layout import Grouping, weighted_sum
from moeserve.moe.all2all.over_mesh import MeshAll2All
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.all2all.wire_format import bytes_of
from moeserve.moe.pending import Transfer
from moeserve.moe.routing import Routing
from moeserve.moe.streams import comm_stream
from moeserve.moe.ubatch import UBatch

I64 = NDArray[np.int64]
SMALL_BYTES = 16 << 20  # that come home to a rank in the largest of small steps


class NcclAll2All(MeshAll2All[DeviceMesh]):
    """A token's row travels once to each rank that has experts for it, with all of its ids; results
    come home one per (token, k) pair. Both go by `all_to_all_single`."""

    def __init__(self, facts: BackendFacts) -> None:
        super().__init__(facts, "cuda")
        self._max_sms = facts.comm_sms
        self.caps = replace(
            self.caps, not_recorded=None, recorded_rows=SMALL_BYTES // facts.row_bytes
        )

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        super().join(members, experts_per_rank, ubatches)
        most = self.caps.recorded_rows // (members.size * self._top_k) if members.size > 1 else 0
        self.caps = replace(self.caps, most_recorded=most)

    def new_mesh(self, members: Members, ubatches: int, terms: str) -> DeviceMesh:
        """Return connections over Gloo with a communicator of NCCL."""
        return DeviceMesh(
            members,
            ubatches,
            "torch",
            terms,
            launch=comm_stream("cuda").launch,
            max_sms=self._max_sms,
        )

    def check(self) -> None:
        self.mesh.check()

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Transfer[Ticket]:
        """See `All2All`. Unless the step is small, the host waits here for the own routing and for
        the others' counts."""
        self._check_size(x_TD, routing)
        room = min(ubatch.most_tokens, self._max_tokens)
        ids_TK = routing.ids_TK
        if 0 < room <= (self.caps.most_recorded or 0):
            return self._dispatch_to_all(x_TD, routing, room)
        rows_TB = torch.cat((self._wire.encode(x_TD), bytes_of(ids_TK.to(torch.int32))), 1)
        mesh = self.mesh
        channel = mesh.channel(ubatch.index)
        size = mesh.members.size
        rank_TK = ids_TK.div(self._num_local, rounding_mode="floor")
        is_for_RT = (rank_TK == torch.arange(size, device=ids_TK.device)[:, None, None]).any(2)
        pairs_Re = _counts(ids_TK, size * self._num_local).view(size, -1)
        ours = torch.cat((pairs_Re, is_for_RT.sum(1, keepdim=True)), 1).cpu().numpy()
        theirs = _exchange(channel, ours)
        place_M = (
            (~is_for_RT)
            .flatten()
            .to(torch.uint8)
            .sort(stable=True)
            .indices[: int(ours[:, -1].sum())]
        )
        send_MB = rows_TB.index_select(0, place_M % max(1, len(x_TD)))
        taken_NB = rows_TB.new_empty((int(theirs[:, -1].sum()), rows_TB.shape[1]))
        wait = mesh.all_to_all(taken_NB, send_MB, theirs[:, -1].tolist(), ours[:, -1].tolist())
        home = _sorted(rank_TK, size, ours[:, :-1].sum(1))

        def receive() -> Ticket:
            """Decode the rows and sorts them by expert, on the stream that waits for them."""
            wait()
            x_ND, local_NK = self._taken(taken_NB)
            counts_e = theirs[:, :-1].sum(0)
            order_P = _sorted(local_NK, self._num_local, counts_e).order_P
            x_PD = x_ND.index_select(0, order_P // ids_TK.shape[1])
            inbound = Inbound(Layout.GROUPED, x_PD, counts_e, counts_e.cumsum())
            return Ticket(
                inbound, routing, _NcclHandle(mesh, theirs[:, :-1].sum(1), order_P.argsort(), home)
            )

        return Transfer(receive)

    def _dispatch_to_all(self, x_TD: Tensor, routing: Routing, room: int) -> Transfer[Ticket]:
        """Send M = room rows to every rank. Of the results of pair (t, k) of a rank's M * K, place
        t * K + k of what comes home from the rank that has the expert is the one that counts."""
        mesh = self.mesh
        ids_TK = routing.ids_TK
        pad = torch.nn.functional.pad
        assert len(x_TD) <= room, f"{len(x_TD)} rows where all ranks make room for {room}"
        more = (0, 0, 0, room - len(x_TD))
        top_k = ids_TK.shape[1]
        ids_MK = pad(ids_TK.to(torch.int32), more, value=-1)
        rows_MB = torch.cat((pad(self._wire.encode(x_TD), more), bytes_of(ids_MK)), 1)
        pairs_R = np.full(mesh.members.size, room * top_k)
        taken_NB = rows_MB.new_empty((len(pairs_R) * room, rows_MB.shape[1]))
        wait = mesh.all_gather(taken_NB, rows_MB)
        pair_N = torch.arange(int(pairs_R.sum()), device=ids_TK.device)
        place_N = (
            ids_TK.flatten().div(self._num_local, rounding_mode="floor") * pairs_R[0]
            + pair_N[: ids_TK.numel()]
        )
        home = Grouping(pair_N, place_N.where(ids_TK.flatten() >= 0, -1), pairs_R)

        def receive() -> Ticket:
            """Sort the rows for this rank's experts to the front, on the stream that waits for
            them.
            """
            wait()
            x_ND, local_NK = self._taken(taken_NB)
            order_P, place_P = _order(local_NK.flatten(), self._num_local)
            counts_e = _counts(local_NK, self._num_local).to(torch.int32)
            ends_e = counts_e.cumsum(0, dtype=torch.int32)
            x_PD = x_ND.index_select(0, order_P // top_k)
            inbound = Inbound(Layout.GROUPED, x_PD, counts_e, ends_e, expected=room * top_k)
            return Ticket(inbound, routing, _NcclHandle(mesh, pairs_R, place_P, home))

        return Transfer(receive)

    def _taken(self, taken_NB: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that were received, [N, D], and the local expert of each of their pairs
        [N, K], -1 where another rank has it."""
        row_bytes = self._wire.row_bytes(self._width)
        first = self.mesh.members.rank * self._num_local
        local_NK = taken_NB[:, row_bytes:].contiguous().view(torch.int32) - first
        elsewhere = (local_NK < 0) | (local_NK >= self._num_local)
        x_ND = self._wire.decode(taken_NB[:, :row_bytes], self._dtype, self._width)
        return x_ND, local_NK.masked_fill_(elsewhere, -1)

    def combine(
        self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch
    ) -> Transfer[Tensor]:
        ticket.use()
        handle: _NcclHandle = ticket.private
        home = handle.home
        back_PD = y.index_select(0, handle.place_P)
        home_PD = y.new_empty((len(home.order_P), y.shape[1]))
        splits = home.counts_e.tolist(), handle.pairs_R.tolist()
        wait = handle.mesh.all_to_all(bytes_of(home_PD), bytes_of(back_PD), *splits)

        def add_up() -> Tensor:
            """Add the results up, on the stream that waits for them."""
            wait()
            return weighted_sum(home_PD, home, ticket.routing, out_TD)

        return Transfer(add_up)


@dataclass(frozen=True, slots=True)
class _NcclHandle:
    """The state that `combine` needs from its dispatch. pairs_R: received from each rank. place_P:
    where the inbound rows hold those pairs. home: the own pairs as they come home, by rank."""

    mesh: DeviceMesh
    pairs_R: I64
    place_P: Tensor
    home: Grouping


def _exchange(channel: Channel, ours: I64) -> I64:
    """Send row r of `ours` to rank r; returns the rows for this rank, [R, X]. The host waits.
    Raises PeerLost.
    """
    me = channel.mesh.members.rank
    sent = torch.from_numpy(ours).view(torch.uint8)
    taken = sent.clone()
    others = [rank for rank in range(len(ours)) if rank != me]
    channel.post(
        {rank: taken[rank] for rank in others}, {rank: sent[rank] for rank in others}
    ).wait()
    return taken.numpy().view(np.int64)


def _counts(ids_TK: Tensor, num_ids: int) -> Tensor:
    """Return the pairs of each id, int64 [num_ids]. `bincount` would make the host wait."""
    ids_N = ids_TK.flatten().long() + 1
    return ids_N.new_zeros(num_ids + 1).index_add_(0, ids_N, torch.ones_like(ids_N))[1:]


def _sorted(ids_TK: Tensor, num_ids: int, counts_e: I64) -> Grouping:
    """`group_rows` for counts that the host knows: it need not wait for the device."""
    ids_N = ids_TK.flatten()
    order_N, place_N = _order(ids_N, num_ids)
    return Grouping(order_N[: int(counts_e.sum())], place_N.where(ids_N >= 0, -1), counts_e)


def _order(ids_N: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """Return the stable order of pairs by id, those with -1 last, and the place of each pair in
    it.
    """
    order_N = ids_N.where(ids_N >= 0, num_ids).sort(stable=True).indices
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return order_N, place_N
