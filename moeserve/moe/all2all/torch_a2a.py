"""All-to-all between CPU ranks over Gloo, and the entry of the backend `torch` (GPUs: nccl.py).

Each rank sends one message to each other rank and direction. Messages may have any size, so counts
need not be sent first. A dispatch message is an index of the experts, followed by each token's row,
once. A combine message has one result per (token, k) pair, because the token's rank must add them
up in the order of k.

T: tokens of this rank. K: experts per token. D: model width. R: ranks. e: local experts. P: pairs
received for the local experts. B: bytes of an encoded row. n: pairs of one message. N: rows of a
buffer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.comm.gloo import Channel, Mesh
from moeserve.comm.members import Members
from moeserve.comm.nccl import why_nccl_unsupported
from moeserve.moe.all2all.base import All2All, EarlySend, Inbound, Layout, Ticket
from moeserve.moe.all2all.layout import Grouping, group_rows, weighted_sum
from moeserve.moe.all2all.nccl import NcclAll2All
from moeserve.moe.all2all.over_mesh import MeshAll2All
from moeserve.moe.all2all.registry import BackendFacts, Unavailable
from moeserve.moe.all2all.wire_format import ALIGNMENT
from moeserve.moe.pending import Transfer
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch

I64 = NDArray[np.int64]


def make(facts: BackendFacts) -> All2All:
    """Return the backend for these ranks: over Gloo on CPUs, over NCCL on GPUs."""
    if facts.device == "cpu":
        return TorchAll2All(facts)
    if (why := why_nccl_unsupported(-(-facts.num_ranks // facts.num_hosts))) is not None:
        raise Unavailable(f"{why}; use --all2all cuda_ipc, which serves ranks of one machine")
    return NcclAll2All(facts)


class TorchAll2All(MeshAll2All[Mesh]):
    """The backend over Gloo. It can send the results of the first half of the local experts early,
    while the other half are computed.
    """

    def __init__(self, facts: BackendFacts) -> None:
        super().__init__(facts, "cpu")
        self._row_bytes = facts.wire.row_bytes(facts.hidden_size)
        self._pools: list[Pool] = []

    def new_mesh(self, members: Members, ubatches: int, terms: str) -> Mesh:
        self._pools = [Pool() for _ in range(ubatches)]
        return Mesh(members, ubatches, "torch", terms, sealed=self._facts.encrypt_rows)

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Transfer[Ticket]:
        self._check_size(x_TD, routing)
        mesh = self.mesh
        pool = self._pools[ubatch.index]
        size = mesh.members.size
        own_rank = mesh.members.rank
        rows = group_rows(routing.ids_TK, size * self._num_local)
        counts_Re = rows.counts_e.reshape(size, self._num_local)
        encoded_TB = self._wire.encode(x_TD)
        send_buffers = self._send_buffers(rows, counts_Re, routing.ids_TK)
        limit = self._max_tokens
        # The longest possible message, in rows of B bytes.
        region_rows = self._index_rows(limit * self._top_k) + limit
        inbox = pool.take(size * region_rows * self._row_bytes)
        inbox_RNB = inbox[: size * region_rows * self._row_bytes].view(
            size, region_rows, self._row_bytes
        )
        outbox = pool.take(
            sum(send_buffer.num_rows for send_buffer in send_buffers) * self._row_bytes
        )
        send = {}
        start = 0
        for rank, send_buffer in enumerate(send_buffers):
            if rank == own_rank:
                send_buffer.write(encoded_TB, inbox_RNB[own_rank])
                continue
            end = start + send_buffer.num_rows * self._row_bytes
            send_buffer.write(encoded_TB, outbox[start:end].view(-1, self._row_bytes))
            send[rank] = outbox[start:end]
            start = end
        receive = {rank: inbox_RNB[rank].view(-1) for rank in range(size) if rank != own_rank}
        channel = mesh.channel(ubatch.index)
        exchange = channel.post(receive, send, lambda: pool.give(outbox))
        # Results are not sent early with a single micro-batch, which waits for its rows as soon as
        # all of its results are sent.
        num_early = self._num_local // 2 if ubatch.has_sibling else 0

        def receive_rows() -> Ticket:
            exchange.wait()
            counts_Re, inbox_row_P = self._read_indexes(inbox_RNB)
            order_P, place_P = _by_expert(counts_Re)
            rows_NB = inbox_RNB.view(-1, self._row_bytes).view(torch.int64)
            encoded_PB = rows_NB.index_select(0, inbox_row_P[order_P]).view(torch.uint8)
            x_PD = self._wire.decode(encoded_PB, self._dtype, self._width)
            pool.give(inbox)
            counts_e = counts_Re.sum(0)
            handle = _TorchHandle(
                channel,
                pool,
                rows=rows,
                counts_Re=counts_Re,
                place_P=place_P,
                like=x_PD,
                num_early=num_early,
            )
            return Ticket(
                Inbound(Layout.GROUPED, x_PD, counts_e=counts_e, ends_e=counts_e.cumsum()),
                routing,
                private=handle,
                early_send=EarlySend(num_early, handle.send) if num_early else None,
            )

        return Transfer(finish=receive_rows, arrived=lambda: exchange.arrived_ns)

    def combine(
        self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch
    ) -> Transfer[Tensor]:
        ticket.use()
        handle: _TorchHandle = ticket.private
        handle.send_all(y)

        def add_up() -> Tensor:
            handle.exchange.wait()
            weighted_sum(handle.home_ND, handle.rows, ticket.routing, out_TD)
            handle.release()
            return out_TD

        return Transfer(finish=add_up, arrived=lambda: handle.exchange.arrived_ns)

    def _send_buffers(self, rows: Grouping, counts_Re: I64, ids_TK: Tensor) -> "list[_SendBuffer]":
        """Return the dispatch message for each rank.

        rows: this rank's pairs, by physical expert. counts_Re: the pairs of each expert.
        """
        tokens, top_k = ids_TK.shape
        token_P = rows.order_P.numpy() // top_k
        ends = counts_Re.sum(1).cumsum()
        send_buffers = []
        for rank, counts_e in enumerate(counts_Re):
            token_n = token_P[_slice_of(ends, rank)]
            is_sent_T = np.zeros(tokens, bool)
            is_sent_T[token_n] = True
            row_n = (is_sent_T.cumsum() - 1)[token_n]
            send_buffers.append(
                _SendBuffer(
                    index=np.concatenate((counts_e, row_n)).astype(np.int32),
                    token_n=torch.from_numpy(is_sent_T.nonzero()[0]),
                    index_rows=self._index_rows(len(token_n)),
                )
            )
        return send_buffers

    def _index_rows(self, num_pairs: int) -> int:
        """Return the length of the index of `num_pairs` pairs, in rows of B bytes."""
        return -(-4 * (self._num_local + num_pairs) // self._row_bytes)

    def _read_indexes(self, inbox_RNB: Tensor) -> tuple[I64, Tensor]:
        """Read the indexes of all messages.

        Return how many pairs each rank sent for each local expert, [R, e], and the row of each pair
        in the inbox viewed as [R * N, B], in the order of the messages.
        """
        size, region_rows, _ = inbox_RNB.shape
        counts_Re = np.empty((size, self._num_local), np.int64)
        inbox_rows = []
        for rank in range(size):
            index = inbox_RNB[rank].view(-1).numpy().view(np.int32)
            counts_Re[rank] = index[: self._num_local]
            num_pairs = int(counts_Re[rank].sum())
            first_row = rank * region_rows + self._index_rows(num_pairs)
            row_n = index[self._num_local : self._num_local + num_pairs].astype(np.int64)
            inbox_rows.append(first_row + row_n)
        return counts_Re, torch.from_numpy(np.concatenate(inbox_rows))


@dataclass(frozen=True, slots=True)
class _SendBuffer:
    """One dispatch message: an index, padded to whole rows, followed by the rows."""

    # The number of pairs of each of the receiver's experts, then the row of each pair.
    index: NDArray[np.int32]
    token_n: Tensor  # the tokens whose rows are sent
    index_rows: int  # length of the index in rows of B bytes

    @property
    def num_rows(self) -> int:
        """The length of the message in rows of B bytes."""
        return self.index_rows + len(self.token_n)

    def write(self, encoded_TB: Tensor, into_NB: Tensor) -> None:
        """Write the message to into_NB. encoded_TB: the rows of all tokens."""
        into_NB.view(-1)[: self.index.nbytes].numpy().view(np.int32)[:] = self.index
        rows_nB = into_NB[self.index_rows : self.num_rows].view(torch.int64)
        torch.index_select(encoded_TB.view(torch.int64), 0, self.token_n, out=rows_nB)


class _TorchHandle:
    """The state of one dispatch until its combine.

    Receives of results are posted before the experts compute, so that results are transferred as
    soon as they are sent. If `num_early` is not 0, each rank returns results in two messages: those
    of its first `num_early` experts, and the rest.

    rows: this rank's pairs, sorted by physical expert.
    counts_Re: the number of pairs that each rank sent for each local expert.
    place_P: the inbound row of each received pair, in the order of the messages.
    like: a tensor with the width and dtype of results.
    """

    def __init__(
        self,
        channel: Channel,
        pool: "Pool",
        rows: Grouping,
        counts_Re: I64,
        place_P: Tensor,
        like: Tensor,
        num_early: int,
    ) -> None:
        self.rows = rows
        self._pool = pool
        self._counts_Re = counts_Re
        self._place_P = place_P
        self._own_rank = channel.mesh.members.rank
        self._buffer, self.home_ND = pool.take_rows(len(rows.order_P), like)
        size, num_local = counts_Re.shape
        self._parts = [
            slice(start, end)
            for start, end in ((0, num_early), (num_early, num_local))
            if start < end
        ]
        expected_Re = rows.counts_e.reshape(size, num_local)
        self._ends_R = expected_Re.sum(1).cumsum()
        self.exchange = channel.expect(
            (rank, _as_bytes(self.home_ND[rows_of]))
            for part in self._parts
            for rank, rows_of in self._messages(expected_Re, part)
        )

    def send(self, y: Tensor) -> None:
        """Send the next message to each rank. y: the results of its experts."""
        messages = list(self._messages(self._counts_Re, self._parts.pop(0)))
        buffer, outbox_ND = self._pool.take_rows(
            sum(rows.stop - rows.start for _, rows in messages), y
        )
        send = {}
        start = 0
        for rank, rows in messages:
            place = self._place_P[rows]
            into_ND = outbox_ND[start : start + len(place)]
            torch.index_select(y, 0, place, out=into_ND)
            send[rank] = _as_bytes(into_ND)
            start += len(place)
        self.exchange.send(send, lambda: self._pool.give(buffer))

    def send_all(self, y: Tensor) -> None:
        """Send all remaining messages, and copy the results for this rank's own tokens."""
        while self._parts:
            self.send(y)
        self.exchange.receive_in_background()
        ends_R = self._counts_Re.sum(1).cumsum()
        own_ND = self.home_ND[_slice_of(self._ends_R, self._own_rank)]
        torch.index_select(y, 0, self._place_P[_slice_of(ends_R, self._own_rank)], out=own_ND)

    def release(self) -> None:
        """Free the memory of home_ND."""
        self._pool.give(self._buffer)

    def _messages(self, counts_Re: I64, part: slice) -> Iterator[tuple[int, slice]]:
        """Yield each other rank and the rows of its message, unless it is empty.

        counts_Re: rows by rank and expert; rows are sorted by rank, then expert. part: the experts
        of the message.
        """
        starts_R = counts_Re.sum(1).cumsum() - counts_Re.sum(1) + counts_Re[:, : part.start].sum(1)
        ends_R = starts_R + counts_Re[:, part].sum(1)
        for rank, (start, end) in enumerate(zip(starts_R.tolist(), ends_R.tolist(), strict=True)):
            if rank != self._own_rank and start < end:
                yield rank, slice(start, end)


def _as_bytes(rows_ND: Tensor) -> Tensor:
    return rows_ND.view(torch.uint8).view(-1)


def _by_expert(counts_Re: I64) -> tuple[Tensor, Tensor]:
    """Return the permutation of pairs from (rank, expert) order to (expert, rank), and its inverse.

    [[1, 1], [2, 0]] -> [0, 2, 3, 1], [0, 3, 1, 2]
    """
    size, num_local = counts_Re.shape
    expert_P = np.repeat(np.tile(np.arange(num_local, dtype=np.int16), size), counts_Re.reshape(-1))
    order = expert_P.argsort(kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return torch.from_numpy(order), torch.from_numpy(place)


def _slice_of(ends: I64, index: int) -> slice:
    return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


class Pool:
    """Reusable byte buffers of one micro-batch. Not thread-safe.

    Buffers are reused because allocating memory for every exchange would cost more than filling it:
    the kernel has to clear each new page.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return an uninitialized uint8 buffer of at least num_bytes: the smallest free one that
        fits, or a new one.
        """
        fits = [buffer for buffer in self._free if buffer.numel() >= num_bytes]
        if not fits:
            return torch.empty(max(ALIGNMENT, 1 << (num_bytes - 1).bit_length()), dtype=torch.uint8)
        best = min(fits, key=Tensor.numel)
        self._free = [buffer for buffer in self._free if buffer is not best]
        return best

    def take_rows(self, num_rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return a buffer, and `num_rows` rows in it with the width and dtype of `like`."""
        num_bytes = num_rows * like.shape[1] * like.itemsize
        buffer = self.take(num_bytes)
        return buffer, buffer[:num_bytes].view(like.dtype).view(num_rows, like.shape[1])

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.append(buffer)
