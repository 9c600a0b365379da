"""DeepEP's low-latency kernels: every (token, expert) pair is written straight into the expert's
rows on its rank.

Two buffers take turns from operation to operation, and each send wipes the counters of the
operation before, which must have been received by then. The micro-batches' order sees to that; for
any other order the adapter does. Every step has an even number of operations, so a graph finds the
buffers' turns as it has recorded them. The receiving kernel occupies the caller's stream, so
`arrive` launches it, as late as possible. Rows of one sender reach an expert in any order.

T tokens of this rank, K experts per token, D model width, W width that travels, e experts of one
rank, C rows that an expert has room for: the most tokens of a dispatch times the number of ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from moeserve.comm.gloo import ON_DEVICE
from moeserve.moe.all2all.base import All2AllCaps, Inbound, Layout, Ticket
from moeserve.moe.all2all.deepep.base import DeepEP, caps_with, cut, widen
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.pending import Pending
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch

T = TypeVar("T")
WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # that there are kernels for
MAX_TOKENS = 128  # of one dispatch: every expert has room for that many of each rank
TOKEN_ALIGNMENT = 4
IN_FLIGHT = 2


class DeepEPLowLatency(DeepEP):
    """One buffer for all micro-batches. The kernels round to fp8 themselves, rows are handed over
    as bfloat16.
    """

    name = "deepep_ll"
    needs = "Buffer"
    max_top_k = 11
    whole_nodes = True
    takes_sms = False
    nccl = False

    def __init__(self, lib: Any, facts: BackendFacts) -> None:
        super().__init__(lib, facts)
        self._in_flight = 0
        self._last: _Received[Any] | None = None

    def caps_of(self, facts: BackendFacts) -> All2AllCaps:
        return caps_with(
            self.name,
            Layout.SLOTTED,
            max_tokens=min(MAX_TOKENS, -(-facts.max_tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT),
            pad_hidden=lambda width: next((wide for wide in WIDTHS if wide >= width), None),
            world_sizes=lambda size: size in range(2, 8) or (size > 0 and size % 8 == 0),
            max_in_flight=IN_FLIGHT,
            not_recorded=None,
        )

    def open(self, group: Any) -> Any:
        self._in_flight = 0
        self._last = None
        lib = self.lib.Buffer
        size = lib.get_low_latency_rdma_size_hint(
            self.max_tokens, self.width, group.size(), self.num_experts
        )
        return lib(
            group,
            num_rdma_bytes=size,
            low_latency_mode=True,
            num_qps_per_rank=self.num_local,
            explicitly_destroy=True,
        )

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> "_Received[Ticket]":
        buffer = self.buffer
        ids_TK = self.ids_of(routing)
        tokens, width = x_TD.shape
        assert tokens <= self.max_tokens, f"{tokens} tokens of at most {self.max_tokens}"
        assert self._in_flight < IN_FLIGHT, f"{IN_FLIGHT} dispatches wait to be combined already"
        collective = self.comm.watch()
        with self.calling(buffer):
            self._receive_last()
            rows, counts_e, handle, _, hook = buffer.low_latency_dispatch(
                widen(x_TD, self.width),
                ids_TK,
                self.max_tokens,
                self.num_experts,
                use_fp8=self.fp8,
                return_recv_hook=True,
            )
        self._in_flight += 1

        most_tokens = min(ubatch.most_tokens or self.max_tokens, self.max_tokens)
        top_k = ids_TK.shape[1]

        def unpacked() -> Ticket:
            """Return the rows in the model's width. The host waits for nothing."""
            rows_eCD, scales = cut(rows, width)
            most = rows_eCD.shape[1] * min(top_k, len(rows_eCD))
            inbound = Inbound(
                Layout.SLOTTED, rows_eCD, counts_e, counts_e, most_tokens * top_k, most, scales
            )
            return Ticket(inbound, routing, (buffer, handle, ids_TK))

        self._last = pending = _Received(self, buffer, hook, collective, unpacked)
        return pending

    def combine(
        self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch
    ) -> "_Received[Tensor]":
        ticket.use()
        buffer, handle, ids_TK = ticket.private
        collective = self.comm.watch()
        in_place = out_TD.shape[1] == self.width and out_TD.is_contiguous()
        with self.calling(buffer):
            self._receive_last()
            home_TW, _, hook = buffer.low_latency_combine(
                widen(y, self.width),
                ids_TK,
                ticket.routing.weights_TK.contiguous(),
                handle,
                return_recv_hook=True,
                out=out_TD if in_place else None,
            )
        self._in_flight -= 1

        def narrowed() -> Tensor:
            """Return the sums, copied where they are wider than the model."""
            return (
                out_TD
                if home_TW.data_ptr() == out_TD.data_ptr()
                else out_TD.copy_(home_TW[:, : out_TD.shape[1]])
            )

        self._last = pending = _Received(self, buffer, hook, collective, narrowed)
        return pending

    def _receive_last(self) -> None:
        if self._last is not None:
            self._last.arrive()


@dataclass(slots=True)
class _Received(Pending[T]):
    """An operation whose receiving kernel is launched once, by the first `arrive` or `wait`."""

    owner: DeepEPLowLatency
    buffer: Any
    hook: Callable[[], None] | None
    collective: AbstractContextManager[None]
    finish: Callable[[], T]
    arrived_ns: int = ON_DEVICE

    def arrive(self) -> None:
        hook = self.hook
        self.hook = None
        if hook is not None:
            with self.owner.calling(self.buffer), self.collective:
                hook()

    def wait(self) -> T:
        self.arrive()
        return self.finish()
