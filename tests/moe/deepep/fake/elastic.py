"""`deep_ep.ElasticBuffer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.moe.deepep.fake.events import EventHandle, EventOverlap, finish
from tests.moe.deepep.fake.exchange import Exchange
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
from tests.moe.deepep.fake.utils import comm

MAX_TOP_K = 32
ALIGNMENT = 2 << 20


class EPHandle:
    def __init__(
        self,
        do_expand,
        num_experts,
        expert_alignment,
        num_max_tokens_per_rank,
        num_sms,
        topk_idx,
        num_recv_tokens,
        num_expanded_tokens,
        num_recv_tokens_per_expert_list,
        psum_num_recv_tokens_per_scaleup_rank,
        psum_num_recv_tokens_per_expert,
        num_unaligned_recv_tokens_per_expert,
        recv_src_metadata,
        dst_buffer_slot_idx,
        token_metadata_at_forward,
        channel_linked_list,
    ):
        given = dict(locals())
        given.pop("self")
        self.__dict__.update(given)
        self.terms = (num_experts, expert_alignment, num_max_tokens_per_rank)


class ElasticBuffer:
    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        self.rank = group.rank()
        self.num_ranks = group.size()
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = deterministic
        self.explicitly_destroy = explicitly_destroy
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
            )
        trap(isinstance(num_cpu_timeout_secs, int), "whole seconds")
        trap(num_bytes > 0 and num_bytes % ALIGNMENT == 0, "sizes are multiples of 2 MiB")
        self.num_bytes = num_bytes
        self.exchange: Exchange | None = Exchange.over(group)
        comm.keep(group)
        group.barrier()

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
    def capture():
        return EventHandle()

    @staticmethod
    def get_buffer_size_hint(
        group,
        num_max_tokens_per_rank,
        hidden,
        num_topk=0,
        use_fp8_dispatch=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
    ):
        trap(num_max_tokens_per_rank > 0 and hidden > 0, "a size needs tokens and a width")
        rows = (
            num_max_tokens_per_rank
            * group.size()
            * max(1, min(group.size(), num_topk or MAX_TOP_K))
        )
        return -(-rows * hidden * 2 // ALIGNMENT) * ALIGNMENT

    def get_theoretical_num_sms(
        self,
        num_experts,
        num_topk,
        num_scaleout_topk=0,
        rdma_gbs=0,
        nvlink_gbs=0,
        sm_read_gbs=200,
        sm_write_gbs=50,
    ):
        trap(num_experts % self.num_ranks == 0, "every rank has as many experts")
        return 12

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        exchange = self._alive()
        _check_streams(previous_event, allocate_on_comm_stream)
        data, scales = check_rows(x)
        trap(not do_zero_padding or do_expand, "do_zero_padding needs do_expand")
        if handle is not None:
            trap(topk_idx is None, "a cached layout excludes topk_idx")
            trap(not do_cpu_sync, "a cached layout excludes do_cpu_sync")
            terms = (num_experts, expert_alignment, num_max_tokens_per_rank)
            same = all(
                term is None or term == kept for term, kept in zip(terms, handle.terms, strict=True)
            )
            trap(same, f"{terms} are not the handle's {handle.terms}")
            topk_idx, (num_experts, expert_alignment, num_max_tokens_per_rank) = (
                handle.topk_idx,
                handle.terms,
            )
        do_cpu_sync = handle is None if do_cpu_sync is None else do_cpu_sync
        alignment = expert_alignment or 1
        limit = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        check_ids(topk_idx, num_experts)
        if topk_weights is not None:
            check_weights(topk_weights, topk_idx)
        trap(topk_idx.shape[1] <= MAX_TOP_K, f"more than {MAX_TOP_K} experts per token")
        self.num_sms = num_sms or self.get_theoretical_num_sms(num_experts, topk_idx.shape[1])
        trap(
            len(data) == len(topk_idx) and len(data) <= limit,
            f"{len(data)} tokens of at most {limit}",
        )
        trap(
            len(data) > 0 or not do_cpu_sync,
            "a rank without tokens sends a dummy where the host waits for counts",
        )
        self._check_size(limit, data.shape[1])
        message = (
            data.clone(),
            scales,
            topk_idx.clone(),
            topk_weights,
            (limit, num_experts, alignment, do_expand),
        )
        messages = exchange.take(exchange.post(self.rank, "dispatch", message))
        trap(len({message[4] for message in messages}) == 1, "ranks differ in their terms")
        arrived = _Arrived(messages, self.rank, self.deterministic)
        made = arrived.handle(topk_idx.clone() if do_handle_copy else topk_idx, do_cpu_sync)
        truths = arrived.truths(do_cpu_sync)
        shown, arrivals = zip(*map(poisoned, truths), strict=True)
        event = EventOverlap(finish(list(arrivals), async_with_compute_stream))
        rows = tuple(shown[:2]) if scales is not None else shown[0]
        ids = None if do_expand else shown[-2 if topk_weights is not None else -1]
        return rows, ids, None if topk_weights is None else shown[-1], handle or made, event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        exchange = self._alive()
        _check_streams(previous_event, allocate_on_comm_stream)
        trap(isinstance(x, Tensor) and x.dtype == torch.bfloat16, "combine takes bfloat16")
        check_rows(x)
        meta = handle.recv_src_metadata[: handle.psum_num_recv_tokens_per_scaleup_rank[-1]]
        rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        trap(len(x) == rows, f"{len(x)} rows for {rows} that were received")
        limit = handle.num_max_tokens_per_rank
        self._check_size(limit, x.shape[1])
        if handle.do_expand:
            slots = meta[:, 2:]
            found = x[slots.clamp(min=0)].float().masked_fill(slots[:, :, None] < 0, 0)
            partial = found.sum(1).bfloat16()
        else:
            partial = x[: len(meta)].clone()
        messages = exchange.take(exchange.post(self.rank, "combine", (meta[:, 0].clone(), partial)))
        total = torch.zeros(len(handle.topk_idx), x.shape[1])
        for source, part in messages:
            mine = source // limit == self.rank
            total.index_add_(0, source[mine].long() % limit, part[mine].float())
        home, arrive = poisoned(total.bfloat16())
        return home, None, EventOverlap(finish([arrive], async_with_compute_stream))

    def _check_size(self, limit: int, hidden: int) -> None:
        trap(
            limit * self.num_ranks * hidden * 2 <= self.num_bytes,
            "the buffer is too small for so many rows",
        )


class _Arrived:
    """One rank's part of all ranks' messages.

    It has tokens once per rank, and one row per (token, expert) pair.
    """

    def __init__(self, messages: list[Any], rank: int, deterministic: bool) -> None:
        self.messages = messages
        self.limit, self.num_experts, self.alignment, self.do_expand = messages[0][4]
        self.slots = self.num_experts // len(messages)
        local = [local_of(message[2], rank, self.slots) for message in messages]
        self.mine = [(ids >= 0).any(1).nonzero()[:, 0] for ids in local]
        if not deterministic:
            self.mine = [at.flip(0) for at in self.mine]
        self.ids = torch.cat([ids[at] for ids, at in zip(local, self.mine, strict=True)])
        self.source = torch.cat([r * self.limit + at for r, at in enumerate(self.mine)])
        pairs = self.ids.flatten()
        self.counts = torch.bincount(pairs + 1, minlength=self.slots + 1)[1:]
        self.aligned = -(-self.counts // self.alignment) * self.alignment
        starts = self.aligned.cumsum(0) - self.aligned
        order = pairs.argsort(stable=True)[int((pairs < 0).sum()) :]
        rank_in_expert = (
            torch.arange(len(order)) - (self.counts.cumsum(0) - self.counts)[pairs[order]]
        )
        self.slot_of = torch.full_like(pairs, -1)
        self.slot_of[order] = starts[pairs[order]] + rank_in_expert
        self.ends = starts + self.counts

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]

    def _worst(self) -> tuple[int, int]:
        """Return the tokens and rows to allocate if the counts are unknown."""
        tokens = self.limit * len(self.messages)
        rows = tokens * min(self.top_k, self.slots) + (self.alignment - 1) * self.slots
        return tokens, -(-rows // self.alignment) * self.alignment

    def handle(self, topk_idx: Tensor, synced: bool) -> EPHandle:
        tokens, rows = (len(self.ids), int(self.aligned.sum())) if synced else self._worst()
        meta = torch.cat(
            [self.source[:, None], self.source[:, None], self.slot_of.view(self.ids.shape)], 1
        ).int()
        per_rank = torch.tensor([len(at) for at in self.mine]).cumsum(0).int()
        psum = self.ends.int() if self.do_expand else self.aligned.cumsum(0).int()
        counts = self.aligned.tolist() if synced else []
        terms = (
            self.do_expand,
            self.num_experts,
            self.alignment,
            self.limit,
            4,
            topk_idx,
            tokens,
            rows,
            counts,
        )
        return EPHandle(
            *terms, per_rank, psum, self.counts.int(), padded(meta, tokens), meta, None, None
        )

    def truths(self, synced: bool) -> list[Tensor]:
        """Return rows, scales, ids unless expanded, and weights, as far as they exist."""
        tokens, rows = (len(self.ids), int(self.aligned.sum())) if synced else self._worst()
        every = [self._all(0), *([] if self.messages[0][1] is None else [self._all(1)])]
        weights = None if self.messages[0][3] is None else self._all(3)
        if not self.do_expand:
            tail = [self.ids, *([] if weights is None else [weights.masked_fill(self.ids < 0, 0)])]
            return [padded(part, tokens) for part in (*every, *tail)]
        pair = (self.slot_of >= 0).nonzero()[:, 0]
        out = []
        for part in (*every, *([] if weights is None else [weights.flatten()])):
            index = pair // self.top_k if part.dim() > 1 else pair
            full = padded(part[:0] if part.dim() == 1 else take(part, index[:0]), rows)
            view = _writable(full)
            source = _writable(take(part, index))
            view[self.slot_of[pair]] = source
            out.append(full)
        return out

    def _all(self, field: int) -> Tensor:
        return cat(
            [take(message[field], at) for message, at in zip(self.messages, self.mine, strict=True)]
        )


def _writable(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows


def _check_streams(previous_event: Any, allocate_on_comm_stream: bool) -> None:
    if previous_event is not None and not isinstance(previous_event, EventHandle):
        raise TypeError("previous_event must be a raw EventHandle")
    trap(
        previous_event is None or allocate_on_comm_stream,
        "previous_event needs allocate_on_comm_stream",
    )
