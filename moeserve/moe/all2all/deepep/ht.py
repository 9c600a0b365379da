"""DeepEP's high-throughput kernels: a row travels once to each rank that has experts for it.

The receiver finds out which of its experts a row is for, sorts a copy for each of them, adds their results up with the
weights, and sends one row back; `combine` only adds up the rows of several ranks.

T tokens of this rank, K experts per token, D model width, W width that travels, N rows received, P (row, expert) pairs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moeserve.comm.gloo import ON_DEVICE
from moeserve.moe.all2all.base import All2AllCaps, Inbound, Layout, Ticket
from moeserve.moe.all2all.deepep.base import Combined, DeepEP, caps_with, pad_of
from moeserve.moe.all2all.deepep.rows import Packed, unpack, widen
from moeserve.moe.all2all.layout import Grouping, group_rows, weighted_sum
from moeserve.moe.all2all.wire_format import FP8
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch

if TYPE_CHECKING:
    from moeserve.moe.all2all.registry import BackendFacts

WORLDS = frozenset({2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160})  # that there are kernels for


class DeepEPHighThroughput(DeepEP):
    """Both directions run on the buffer's own stream; the host waits in `dispatch` for the number of rows."""

    name = "deepep_ht"
    needs = "Buffer"
    max_top_k = 128

    def caps_of(self, facts: BackendFacts) -> All2AllCaps:
        return caps_with(
            self.name,
            Layout.GROUPED,
            max_tokens=facts.max_tokens,
            pad_hidden=pad_of(facts.wire.name == FP8),
            world_sizes=lambda size: size in WORLDS,
        )

    def open(self, group: Any) -> Any:
        lib, size = self.lib.Buffer, group.size()
        lib.set_num_sms(self.facts.comm_sms)
        row_bytes = self.width * torch.bfloat16.itemsize
        configs = lib.get_dispatch_config(size), lib.get_combine_config(size)
        return lib(
            group,
            num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs),
            num_rdma_bytes=max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs),
            explicitly_destroy=True,
        )

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> _HTDispatched:
        buffer, ids_TK, rows = self.buffer, self.ids_of(routing), self.rows_of(x_TD)
        collective = self.comm.watch()
        with self.calling(buffer):
            per_rank, per_node, per_expert, is_in_rank, event = buffer.get_dispatch_layout(
                ids_TK, self.num_experts, **_overlapping(buffer.capture())
            )
            received = buffer.dispatch(
                rows,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids_TK,
                topk_weights=routing.weights_TK.contiguous(),
                **_overlapping(event),
            )
        return _HTDispatched(self, buffer, routing, received, x_TD.shape[1], collective)

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch) -> Combined:
        ticket.use()
        handle: _HTHandle = ticket.private
        sum_ND = y.new_empty((handle.routing.ids_TK.shape[0], y.shape[1]))
        weighted_sum(y, handle.pairs, handle.routing, sum_ND)
        collective = self.comm.watch()
        with self.calling(handle.buffer):
            home_TW, _, event = handle.buffer.combine(
                widen(sum_ND, self.width), handle.handle, **_overlapping(handle.buffer.capture())
            )
        return Combined(self, handle.buffer, home_TW, event, out_TD, collective)


def _overlapping(event: Any) -> dict[str, Any]:
    """Run on the buffer's stream behind `event`, and let the caller's stream go on."""
    return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}


@dataclass(frozen=True, slots=True)
class _HTHandle:
    """What combine must know of its dispatch. routing: of the rows received, with local slots. pairs: where each of
    their (row, expert) pairs is among the inbound rows."""

    buffer: Any
    handle: Any
    routing: Routing
    pairs: Grouping


@dataclass(slots=True)
class _HTDispatched:
    owner: DeepEPHighThroughput
    buffer: Any
    routing: Routing
    received: tuple[Packed, Tensor, Tensor, list[int], Any, Any]
    width: int
    collective: AbstractContextManager[None]
    arrived_ns: int = ON_DEVICE

    def arrive(self) -> None:
        """The receiving kernel was launched with the sending one."""

    def wait(self, deadline_s: float | None = None) -> Ticket:
        rows, ids_NK, weights_NK, counts, handle, event = self.received
        with self.owner.calling(self.buffer), self.collective:
            event.current_stream_wait()
        pairs = group_rows(ids_NK, self.owner.num_slots)
        assert pairs.counts_e.tolist() == counts, (pairs.counts_e, counts)
        x_PD = unpack(rows, self.width).index_select(0, pairs.order_P // ids_NK.shape[1])
        inbound = Inbound(Layout.GROUPED, x_PD, pairs.counts_e, pairs.counts_e.cumsum())
        return Ticket(inbound, self.routing, _HTHandle(self.buffer, handle, Routing(ids_NK, weights_NK), pairs))
