"""The backend `torch` between GPUs, one per rank, over NCCL.

It has two modes, and both keep rows on the device:

- Small steps: every rank sends all of its rows to every rank, and gets back a slot for each of its
  pairs from every rank. All sizes are known in advance, so the host never waits, and CUDA graphs
  can record the step.
- Larger steps: each row is sent only to the ranks that need it, because sending all of them would
  take longer than waiting for counts. `dispatch` waits on the host for this rank's routing, and for
  the other ranks' counts, which are sent over Gloo. If a rank is gone or silent, this raises
  PeerLost with its number.

`wait` only makes the stream wait, so the backend is `Checked`.

T: tokens of this rank. M: tokens of the rank that has the most. K: experts per token. D: model
width. R: ranks. e: local experts. S: rows sent. U: rows received, in the order of their ranks.
N: (token, k) pairs. P: pairs for the local experts. B: bytes of an encoded row.
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
MAX_SMALL_BYTES = 16 << 20  # of results that return to a rank in a small step


class NcclAll2All(MeshAll2All[DeviceMesh]):
    """The backend over NCCL.

    A row is sent together with all expert ids of its token. Results are returned one per (token, k)
    pair.
    """

    def __init__(self, facts: BackendFacts) -> None:
        super().__init__(facts, "cuda")
        self._max_sms = facts.comm_sms
        self.caps = replace(
            self.caps, why_not_recordable=None, recorded_rows=MAX_SMALL_BYTES // facts.row_bytes
        )

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        super().join(members, experts_per_rank, ubatches)
        most_recorded = (
            self.caps.recorded_rows // (members.size * self._top_k) if members.size > 1 else 0
        )
        self.caps = replace(self.caps, most_recorded=most_recorded)

    def new_mesh(self, members: Members, ubatches: int, terms: str) -> DeviceMesh:
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
        """See `All2All`. Unless the step is small, the host waits for the routing and for the other
        ranks' counts.
        """
        self._check_size(x_TD, routing)
        most_tokens = min(ubatch.most_tokens, self._max_tokens)
        ids_TK = routing.ids_TK
        if 0 < most_tokens <= (self.caps.most_recorded or 0):
            return self._dispatch_to_all(x_TD, routing, most_tokens)
        rows_TB = torch.cat((self._wire.encode(x_TD), bytes_of(ids_TK.to(torch.int32))), 1)
        mesh = self.mesh
        channel = mesh.channel(ubatch.index)
        size = mesh.members.size
        rank_TK = ids_TK.div(self._num_local, rounding_mode="floor")
        is_for_RT = (rank_TK == torch.arange(size, device=ids_TK.device)[:, None, None]).any(2)
        pairs_Re = _count_pairs(ids_TK, size * self._num_local).view(size, -1)
        # Row r: the pairs for each expert of rank r, and in the last column the rows for rank r.
        sent_counts = torch.cat((pairs_Re, is_for_RT.sum(1, keepdim=True)), 1).cpu().numpy()
        received_counts = _exchange_counts(channel, sent_counts)
        sent_rows_R = sent_counts[:, -1]
        received_rows_R = received_counts[:, -1]
        # The rows for rank 0, then those for rank 1, ..., as places in the flat [R, T] mask.
        place_S = (
            (~is_for_RT)
            .flatten()
            .to(torch.uint8)
            .sort(stable=True)
            .indices[: int(sent_rows_R.sum())]
        )
        send_SB = rows_TB.index_select(0, place_S % max(1, len(x_TD)))
        received_UB = rows_TB.new_empty((int(received_rows_R.sum()), rows_TB.shape[1]))
        wait_for_rows = mesh.all_to_all(
            received_UB, send_SB, received_rows_R.tolist(), sent_rows_R.tolist()
        )
        own_pairs = _group_pairs(rank_TK, size, sent_counts[:, :-1].sum(1))

        def receive() -> Ticket:
            wait_for_rows()
            x_UD, local_UK = self._decode(received_UB)
            counts_e = received_counts[:, :-1].sum(0)
            order_P = _group_pairs(local_UK, self._num_local, counts_e).order_P
            x_PD = x_UD.index_select(0, order_P // ids_TK.shape[1])
            handle = _NcclHandle(
                mesh,
                pairs_R=received_counts[:, :-1].sum(1),
                place_P=order_P.argsort(),
                own_pairs=own_pairs,
            )
            inbound = Inbound(Layout.GROUPED, x_PD, counts_e=counts_e, ends_e=counts_e.cumsum())
            return Ticket(inbound, routing, private=handle)

        return Transfer(receive)

    def _dispatch_to_all(
        self, x_TD: Tensor, routing: Routing, most_tokens: int
    ) -> Transfer[Ticket]:
        """Send all rows to every rank, padded to M = most_tokens.

        Every rank returns M * K slots of results. For pair (t, k), slot t * K + k from the rank
        that has its expert is valid; that slot from other ranks is ignored.
        """
        mesh = self.mesh
        ids_TK = routing.ids_TK
        pad = torch.nn.functional.pad
        assert len(x_TD) <= most_tokens, f"{len(x_TD)} rows where ranks have at most {most_tokens}"
        padding = (0, 0, 0, most_tokens - len(x_TD))
        top_k = ids_TK.shape[1]
        ids_MK = pad(ids_TK.to(torch.int32), padding, value=-1)
        rows_MB = torch.cat((pad(self._wire.encode(x_TD), padding), bytes_of(ids_MK)), 1)
        pairs_R = np.full(mesh.members.size, most_tokens * top_k)
        received_UB = rows_MB.new_empty((len(pairs_R) * most_tokens, rows_MB.shape[1]))
        wait_for_rows = mesh.all_gather(received_UB, rows_MB)
        pair_N = torch.arange(int(pairs_R.sum()), device=ids_TK.device)
        place_N = (
            ids_TK.flatten().div(self._num_local, rounding_mode="floor") * pairs_R[0]
            + pair_N[: ids_TK.numel()]
        )
        own_pairs = Grouping(pair_N, place_N.where(ids_TK.flatten() >= 0, -1), pairs_R)

        def receive() -> Ticket:
            wait_for_rows()
            x_UD, local_UK = self._decode(received_UB)
            order_P, place_P = _sort_pairs(local_UK.flatten(), self._num_local)
            counts_e = _count_pairs(local_UK, self._num_local).to(torch.int32)
            inbound = Inbound(
                Layout.GROUPED,
                x_UD.index_select(0, order_P // top_k),
                counts_e=counts_e,
                ends_e=counts_e.cumsum(0, dtype=torch.int32),
                expected_rows=most_tokens * top_k,
            )
            handle = _NcclHandle(mesh, pairs_R=pairs_R, place_P=place_P, own_pairs=own_pairs)
            return Ticket(inbound, routing, private=handle)

        return Transfer(receive)

    def _decode(self, received_UB: Tensor) -> tuple[Tensor, Tensor]:
        """Return the received rows [U, D], and the local expert of each of their pairs [U, K]; -1
        for an expert of another rank.
        """
        row_bytes = self._wire.row_bytes(self._width)
        first = self.mesh.members.rank * self._num_local
        local_UK = received_UB[:, row_bytes:].contiguous().view(torch.int32) - first
        is_elsewhere = (local_UK < 0) | (local_UK >= self._num_local)
        x_UD = self._wire.decode(received_UB[:, :row_bytes], self._dtype, self._width)
        return x_UD, local_UK.masked_fill_(is_elsewhere, -1)

    def combine(
        self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch
    ) -> Transfer[Tensor]:
        ticket.use()
        handle: _NcclHandle = ticket.private
        own_pairs = handle.own_pairs
        send_PD = y.index_select(0, handle.place_P)
        own_results_PD = y.new_empty((len(own_pairs.order_P), y.shape[1]))
        wait_for_results = handle.mesh.all_to_all(
            bytes_of(own_results_PD),
            bytes_of(send_PD),
            own_pairs.counts_e.tolist(),
            handle.pairs_R.tolist(),
        )

        def add_up() -> Tensor:
            wait_for_results()
            return weighted_sum(own_results_PD, own_pairs, ticket.routing, out_TD)

        return Transfer(add_up)


@dataclass(frozen=True, slots=True)
class _NcclHandle:
    """The state of one dispatch until its combine."""

    mesh: DeviceMesh
    pairs_R: I64  # pairs received from each rank
    place_P: Tensor  # the inbound row of each of those pairs
    own_pairs: Grouping  # of this rank, by the rank that returns their results


def _exchange_counts(channel: Channel, counts: I64) -> I64:
    """Send row r of `counts` to rank r. Return the rows that the ranks sent to this one, [R, X].

    The host waits. Raises PeerLost.
    """
    own_rank = channel.mesh.members.rank
    sent = torch.from_numpy(counts).view(torch.uint8)
    received = sent.clone()
    others = [rank for rank in range(len(counts)) if rank != own_rank]
    channel.post(
        {rank: received[rank] for rank in others}, {rank: sent[rank] for rank in others}
    ).wait()
    return received.numpy().view(np.int64)


def _count_pairs(ids_TK: Tensor, num_ids: int) -> Tensor:
    """Count the pairs of each id, int64 [num_ids]. (`bincount` would make the host wait.)"""
    ids_N = ids_TK.flatten().long() + 1
    return ids_N.new_zeros(num_ids + 1).index_add_(0, ids_N, torch.ones_like(ids_N))[1:]


def _group_pairs(ids_TK: Tensor, num_ids: int, counts_e: I64) -> Grouping:
    """Do the same as `group_rows`, without waiting for the device. counts_e: the known counts."""
    ids_N = ids_TK.flatten()
    order_N, place_N = _sort_pairs(ids_N, num_ids)
    return Grouping(order_N[: int(counts_e.sum())], place_N.where(ids_N >= 0, -1), counts_e)


def _sort_pairs(ids_N: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """Return the stable order of pairs by id, with -1 last, and the place of each pair in it."""
    order_N = ids_N.where(ids_N >= 0, num_ids).sort(stable=True).indices
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return order_N, place_N
