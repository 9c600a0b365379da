"""`deep_ep.Buffer` in high throughput; the low-latency half is in low_latency.py."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.moe.deepep.fake.events import EventHandle, EventOverlap, finish
from tests.moe.deepep.fake.exchange import Exchange
from tests.moe.deepep.fake.low_latency import LowLatency
from tests.moe.deepep.fake.tensors import (
    cat,
    check_ids,
    check_rows,
    check_weights,
    local_of,
    padded,
    poisoned,
    take,
    trap,
)

WORLDS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
CHUNK = 256


class Config:
    """The size hints are the fake's own; what matters is that they are asked and kept."""

    def __init__(self, num_sms=20, nvl_send=6, nvl_recv=CHUNK, rdma_send=6, rdma_recv=CHUNK):
        self.nvl_recv, self.rdma_recv = nvl_recv, rdma_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.nvl_recv * hidden_bytes * min(num_ranks, 8)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else self.rdma_recv * hidden_bytes * num_ranks


class Buffer(LowLatency):
    num_sms = 20

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=False,
        enable_shrink=False,
        comm=None,
    ):
        self.rank, self.group_size, self.group = group.rank(), group.size(), group
        trap(self.group_size < 8 or self.group_size % 8 == 0, "ranks beyond 8 come in whole nodes")
        trap(num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0, "sizes are multiples of 128")
        trap(num_rdma_bytes == 0 or self.group_size > 8 or low_latency_mode, "one node needs no RDMA buffer")
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.num_qps_per_rank = num_qps_per_rank
        self.exchange: Exchange | None = Exchange.over(group)
        self.start_low_latency()

    def destroy(self):
        assert self.explicitly_destroy, "`explicitly_destroy` must be set"
        exchange = self.alive()
        exchange.take(exchange.post(self.rank, "destroy", None))
        self.exchange = None

    def alive(self) -> Exchange:
        trap(self.exchange is not None, "this buffer was destroyed")
        assert self.exchange is not None
        return self.exchange

    @staticmethod
    def capture():
        return EventOverlap(EventHandle())

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        assert num_ranks in WORLDS, f"no kernels for {num_ranks} ranks"
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks):
        assert num_ranks in WORLDS, f"no kernels for {num_ranks} ranks"
        return Config(Buffer.num_sms, 4, CHUNK + 32)

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        self.alive()
        _check_streams(previous_event, async_finish, allocate_on_comm_stream)
        check_ids(topk_idx, num_experts)
        truths = self._layout(topk_idx, num_experts)
        shown, arrivals = zip(*(poisoned(truth) for truth in truths), strict=True)
        per_rank, per_expert, is_in_rank = shown
        event = EventOverlap(finish(list(arrivals), async_finish))
        return per_rank, None, per_expert, is_in_rank, event

    def _layout(self, topk_idx: Tensor, num_experts: int) -> list[Tensor]:
        slots = num_experts // self.group_size
        rank_of = torch.where(topk_idx >= 0, topk_idx // slots, -1)
        is_in_rank = (rank_of[:, :, None] == torch.arange(self.group_size)).any(1)
        per_expert = torch.bincount(topk_idx.flatten() + 1, minlength=num_experts + 1)[1:].int()
        return [is_in_rank.sum(0).int(), per_expert, is_in_rank]

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        exchange = self.alive()
        _check_streams(previous_event, async_finish, allocate_on_comm_stream)
        _let_pass(previous_event)
        data, scales = check_rows(x)
        self._check_size(data.shape[1] * data.element_size(), self.get_dispatch_config(self.group_size))
        if handle is not None:
            trap(topk_idx is None and topk_weights is None, "a cached layout excludes topk_idx and topk_weights")
            is_token_in_rank = handle[4]
        else:
            given = (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
            trap(all(part is not None for part in given), "without a handle the layout is needed")
            trap((topk_idx is None) == (topk_weights is None), "topk_idx and topk_weights come together")
            check_ids(topk_idx, len(num_tokens_per_expert))
            check_weights(topk_weights, topk_idx)
            truths = self._layout(topk_idx, len(num_tokens_per_expert))
            trap(all(map(torch.equal, given, truths)), "the layout does not belong to these ids, or did not arrive")
        message = (data.clone(), scales, topk_idx, topk_weights, is_token_in_rank.clone())
        messages = exchange.take(exchange.post(self.rank, "dispatch", message))
        return self._received(messages, handle, num_tokens_per_expert, expert_alignment, num_worst_tokens, async_finish)

    def _received(
        self, messages: list[Any], handle: Any, per_expert: Any, alignment: int, worst: int, is_async: bool
    ) -> Any:
        mine = [message[4][:, self.rank].nonzero()[:, 0] for message in messages]
        rows: list[Tensor] = [cat([take(message[0], at) for message, at in zip(messages, mine, strict=True)])]
        if messages[0][1] is not None:
            rows.append(cat([message[1][at] for message, at in zip(messages, mine, strict=True)]))
        if handle is not None:
            shown, arrivals = zip(*map(poisoned, rows), strict=True)
            x = tuple(shown) if len(rows) > 1 else shown[0]
            return x, None, None, None, None, EventOverlap(finish(list(arrivals), is_async))
        slots = len(per_expert) // self.group_size
        ids = local_of(cat([message[2][at] for message, at in zip(messages, mine, strict=True)]), self.rank, slots)
        weights = cat([message[3][at] for message, at in zip(messages, mine, strict=True)]).masked_fill(ids < 0, 0)
        counts = torch.bincount(ids.flatten() + 1, minlength=slots + 1)[1:]
        aligned = [] if worst else [-(-count // alignment) * alignment for count in counts.tolist()]
        truths = [*rows, ids, weights]
        if worst:
            truths = [padded(truth, worst) for truth in truths]
        shown, arrivals = zip(*map(poisoned, truths), strict=True)
        x = tuple(shown[:2]) if len(rows) > 1 else shown[0]
        handle = self._handle(messages, mine)
        return x, shown[-2], shown[-1], aligned, handle, EventOverlap(finish(list(arrivals), is_async))

    def _handle(self, messages: list[Any], mine: list[Tensor]) -> tuple[Tensor, ...]:
        prefix = torch.stack([message[4].sum(0) for message in messages]).cumsum(0).int()
        channels = torch.zeros(self.group_size, self.num_sms // 2, dtype=torch.int32)
        send_head = torch.zeros(len(messages[self.rank][4]), self.group_size, dtype=torch.int32)
        return prefix, channels, channels.clone(), torch.cat(mine).int(), messages[self.rank][4], send_head

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        exchange = self.alive()
        _check_streams(previous_event, async_finish, allocate_on_comm_stream)
        _let_pass(previous_event)
        trap(isinstance(handle, tuple) and len(handle) == 6, "a handle of one node has six parts")
        prefix, _, _, source, is_in_rank, _ = handle
        trap(isinstance(x, Tensor) and x.dtype == torch.bfloat16, "combine takes bfloat16")
        check_rows(x)
        trap(len(x) == len(source), f"{len(x)} rows for {len(source)} that were received")
        self._check_size(x.shape[1] * x.element_size(), self.get_combine_config(self.group_size))
        ends = [0, *prefix[:, self.rank].tolist()]
        message = [(source[a:b].long(), x[a:b].clone()) for a, b in pairwise(ends)]
        messages = exchange.take(exchange.post(self.rank, "combine", message))
        total = torch.zeros(len(is_in_rank), x.shape[1])
        for by_rank in messages:
            token, rows = by_rank[self.rank]
            total.index_add_(0, token, rows.float())
        home, arrive = poisoned(total.bfloat16())
        return home, None, EventOverlap(finish([arrive], async_finish))

    def _check_size(self, row_bytes: int, config: Config) -> None:
        trap(not self.low_latency_mode, "call clean_low_latency_buffer between the two modes")
        nvl = config.get_nvl_buffer_size_hint(row_bytes, self.group_size)
        trap(self.num_nvl_bytes >= nvl, f"{self.num_nvl_bytes} NVLink bytes, {nvl} are needed")


def _check_streams(previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    trap(previous_event is None or isinstance(previous_event, EventOverlap), "previous_event must be an EventOverlap")
    if allocate_on_comm_stream:
        trap(previous_event is not None and async_finish, "allocate_on_comm_stream needs an event and async_finish")


def _let_pass(previous_event: EventOverlap | None) -> None:
    """The communication stream waits for it."""
    if previous_event is not None and previous_event.event is not None:
        previous_event.event.current_stream_wait()
