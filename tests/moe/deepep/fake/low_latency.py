"""`deep_ep.Buffer` in its low-latency mode.

It has two alternating buffers, hooks that receive, and rows per expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.moe.deepep.fake.events import EventOverlap, finish
from tests.moe.deepep.fake.exchange import Exchange
from tests.moe.deepep.fake.tensors import FP8, check_ids, check_weights, poisoned, trap

WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MAX_TOP_K = 11
QP_DEPTH = 1024


class Buffer:
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
        self.rank = group.rank()
        self.group_size = group.size()
        self.group = group
        trap(self.group_size < 8 or self.group_size % 8 == 0, "ranks beyond 8 come in whole nodes")
        trap(num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0, "sizes are multiples of 128")
        trap(
            num_rdma_bytes == 0 or self.group_size > 8 or low_latency_mode,
            "one node needs no RDMA buffer",
        )
        self.num_rdma_bytes = num_rdma_bytes
        self.num_qps_per_rank = num_qps_per_rank
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.exchange: Exchange | None = Exchange.over(group)
        self._live: set[int] = set()  # operations whose results are still in use
        self._on_its_way: int | None = None  # the operation that was sent but not received
        self._combined: set[int] = set()  # handles that were used

    def destroy(self):
        assert self.explicitly_destroy, "`explicitly_destroy` must be set"
        exchange = self._alive()
        exchange.take(exchange.post(self.rank, "destroy", None))
        self.exchange = None

    def _alive(self) -> Exchange:
        trap(self.exchange is not None, "this buffer was destroyed")
        assert self.exchange is not None
        return self.exchange

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
    ):
        return 128 * -(
            -4 * num_experts * num_max_dispatch_tokens_per_rank * (2 * hidden + hidden // 32) // 128
        )

    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        cumulative_local_expert_recv_stats=None,
        dispatch_wait_recv_cost_stats=None,
        use_fp8=True,
        round_scale=False,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=False,
    ):
        self._alive()
        limit = num_max_dispatch_tokens_per_rank
        slots = num_experts // self.group_size
        check_ids(topk_idx, num_experts)
        trap(x.dtype == torch.bfloat16 and x.is_contiguous(), "x must be bfloat16 and contiguous")
        trap(x.shape[1] in WIDTHS, f"no kernels for rows of {x.shape[1]}")
        trap(topk_idx.shape[1] <= MAX_TOP_K, f"more than {MAX_TOP_K} experts per token")
        trap(len(x) == len(topk_idx) and len(x) <= limit, f"{len(x)} tokens of at most {limit}")
        trap(limit * self.group_size % 4 == 0, "slots hold multiples of 4 rows")
        trap(
            num_experts % self.group_size == 0 and self.num_qps_per_rank >= slots,
            "a queue pair per local expert",
        )
        trap(not use_ue8m0 or round_scale, "use_ue8m0 needs round_scale")
        self._check_mode(limit, x.shape[1], num_experts, async_finish, return_recv_hook)
        number = self._send("dispatch", (limit, x.clone(), topk_idx.clone()))
        shape = (slots, self.group_size * limit)
        count, set_count = poisoned(torch.zeros(slots, dtype=torch.int32))
        info, set_info = poisoned(torch.zeros(shape, dtype=torch.int32))
        span, set_span = poisoned(torch.zeros((slots, self.group_size), dtype=torch.int64))
        data, _ = poisoned(
            torch.zeros((*shape, x.shape[1]), dtype=FP8 if use_fp8 else torch.bfloat16)
        )
        scale = torch.full((slots, x.shape[1] // 128, shape[1]), torch.nan).transpose(1, 2)

        def receive() -> None:
            for arrive in (set_count, set_info, set_span):
                arrive()
            messages = self._receive(number)
            trap(
                len({message[0] for message in messages}) == 1,
                "ranks differ in the most tokens of a dispatch",
            )
            for slot in range(slots):
                for source, (_, rows, ids) in enumerate(messages):
                    hits = (ids == self.rank * slots + slot).nonzero()[:, 0].flip(0)  # in any order
                    start = int(count[slot])
                    end = int(count[slot]) + len(hits)
                    put(data[slot], scale[slot], slice(start, end), rows[hits])
                    info[slot, start:end] = hits.int()
                    span[slot, source] = start << 32 | len(hits)
                    count[slot] = end

        handle = (info, span, limit, x.shape[1], num_experts)
        event, hook = self._finish(number, receive, async_finish, return_recv_hook)
        info.operation = number
        return (data, scale) if use_fp8 else data, count, handle, event, hook

    def low_latency_combine(
        self,
        x,
        topk_idx,
        topk_weights,
        handle,
        use_logfmt=False,
        zero_copy=False,
        async_finish=False,
        return_recv_hook=False,
        out=None,
        combine_wait_recv_cost_stats=None,
    ):
        self._alive()
        info, span, limit, hidden, num_experts = handle
        dispatched = info.operation
        trap(dispatched not in self._combined, "a low-latency handle serves once")
        self._combined.add(dispatched)
        self._live.discard(dispatched)
        check_ids(topk_idx, num_experts)
        check_weights(topk_weights, topk_idx)
        trap(x.dtype == torch.bfloat16 and x.is_contiguous(), "x must be bfloat16 and contiguous")
        trap(
            x.shape == (*info.shape, hidden),
            f"x must be {(*info.shape, hidden)}, not {tuple(x.shape)}",
        )
        trap(not (use_logfmt and zero_copy), "use_logfmt and zero_copy exclude each other")
        self._check_mode(limit, hidden, num_experts, async_finish, return_recv_hook)
        number = self._send("combine", (info.clone(), span.clone(), x.clone()))
        if out is None:
            out = torch.empty(len(topk_idx), hidden, dtype=torch.bfloat16)
        trap(
            out.shape == (len(topk_idx), hidden) and out.dtype == torch.bfloat16,
            "out must be bfloat16 [T, H]",
        )
        trap(out.is_contiguous(), "out must be contiguous")
        out.fill_(torch.nan)

        def receive() -> None:
            self._live.discard(number)
            messages = self._receive(number)
            total = torch.zeros(len(topk_idx), hidden)
            for k in range(topk_idx.shape[1]):
                for token, expert in enumerate(topk_idx[:, k].tolist()):
                    if expert >= 0:
                        row = _row_of(
                            messages[expert // len(info)], expert % len(info), self.rank, token
                        )
                        total[token] += row.float() * topk_weights[token, k]
            out.copy_(total)

        event, hook = self._finish(number, receive, async_finish, return_recv_hook)
        return out, event, hook

    def _check_mode(
        self, limit: int, hidden: int, num_experts: int, is_async: bool, hooked: bool
    ) -> None:
        trap(self.low_latency_mode, "the buffer is not for low latency")
        trap(not (is_async and hooked), "async_finish excludes return_recv_hook")
        trap((limit + 1) * 2 <= QP_DEPTH, "the queue pairs are too short for so many tokens")
        size = self.get_low_latency_rdma_size_hint(limit, hidden, self.group_size, num_experts)
        trap(self.num_rdma_bytes >= size, f"{self.num_rdma_bytes} RDMA bytes, {size} are needed")
        trap(len(self._live) < 2, "three low-latency results at a time, there are buffers for two")
        trap(self._on_its_way is None, "a send wipes the counters of what was not received yet")

    def _send(self, what: str, message: Any) -> int:
        number = self._alive().post(self.rank, what, message)
        self._live.add(number)
        self._on_its_way = number
        return number

    def _receive(self, number: int) -> list[Any]:
        messages = self._alive().take(number)
        self._on_its_way = None
        return messages

    def _finish(
        self, number: int, receive: Callable[[], None], is_async: bool, hooked: bool
    ) -> Any:
        if hooked:
            return EventOverlap(None), _once(receive)
        if is_async:
            messages = self._receive(number)  # the communication stream does
            assert messages
        return EventOverlap(finish([receive], is_async)), None


def put(data: Tensor, scale: Tensor, at: slice, rows: Tensor) -> None:
    if data.dtype == torch.bfloat16:
        data[at] = rows
        return
    blocks = rows.float().unflatten(1, (-1, 128))
    amax = blocks.abs().amax(2).clamp(min=1e-4)
    scale[at] = amax / 448
    data.view(torch.uint8)[at] = (
        (blocks * (448 / amax)[:, :, None]).flatten(1).to(FP8).view(torch.uint8)
    )


def _row_of(message: Any, slot: int, home: int, token: int) -> Tensor:
    info, span, rows = message
    packed = int(span[slot, home])
    start = packed >> 32
    count = packed & 0xFFFFFFFF
    at = (info[slot, start : start + count] == token).nonzero()[0, 0]
    row: Tensor = rows[slot, start + int(at)]
    return row


def _once(receive: Callable[[], None]) -> Callable[[], None]:
    done = False

    def hook() -> None:
        nonlocal done
        trap(not done, "a hook is called once")
        done = True
        receive()

    return hook
