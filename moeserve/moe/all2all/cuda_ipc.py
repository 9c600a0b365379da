"""All-to-all between GPU ranks of one host, which read rows from each other's device memory.

The kernels (kernels/exchange.py) run on the device's stream for transfers, beside the compute
stream. The host never waits.

A dispatch has four steps:
1. Copy this rank's rows to its own region, and write its ids to all regions.
2. Barrier.
3. Sort the pairs of all ranks by local expert.
4. Read the rows from the other regions, and write each row's place to its token's rank.

A combine has two steps:
1. Barrier.
2. Read the results from where the experts wrote them, and add them up.

Counts stay on the device, so the host plans for an upper bound of the rows.

A barrier ends when every rank's stream has finished all work that precedes it. So the next dispatch
may reuse the buffer of a dispatch after its combine, without further messages:
- Rows and ids are written before the barrier of the next dispatch. The peers have read the previous
  rows and ids before the barrier of the combine, which has ended.
- Places and results are written after the barrier of the next dispatch. All ranks have read the
  previous places and results, for the sums of the combine, before that barrier.
All ranks make the same calls in the same order, so a number identifies a barrier.

T: tokens of this rank. M: tokens of the rank that has the most. K: experts per token. D: model
width. P': upper bound of the received rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.comm.cudart import CudaMemory
from moeserve.comm.members import Members
from moeserve.comm.symmetric import HEAD_BYTES, Symmetric, Window
from moeserve.errors import ConfigError, PeerLost
from moeserve.kernels.align import align
from moeserve.kernels.exchange import collect, gather, publish
from moeserve.moe.all2all.base import All2AllCaps, Inbound, Layout, Ticket
from moeserve.moe.all2all.registry import BackendFacts, Unavailable
from moeserve.moe.all2all.wire_format import RAW, RawWire
from moeserve.moe.pending import Transfer
from moeserve.moe.routing import Routing
from moeserve.moe.streams import CommStream, comm_stream
from moeserve.moe.ubatch import UBatch
from moeserve.ops.native import native

NUM_BUFFERS = 2  # dispatches of a micro-batch that may be in flight
PART_ALIGNMENT = 256  # bytes


class _Offsets(NamedTuple):
    """The byte offsets of a buffer's parts in each rank's region."""

    ids: int
    places: int
    x: int
    y: int


@dataclass(slots=True)
class _Buffer:
    """The memory of one dispatch in flight."""

    offsets: _Offsets
    y: Tensor  # [P', D] in this rank's region, for the results of its experts
    rows_PW: Tensor  # received rows, encoded, as 32-bit words
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class _IpcChannel:
    """This rank's end of the exchange for one micro-batch."""

    window: Window
    stream: CommStream
    buffers: list[_Buffer]


def make(facts: BackendFacts) -> "CudaIpcAll2All":
    """Return the backend for GPU ranks of one machine."""
    if facts.num_hosts > 1:
        raise Unavailable(
            f"cuda_ipc serves one machine, these ranks are on {facts.num_hosts}; use deepep_v2"
        )
    if facts.device != "cuda":
        raise Unavailable(
            f"cuda_ipc moves rows between GPUs, these ranks are on {facts.device}; use shm"
        )
    if native() is None:
        raise Unavailable(
            "cuda_ipc needs moeserve's native code; reinstall moeserve with a C++20 compiler"
        )
    try:
        memory = Symmetric(CudaMemory(torch.device(facts.device)))
    except ConfigError as error:
        raise Unavailable(str(error)) from None
    return CudaIpcAll2All(facts, memory)


class CudaIpcAll2All:
    """The backend for GPU ranks of one host; several ranks may share a GPU.

    After a failure, `wait` returns undefined results. `check`, called after waiting for the device,
    raises PeerLost.

    `ubatch.most_tokens` must be the same on all ranks. No rank may have more tokens (0: no more
    than a round allows).
    """

    def __init__(
        self,
        facts: BackendFacts,
        memory: Symmetric,
        new_stream: Callable[[torch.device], CommStream] = comm_stream,
    ) -> None:
        self._facts = facts
        dtype = facts.dtype
        self._wire = facts.wire if facts.wire.lossy else RawWire(dtype)
        self._row_words = self._wire.row_bytes(facts.hidden_size) // 4
        self._device = torch.device(facts.device)
        self._memory = memory
        self._new_stream = new_stream
        self.caps = All2AllCaps(
            name="cuda_ipc",
            layouts=frozenset({Layout.GROUPED}),
            row_dtypes=frozenset(RAW),
            max_tokens=facts.max_tokens,
            # Received rows and results of each buffer, and the decoded rows of a lossy format
            copies=2 * NUM_BUFFERS + facts.wire.lossy,
            pad_hidden=lambda width: width if width * dtype.itemsize % 16 == 0 else None,
            why_not_recordable=None,
            device_counts=True,
            devices=frozenset({"cuda"}),
        )
        self._num_local = 0
        self._num_rows = 0  # P' of the largest round
        self._channels: list[_IpcChannel] = []
        self._is_member = False

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        self._num_local = experts_per_rank
        self.caps = replace(self.caps, max_tokens=self._facts.round_tokens(members.size))
        self._num_rows = max(self._facts.planned_rows, members.size * self._facts.top_k)
        buffer_offsets, ubatch_bytes = self._layout()
        facts = self._facts
        terms = (
            f"{experts_per_rank} experts, {self._row_words} words of {self._wire.name}, "
            f"{facts.hidden_size} {facts.dtype}, {self.caps.max_tokens} tokens to {facts.top_k} "
            "experts"
        )
        windows = self._memory.join(members, ubatches, ubatch_bytes, terms)
        # Only now free the old buffers: before, the device may still have been writing to them.
        self._channels = []
        self._channels = [
            _IpcChannel(
                window,
                self._new_stream(self._device),
                [self._make_buffer(window, offsets) for offsets in buffer_offsets],
            )
            for window in windows
        ]
        self._is_member = True

    def _layout(self) -> tuple[list[_Offsets], int]:
        """Return the offsets of each buffer's parts in a micro-batch's region, and its size."""
        tokens = self._facts.round_tokens(1)  # the most that a group of any size allows
        sizes = _Offsets(
            ids=4 * self._num_rows,
            places=4 * tokens * self._facts.top_k,
            x=4 * self._row_words * tokens,
            y=self._y_bytes,
        )
        aligned = [-(-size // PART_ALIGNMENT) * PART_ALIGNMENT for size in sizes]
        starts = list(accumulate(aligned * NUM_BUFFERS, initial=HEAD_BYTES))
        num_parts = len(aligned)
        offsets = [_Offsets(*starts[num_parts * i :][:num_parts]) for i in range(NUM_BUFFERS)]
        return offsets, starts[-1]

    @property
    def _y_bytes(self) -> int:
        return self._num_rows * self._facts.row_bytes

    def _make_buffer(self, window: Window, offsets: _Offsets) -> _Buffer:
        y = (
            window.own_B[offsets.y :][: self._y_bytes]
            .view(self._facts.dtype)
            .view(-1, self._facts.hidden_size)
        )
        rows_PW = torch.zeros(
            (self._num_rows, self._row_words), dtype=torch.int32, device=self._device
        )
        return _Buffer(offsets, y, rows_PW)

    def leave(self) -> None:
        self._is_member = False
        self._memory.leave()

    def check(self) -> None:
        self._memory.check()

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Transfer[Ticket]:
        if not self._is_member:
            raise PeerLost("this rank has not joined a group, or has left it")
        limit = self.caps.max_tokens
        channel = self._channels[ubatch.index]
        assert limit is not None
        tokens = routing.ids_TK.shape[0]
        most_tokens = min(ubatch.most_tokens or limit, limit)
        if (
            x_TD.shape != (tokens, self._facts.hidden_size)
            or x_TD.dtype != self._facts.dtype
            or tokens > most_tokens
        ):
            given = f"{list(x_TD.shape)} {x_TD.dtype} with {tokens} rows of ids"
            takes = f"[T, {self._facts.hidden_size}] {self._facts.dtype} with T <= {most_tokens}"
            raise ValueError(f"cannot dispatch {given}; this backend takes {takes}")
        buffer = next((buffer for buffer in channel.buffers if not buffer.is_busy), None)
        if buffer is None:
            raise RuntimeError(
                f"{NUM_BUFFERS} dispatches of micro-batch {ubatch.index} are in flight; combine "
                "one of them first"
            )
        buffer.is_busy = True
        join = channel.stream.launch(
            lambda: self._exchange_rows(channel, buffer, x_TD, routing, most_tokens)
        )
        return Transfer(join)

    def _exchange_rows(
        self,
        channel: _IpcChannel,
        buffer: _Buffer,
        x_TD: Tensor,
        routing: Routing,
        most_tokens: int,
    ) -> Ticket:
        window = channel.window
        programs = self._facts.comm_sms
        num_local = self._num_local
        num_ranks = len(window.bases_R)
        top_k = routing.ids_TK.shape[1]
        x_TW = self._wire.encode(x_TD).contiguous().view(torch.int32)
        ids_TK = routing.ids_TK.to(torch.int32).contiguous()
        publish(
            bases_R=window.bases_R,
            state=window.state,
            rank=window.rank,
            x_TW=x_TW,
            ids_TK=ids_TK,
            most_tokens=most_tokens,
            num_local=num_local,
            x_offset=buffer.offsets.x,
            ids_offset=buffer.offsets.ids,
            programs=programs,
        )
        window.barrier(most_tokens)
        all_tokens = num_ranks * most_tokens
        ids_B = window.own_B[buffer.offsets.ids :][: 4 * all_tokens * top_k]
        ids_NK = ids_B.view(torch.int32).view(all_tokens, top_k)
        # Only the order and the ends are used, not the tiles of block_m rows.
        alignment = align(ids_NK, num_local, block_m=128)
        rows_PW = buffer.rows_PW[: all_tokens * top_k]
        assert alignment.order_N is not None
        gather(
            bases_R=window.bases_R,
            state=window.state,
            order_N=alignment.order_N,
            ends_e=alignment.ends_e,
            most_tokens=most_tokens,
            top_k=top_k,
            x_offset=buffer.offsets.x,
            places_offset=buffer.offsets.places,
            out_PW=rows_PW,
            programs=programs,
        )
        x_PD = self._wire.decode(
            rows_PW.view(torch.uint8), self._facts.dtype, self._facts.hidden_size
        )
        inbound = Inbound(
            Layout.GROUPED,
            x_PD,
            counts_e=alignment.counts_e,
            ends_e=alignment.ends_e,
            expected_rows=most_tokens * top_k,
        )
        return Ticket(inbound, routing, private=(channel, buffer), y=buffer.y[: len(x_PD)])

    def combine(
        self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch
    ) -> Transfer[Tensor]:
        ticket.use()
        channel, buffer = ticket.private
        assert ticket.y is not None
        if y.data_ptr() != ticket.y.data_ptr():
            ticket.y.copy_(y[: len(ticket.y)])
        join = channel.stream.launch(
            lambda: self._combine_results(channel.window, buffer, ticket.routing, out_TD)
        )
        # Work that is launched from now on may use the buffer: it runs after `_combine_results`.
        buffer.is_busy = False
        return Transfer(join)

    def _combine_results(
        self, window: Window, buffer: _Buffer, routing: Routing, out_TD: Tensor
    ) -> Tensor:
        window.barrier(0)
        ids_TK = routing.ids_TK.to(torch.int32).contiguous()
        weights_TK = routing.weights_TK.float().contiguous()
        collect(
            bases_R=window.bases_R,
            state=window.state,
            rank=window.rank,
            weights_TK=weights_TK,
            ids_TK=ids_TK,
            num_local=self._num_local,
            places_offset=buffer.offsets.places,
            y_offset=buffer.offsets.y,
            out_TD=out_TD,
            programs=self._facts.comm_sms,
        )
        return out_TD
