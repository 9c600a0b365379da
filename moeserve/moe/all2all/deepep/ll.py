"""The adapter for DeepEP's low-latency kernels, which write each token's activation directly into
the slots of its experts on their ranks.

Each operation (a dispatch or a combine) is a send and a receive. On the stream, the operations A
and C of micro-batch 0 and B of micro-batch 1 are in this order:

    micro-batch 0:  compute, send A,                               compute, receive B, send C, ...
    micro-batch 1:                   compute, receive A, send B,

1. The call of `dispatch` or `combine` launches the sending kernel. deep_ep returns a hook that
   launches the receiving kernel.
2. The other micro-batch computes. The receiving kernel is not launched yet, because it would occupy
   the stream until all rows have arrived.
3. Before its own send, the other micro-batch calls `launch_receive`, which calls the hook. Without
   another micro-batch, `wait` calls the hook.

deep_ep alternates between two buffers, and each send clears the counters of the previous operation.
So the previous operation must be received before the next send. The order of the micro-batches
ensures that; `_receive_last` does in all other cases. Every step has an even number of operations,
so a CUDA graph always starts with the buffer with which it was recorded.

The rows of one sender reach an expert in any order, so this adapter is not `exact` (`All2AllCaps`).

T: tokens of this rank. K: experts per token. D: model width. W: width of a sent row, padded.
e: local experts. C: capacity of an expert: the limit of tokens per dispatch times the number of
ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from moeserve.comm.gloo import ON_DEVICE
from moeserve.moe.all2all.base import All2AllCaps, Inbound, Layout, Ticket
from moeserve.moe.all2all.deepep.base import DeepEP, caps_with, pad_width, trim_padding
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.pending import Pending
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch

Result = TypeVar("Result")
WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # supported by the kernels
MAX_TOKENS = 128  # per dispatch; every expert has slots for that many tokens of each rank
TOKEN_ALIGNMENT = 4  # the limit of tokens per dispatch must be a multiple of this
IN_FLIGHT = 2  # dispatches that may wait for their combine: one for each of deep_ep's buffers


class DeepEPLowLatency(DeepEP):
    """The adapter of `Buffer` in low-latency mode, with one buffer for all micro-batches.

    The kernels take bfloat16 and quantize to fp8 themselves.
    """

    # Facts about the kernels and the package, see `DeepEP`
    name = "deepep_ll"
    needs = "Buffer"
    max_top_k = 11
    whole_nodes = True
    takes_sms = False
    nccl = False

    def __init__(self, lib: Any, facts: BackendFacts) -> None:
        super().__init__(lib, facts)
        self._in_flight = 0
        self._last: _Operation[Any] | None = None

    def caps_of(self, facts: BackendFacts) -> All2AllCaps:
        return caps_with(
            self.name,
            Layout.SLOTTED,
            max_tokens=min(MAX_TOKENS, -(-facts.max_tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT),
            pad_hidden=lambda width: next((wide for wide in WIDTHS if wide >= width), None),
            supports_world_size=lambda size: size in range(2, 8) or (size > 0 and size % 8 == 0),
            max_in_flight=IN_FLIGHT,
            why_not_recordable=None,  # a CUDA graph can record it
        )

    def open(self, group: Any) -> Any:
        self._in_flight = 0
        self._last = None
        buffer_class = self.lib.Buffer
        num_bytes = buffer_class.get_low_latency_rdma_size_hint(
            self.max_tokens, self.width, group.size(), self.num_experts
        )
        return buffer_class(
            group,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=self.num_local,
            explicitly_destroy=True,
        )

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> "_Operation[Ticket]":
        buffer = self.buffer
        ids_TK = self.ids_of(routing)
        tokens, width = x_TD.shape
        assert tokens <= self.max_tokens, f"{tokens} tokens of at most {self.max_tokens}"
        assert self._in_flight < IN_FLIGHT, f"{IN_FLIGHT} dispatches are not combined yet"
        timer = self.comm.watch()
        with self.calling(buffer):
            self._receive_last()
            rows, counts_e, handle, _, hook = buffer.low_latency_dispatch(
                pad_width(x_TD, self.width),
                ids_TK,
                self.max_tokens,
                self.num_experts,
                use_fp8=self.fp8,
                return_recv_hook=True,
            )
        self._in_flight += 1

        most_tokens = min(ubatch.most_tokens or self.max_tokens, self.max_tokens)
        top_k = ids_TK.shape[1]

        def make_ticket() -> Ticket:
            rows_eCD, scales = trim_padding(rows, width)
            num_local, capacity = rows_eCD.shape[:2]
            inbound = Inbound(
                Layout.SLOTTED,
                rows_eCD,
                counts_e=counts_e,
                ends_e=counts_e,
                # An even load: every rank sends, and so receives, most_tokens * top_k rows.
                expected_rows=most_tokens * top_k,
                # A token has at most min(top_k, num_local) of these experts.
                max_rows=capacity * min(top_k, num_local),
                scales=scales,
            )
            return Ticket(inbound, routing, private=(buffer, handle, ids_TK))

        pending = _Operation(self, buffer, hook, timer, finish=make_ticket)
        self._last = pending
        return pending

    def combine(
        self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch
    ) -> "_Operation[Tensor]":
        ticket.use()
        buffer, handle, ids_TK = ticket.private
        timer = self.comm.watch()
        in_place = out_TD.shape[1] == self.width and out_TD.is_contiguous()
        with self.calling(buffer):
            self._receive_last()
            home_TW, _, hook = buffer.low_latency_combine(
                pad_width(y, self.width),
                ids_TK,
                ticket.routing.weights_TK.contiguous(),
                handle,
                return_recv_hook=True,
                out=out_TD if in_place else None,
            )
        self._in_flight -= 1

        def cut_padding() -> Tensor:
            if home_TW.data_ptr() == out_TD.data_ptr():  # the kernel wrote to out_TD
                return out_TD
            return out_TD.copy_(home_TW[:, : out_TD.shape[1]])

        pending = _Operation(self, buffer, hook, timer, finish=cut_padding)
        self._last = pending
        return pending

    def _receive_last(self) -> None:
        """Launch the last operation's receiving kernel, if that has not happened yet."""
        if self._last is not None:
            self._last.launch_receive()


@dataclass(slots=True)
class _Operation(Pending[Result]):
    """A sent operation.

    Its receiving kernel is launched once, by the first `launch_receive` or `wait`.
    """

    owner: DeepEPLowLatency
    buffer: Any
    hook: Callable[[], None] | None  # launches the receiving kernel; None: it was launched
    timer: AbstractContextManager[None]  # measures from the send to the end of the `with` block
    finish: Callable[[], Result]
    arrived_ns: int = ON_DEVICE

    def launch_receive(self) -> None:
        hook = self.hook
        self.hook = None
        if hook is not None:
            with self.owner.calling(self.buffer), self.timer:
                hook()

    def wait(self) -> Result:
        self.launch_receive()
        return self.finish()
