"""`torch` between GPUs, by NCCL, one GPU per rank: rows stay on the device, the host learns how many there are.

The host waits in `dispatch`: for the own routing to be computed, and for the other ranks' counts, which come over Gloo.
A rank that is gone or silent is named there. `wait` only makes the stream wait, so the backend is `Checked`. Because
the host must know the counts, no graph can record it.

T tokens of this rank, K experts per token, D model width, R ranks, e experts of one rank, N rows received, P pairs for
this rank's experts, B bytes of a row on the wire.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.comm.gloo import Channel
from moeserve.comm.members import Members
from moeserve.comm.nccl import DeviceMesh
from moeserve.moe.all2all.base import Inbound, Layout, Ticket, Transfer
from moeserve.moe.all2all.layout import Grouping, weighted_sum
from moeserve.moe.all2all.over_mesh import MeshAll2All
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.all2all.wire_format import bytes_of
from moeserve.moe.routing import Routing
from moeserve.moe.streams import comm_stream
from moeserve.moe.ubatch import UBatch

I64 = NDArray[np.int64]


class NcclAll2All(MeshAll2All[DeviceMesh]):
    """A token's row travels once to each rank that has experts for it, with all of its ids; results come home one per
    (token, k) pair. Both go by `all_to_all_single`."""

    def __init__(self, facts: BackendFacts) -> None:
        super().__init__(facts, "cuda")
        self._max_sms = facts.comm_sms

    def new_mesh(self, members: Members, ubatches: int, terms: str) -> DeviceMesh:
        """Returns connections over Gloo with a communicator of NCCL."""
        return DeviceMesh(members, ubatches, "torch", terms, launch=comm_stream("cuda").launch, max_sms=self._max_sms)

    def check(self) -> None:
        """See `Checked`."""
        self.mesh.check()

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Transfer[Ticket]:
        """See `All2All`. The host waits here for the own routing and for the others' counts."""
        self._check_size(x_TD, routing)
        ids_TK = routing.ids_TK
        rows_TB = torch.cat((self._wire.encode(x_TD), bytes_of(ids_TK.to(torch.int32))), 1)
        mesh = self.mesh
        channel, size = mesh.channel(ubatch.index), mesh.members.size
        rank_TK = ids_TK.div(self._num_local, rounding_mode="floor")
        is_for_RT = (rank_TK == torch.arange(size, device=ids_TK.device)[:, None, None]).any(2)
        pairs_Re = _counts(ids_TK, size * self._num_local).view(size, -1)
        ours = torch.cat((pairs_Re, is_for_RT.sum(1, keepdim=True)), 1).cpu().numpy()
        theirs = _exchange(channel, ours)
        place_M = (~is_for_RT).flatten().to(torch.uint8).sort(stable=True).indices[: int(ours[:, -1].sum())]
        send_MB = rows_TB.index_select(0, place_M % max(1, len(x_TD)))
        taken_NB = rows_TB.new_empty((int(theirs[:, -1].sum()), rows_TB.shape[1]))
        wait = mesh.all_to_all(taken_NB, send_MB, theirs[:, -1].tolist(), ours[:, -1].tolist())
        home = _sorted(rank_TK, size, ours[:, :-1].sum(1))

        def receive() -> Ticket:
            """Decodes the rows and sorts them by expert, on the stream that waits for them."""
            wait()
            inbound, order_P = self._inbound(taken_NB, ids_TK.shape[1], theirs[:, :-1].sum(0))
            return Ticket(inbound, routing, _NcclHandle(mesh, theirs[:, :-1].sum(1), order_P.argsort(), home))

        return Transfer(receive)

    def _inbound(self, taken_NB: Tensor, top_k: int, counts_e: I64) -> tuple[Inbound, Tensor]:
        """Returns this rank's rows, and which (row, k) pair of those received each one is."""
        row_bytes, first = self._wire.row_bytes(self._width), self.mesh.members.rank * self._num_local
        local_NK = taken_NB[:, row_bytes:].contiguous().view(torch.int32) - first
        elsewhere = (local_NK < 0) | (local_NK >= self._num_local)
        rows = _sorted(local_NK.masked_fill_(elsewhere, -1), self._num_local, counts_e)
        encoded_PB = taken_NB.index_select(0, rows.order_P // top_k)[:, :row_bytes].contiguous()
        x_PD = self._wire.decode(encoded_PB, self._dtype, self._width)
        return Inbound(Layout.GROUPED, x_PD, rows.counts_e, rows.counts_e.cumsum()), rows.order_P

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch) -> Transfer[Tensor]:
        """See `All2All`."""
        ticket.use()
        handle: _NcclHandle = ticket.private
        home, back_PD = handle.home, y.index_select(0, handle.place_P)
        home_PD = y.new_empty((len(home.order_P), y.shape[1]))
        splits = home.counts_e.tolist(), handle.pairs_R.tolist()
        wait = handle.mesh.all_to_all(bytes_of(home_PD), bytes_of(back_PD), *splits)

        def add_up() -> Tensor:
            """Adds the results up, on the stream that waits for them."""
            wait()
            return weighted_sum(home_PD, home, ticket.routing, out_TD)

        return Transfer(add_up)


@dataclass(frozen=True, slots=True)
class _NcclHandle:
    """The state that `combine` needs from its dispatch. pairs_R: received from each rank. place_P: where the inbound
    rows hold those pairs. home: the own pairs as they come home, by rank."""

    mesh: DeviceMesh
    pairs_R: I64
    place_P: Tensor
    home: Grouping


def _exchange(channel: Channel, ours: I64) -> I64:
    """Sends row r of `ours` to rank r; returns the rows for this rank, [R, X]. The host waits. Raises PeerLost."""
    me, sent = channel.mesh.members.rank, torch.from_numpy(ours).view(torch.uint8)
    taken = sent.clone()
    others = [rank for rank in range(len(ours)) if rank != me]
    channel.post({rank: taken[rank] for rank in others}, {rank: sent[rank] for rank in others}).wait()
    return taken.numpy().view(np.int64)


def _counts(ids_TK: Tensor, num_ids: int) -> Tensor:
    """Returns the pairs of each id, int64 [num_ids]. `bincount` would make the host wait."""
    ids_N = ids_TK.flatten().long() + 1
    return ids_N.new_zeros(num_ids + 1).index_add_(0, ids_N, torch.ones_like(ids_N))[1:]


def _sorted(ids_TK: Tensor, num_ids: int, counts_e: I64) -> Grouping:
    """`group_rows` for counts that the host knows: it need not wait for the device."""
    ids_N = ids_TK.flatten()
    order_N = ids_N.where(ids_N >= 0, num_ids).sort(stable=True).indices
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return Grouping(order_N[: int(counts_e.sum())], place_N.where(ids_N >= 0, -1), counts_e)
