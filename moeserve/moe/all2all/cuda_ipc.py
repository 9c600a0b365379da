"""CUDA ranks of one host: rows are pulled from each other's device memory, and the host never
waits.

The kernels are in kernels/exchange.py, and run on a stream per micro-batch beside the one that
computes. A dispatch has four steps: copy the rows to the own region and send the ids; meet the
others; sort all ranks' pairs by local expert; pull the rows. A combine has two: meet again; pull
and add up the results from where the experts wrote them. Counts stay on the device, so the host
plans for the most rows that there can be.

Why a buffer may be written again without a message. A meeting ends when every rank's stream has
done the work that it was given before. A buffer has two meetings, D in its dispatch and C in its
combine. The next dispatch writes rows and ids before its D; peers have read the old ones before
this C. It writes places and results after its D; all ranks have read the old ones, for the sums of
this combine, before that D. All ranks make the same calls in the same order, so a number identifies
a meeting.

T tokens of this rank, M most tokens of any rank, K experts per token, D model width, P' rows that
there can be.
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
PART = 256  # bytes: every part of a region begins at a multiple


class _Parts(NamedTuple):
    """The byte offsets of a buffer's parts in each rank's region."""

    ids: int
    places: int
    x: int
    y: int


@dataclass(slots=True)
class _Buffer:
    """Memory for one dispatch in flight. y [P', D]: this rank's results. rows_PW: the buffer for
    pulled rows.
    """

    at: _Parts
    y: Tensor
    rows_PW: Tensor
    busy: bool = False


@dataclass(frozen=True, slots=True)
class _IpcChannel:
    """One micro-batch's end of the exchange."""

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
    """Moves rows between ranks on GPUs of one host, or on one GPU. After a failure `wait` returns
    as always, with undefined results: `check`, called after waiting for the device, raises
    PeerLost.

    All ranks must agree on `ubatch.most_tokens`; each has as many tokens or fewer (0: as many as a
    round may have).
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
            wires=frozenset(RAW),
            max_tokens=facts.max_tokens,
            copies=2 * NUM_BUFFERS + facts.wire.lossy,
            pad_hidden=lambda width: width if width * dtype.itemsize % 16 == 0 else None,
            not_recorded=None,
            device_counts=True,
            devices=frozenset({"cuda"}),
        )
        self._num_local = 0
        self._num_rows = 0  # P' at most
        self._channels: list[_IpcChannel] = []
        self._is_member = False

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        self._num_local = experts_per_rank
        self.caps = replace(self.caps, max_tokens=self._facts.round_tokens(members.size))
        self._num_rows = max(self._facts.planned_rows, members.size * self._facts.top_k)
        parts, ubatch_bytes = self._layout()
        facts = self._facts
        wire = f"{self._row_words} words of {self._wire.name}"
        terms = f"{experts_per_rank} experts, {wire}, {facts.hidden_size} {facts.dtype}"
        terms = f"{terms}, {self.caps.max_tokens} tokens to {facts.top_k} experts"
        windows = self._memory.join(members, ubatches, ubatch_bytes, terms)
        self._channels = []  # not before: the device might still have been filling the buffers
        self._channels = [
            _IpcChannel(
                window,
                self._new_stream(self._device),
                [self._make_buffer(window, at) for at in parts],
            )
            for window in windows
        ]
        self._is_member = True

    def _layout(self) -> tuple[list[_Parts], int]:
        """Return each buffer's parts of a micro-batch's region, and the region's bytes."""
        tokens = self._facts.round_tokens(1)
        sizes = (
            4 * self._num_rows,
            4 * tokens * self._facts.top_k,
            4 * self._row_words * tokens,
            self._y_bytes,
        )
        starts = list(
            accumulate(
                (-(-size // PART) * PART for size in sizes * NUM_BUFFERS), initial=HEAD_BYTES
            )
        )
        return [_Parts(*starts[4 * buffer :][:4]) for buffer in range(NUM_BUFFERS)], starts[-1]

    @property
    def _y_bytes(self) -> int:
        return self._num_rows * self._facts.row_bytes

    def _make_buffer(self, window: Window, at: _Parts) -> _Buffer:
        y = (
            window.own_B[at.y :][: self._y_bytes]
            .view(self._facts.dtype)
            .view(-1, self._facts.hidden_size)
        )
        rows_PW = torch.zeros(
            (self._num_rows, self._row_words), dtype=torch.int32, device=self._device
        )
        return _Buffer(at, y, rows_PW)

    def leave(self) -> None:
        self._is_member = False
        self._memory.leave()

    def check(self) -> None:
        self._memory.check()

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Transfer[Ticket]:
        if not self._is_member:
            raise PeerLost("this rank is in no group")
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
            asked = f"{list(x_TD.shape)} {x_TD.dtype} with {tokens} rows of ids"
            takes = f"[T, {self._facts.hidden_size}] {self._facts.dtype} with T <= {most_tokens}"
            raise ValueError(f"cannot dispatch {asked}; this backend takes {takes}")
        buffer = next((buffer for buffer in channel.buffers if not buffer.busy), None)
        if buffer is None:
            raise RuntimeError(
                f"{NUM_BUFFERS} dispatches of micro-batch {ubatch.index} are in flight; combine "
                "one of them first"
            )
        buffer.busy = True
        join = channel.stream.launch(
            lambda: self._exchange(channel, buffer, x_TD, routing, most_tokens)
        )
        return Transfer(join)

    def _exchange(
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
        regions = window.bases_R, window.state
        x_TW = self._wire.encode(x_TD).contiguous().view(torch.int32)
        ids_TK = routing.ids_TK.to(torch.int32).contiguous()
        publish(
            *regions,
            window.rank,
            x_TW,
            ids_TK,
            most_tokens,
            num_local,
            buffer.at.x,
            buffer.at.ids,
            programs,
        )
        window.meet(most_tokens)
        room = num_ranks * most_tokens
        ids_NK = (
            window.own_B[buffer.at.ids :][: 4 * room * top_k].view(torch.int32).view(room, top_k)
        )
        found = align(ids_NK, num_local, 128)
        rows_PW = buffer.rows_PW[: room * top_k]
        assert found.order_N is not None
        gather(
            *regions,
            found.order_N,
            found.ends_e,
            most_tokens,
            top_k,
            buffer.at.x,
            buffer.at.places,
            rows_PW,
            programs,
        )
        x_PD = self._wire.decode(
            rows_PW.view(torch.uint8), self._facts.dtype, self._facts.hidden_size
        )
        inbound = Inbound(
            Layout.GROUPED, x_PD, found.counts_e, found.ends_e, expected=most_tokens * top_k
        )
        return Ticket(inbound, routing, (channel, buffer), buffer.y[: len(x_PD)])

    def combine(
        self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch
    ) -> Transfer[Tensor]:
        ticket.use()
        channel, buffer = ticket.private
        assert ticket.y is not None
        if y.data_ptr() != ticket.y.data_ptr():
            ticket.y.copy_(y[: len(ticket.y)])
        join = channel.stream.launch(
            lambda: self._sum(channel.window, buffer, ticket.routing, out_TD)
        )
        buffer.busy = False  # for work that this micro-batch's stream is given from now on
        return Transfer(join)

    def _sum(self, window: Window, buffer: _Buffer, routing: Routing, out_TD: Tensor) -> Tensor:
        window.meet(0)
        ids_TK = routing.ids_TK.to(torch.int32).contiguous()
        weights_TK = routing.weights_TK.float().contiguous()
        collect(
            window.bases_R, window.state, window.rank, weights_TK, ids_TK, self._num_local,
            buffer.at.places, buffer.at.y,
            out_TD, self._facts.comm_sms,
        )  # fmt: skip
        return out_TD
