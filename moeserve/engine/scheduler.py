"""Decides what runs next. Pure: no torch, no clock, no I/O; requests and results in, plans and outputs out.

There is no prefill phase and no decode phase, only positions of a request that are not computed yet. Plans may be
made before the results of earlier ones are known (`Limits.depth`); they are settled in the order they were made.
Nothing here waits for the device, and blocks are reused at once: the runner executes plans strictly in order, so a
block given up in one plan is read for the last time before any later plan writes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeserve.config import Limits
from moeserve.engine.groups import KVGroup
from moeserve.engine.input_batch import Slots
from moeserve.engine.kv_cache_manager import KVCacheManager
from moeserve.engine.plan import I32, StepPlan, StepResult
from moeserve.engine.plan_builder import InFlightStep, PlanBuilder, joined
from moeserve.engine.prefix_cache import Hit
from moeserve.engine.requests import Request, WaitingQueue, request_of
from moeserve.engine.store import BlockStore, HostStore
from moeserve.engine.update import ended_rows, update_from_output
from moeserve.errors import InvalidRequest
from moeserve.messages import FinishReason, StepOutput, Submit
from moeserve.metrics import StepRecord

_ANY_TOKEN = 2**31 - 1


class Scheduler:
    """submit and abort at any time; plan and settle in turn, with up to limits.depth plans in between.

    eos_ids are the model's end tokens (an ending by any other stop id is reported as such); vocab_size guards
    against token ids that the model does not have; `store` replaces the host store of limits.num_store_blocks.
    """

    def __init__(
        self,
        limits: Limits,
        groups: tuple[KVGroup, ...],
        *,
        eos_ids: Iterable[int] = (),
        vocab_size: int = _ANY_TOKEN,
        store: BlockStore | None = None,
    ) -> None:
        assert {group.block_size for group in groups} == {limits.block_size}, groups
        if store is None and limits.num_store_blocks and limits.enable_prefix_caching:
            store = HostStore(limits.num_store_blocks)
        self.limits = limits
        self.groups = groups
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = vocab_size
        self.kv_manager = KVCacheManager(limits, groups, store)
        self.waiting = WaitingQueue()
        self.num_planned = 0
        self._in_flight: deque[InFlightStep] = deque()
        self._arrivals = 0
        self._stuck: tuple[Request | None, int] = (None, 0)  # a head that did not fit, and the room it met

    @property
    def num_running(self) -> int:
        return self.kv_manager.batch.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.num_running or self.num_waiting)

    # ---- requests come and go

    def submit(self, msg: Submit) -> None:
        """Takes a request in; raises InvalidRequest when it is malformed or could never fit."""
        if msg.rid in self.waiting or msg.rid in self.kv_manager.batch.slot_of:
            raise InvalidRequest(f"request {msg.rid} is running already", code="duplicate_request")
        request = request_of(msg, self._arrivals, self.limits.max_model_len, self.vocab_size)
        need, have = self.kv_manager.peak_blocks(request.max_total - 1), self.limits.num_blocks - 1
        if need > have:
            raise InvalidRequest(
                f"prompt and answer of up to {request.max_total} tokens need {need} KV blocks of "
                f"{self.limits.block_size} tokens and there are {have}: lower max_tokens",
                param="max_tokens",
                code="does_not_fit",
            )
        self._arrivals += 1
        self.waiting.push(request)

    def abort(self, rids: Iterable[int]) -> StepOutput | None:
        """Ends these requests at once: slot and blocks are free when this returns. Unknown ids are ignored."""
        ended = []
        for rid in rids:
            slot = self.kv_manager.batch.slot_of.get(rid)
            if slot is not None:
                self.kv_manager.leave(slot)
            elif rid in self.waiting:
                self.waiting.remove(rid)
            else:
                continue
            ended.append(rid)
        return ended_rows(ended, FinishReason.ABORT) if ended else None

    def abort_all(self) -> StepOutput | None:
        running = list(self.kv_manager.batch.slot_of)
        return self.abort([*running, *(request.rid for request in self.waiting)])

    def reset_prefix_cache(self) -> None:
        """Nothing that comes later reuses what was computed until now."""
        self.kv_manager.cache.reset()

    # ---- one step

    def plan(self) -> StepPlan | None:
        """The next step, or None when all that may run is in flight already."""
        kv_manager, batch = self.kv_manager, self.kv_manager.batch
        builder = PlanBuilder(len(self.groups), self.limits.max_num_batched_tokens)
        self._make_way(builder)
        if self._grant_running(builder):
            self._admit(builder)
        stores = kv_manager.take_stores()
        if not builder.slots:
            assert not stores, "blocks were evicted for nothing"
            return None
        slots = joined(builder.slots)
        kv_manager.register(slots)
        samples = batch.scheduled[slots] >= batch.known[slots]
        plan = builder.finish(self.num_planned, slots, samples, stores)
        self.num_planned += 1
        self._in_flight.append(InFlightStep(plan, slots, batch.occupancy[slots], builder))
        return plan

    def start_over(self) -> None:
        """Forgets the steps in flight and all that was computed: every running request waits again, with all that is
        known of it, and comes out the same."""
        self._in_flight.clear()
        nobody = PlanBuilder(len(self.groups), 0)
        for slot in self.kv_manager.batch.order.tolist():
            self._preempt(slot, nobody)
        self.reset_prefix_cache()

    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Takes the result of the oldest plan: appends tokens, ends requests, frees what they held."""
        in_flight = self._in_flight.popleft()
        assert in_flight.plan is plan, (in_flight.plan.step, plan.step)
        assert result.step == plan.step, (result.step, plan.step)
        output = update_from_output(self.kv_manager, in_flight, result, self.eos_ids)
        return msgspec.structs.replace(output, record=self._record(in_flight, result))

    def audit(self) -> None:
        """Raises AssertionError unless every slot, block and cell is accounted for."""
        self.kv_manager.audit()

    # ---- granting

    def _make_way(self, builder: PlanBuilder) -> None:
        """Lets the first waiting request take the place of running ones of lower priority, if that is enough."""
        head, batch = self.waiting.head, self.kv_manager.batch
        if head is None or not batch.num_running:
            return
        order = batch.order
        if batch.request(int(order[-1])).priority <= head.priority:
            return
        kv_manager = self.kv_manager
        lacking = kv_manager.cost(head, kv_manager.cache.match(head)) - self._room(order)
        victims: list[int] = []
        for slot in order[::-1].tolist():
            if lacking <= 0 and batch.num_free + len(victims) > 0:
                break
            if batch.request(slot).priority <= head.priority:
                return
            victims.append(slot)
            lacking -= sum(kv_manager.pool.num_exclusive(blocks) for blocks in batch.held(slot))
            lacking -= kv_manager.promised(np.array([slot], np.intp))
        for slot in victims:
            self._preempt(slot, builder)

    def _grant_running(self, builder: PlanBuilder) -> bool:
        """Tokens and blocks for running requests, best rank first. False when blocks ran out for some."""
        kv_manager, batch = self.kv_manager, self.kv_manager.batch
        enough = True
        while batch.num_running:
            slots = batch.order
            start = batch.scheduled[slots]
            count = np.maximum(batch.known[slots] - start, 1)
            np.minimum(count, batch.last[slots] - start, out=count)
            np.minimum(count, kv_manager.chunk, out=count)
            if int(count.min()) <= 0 or int(count.sum()) > builder.budget:
                slots, start, count = share(slots, start, count, builder.budget)
            kv_manager.release_passed(slots, start, builder)
            new = batch.num_blocks(start + count) - batch.num_blocks(start)
            if int(new.sum()) * len(self.groups) <= kv_manager.pool.num_free:
                if len(slots):
                    self._grant(builder, slots, start, count, new)
                break
            self._preempt(int(batch.order[-1]), builder)
            enough = False
        return enough

    def _admit(self, builder: PlanBuilder) -> None:
        """Waiting requests, best rank first, until one does not fit: nobody overtakes it."""
        kv_manager, batch = self.kv_manager, self.kv_manager.batch
        while builder.budget > 0 and batch.num_free and (head := self.waiting.head) is not None:
            hit = self._fitting(head)
            if hit is None:
                return
            self.waiting.pop()
            if head.num_cached is None:
                head.num_cached = min(hit.num_blocks * self.limits.block_size, head.num_prompt)
                builder.prompt_tokens += head.num_prompt
                builder.cached_tokens += head.num_cached
            slots = np.array([kv_manager.enter(head, hit, builder)], np.intp)
            start = batch.scheduled[slots]
            count = np.minimum(batch.known[slots] - start, min(builder.budget, kv_manager.chunk))
            new = batch.num_blocks(start + count) - batch.num_blocks(start)
            self._grant(builder, slots, start, count, new)
            kv_manager.register(slots)  # at once: the next one in line may begin alike

    def _fitting(self, head: Request) -> Hit | None:
        """The head's cache hit if its whole prompt fits beside the others and the watermark."""
        order = self.kv_manager.batch.order
        if not len(order):
            return self.kv_manager.cache.match(head)
        room = self._room(order)
        if self._stuck[0] is head and room <= self._stuck[1]:
            return None
        hit = self.kv_manager.cache.match(head)
        if self.kv_manager.cost(head, hit) > room:
            self._stuck = (head, room)
            return None
        return hit

    def _room(self, order: Slots) -> int:
        """Blocks that a newcomer may take beside running requests, counting what those were promised."""
        return self.kv_manager.pool.num_free - self.kv_manager.promised(order) - self.limits.watermark_blocks

    def _grant(self, builder: PlanBuilder, slots: Slots, start: I32, count: I32, new: I32) -> None:
        self.kv_manager.grow(slots, start, new, builder)
        self.kv_manager.batch.scheduled[slots] = start + count
        builder.grant(slots, start, count)

    def _preempt(self, slot: int, builder: PlanBuilder) -> None:
        """Back to the queue with all that is known; what is in flight will be computed again, and come out the same."""
        tokens = self.kv_manager.known_tokens(slot)
        request = self.kv_manager.leave(slot)
        request.tokens = tokens
        self.waiting.push(request)
        builder.num_preempted += 1

    def _record(self, in_flight: InFlightStep, result: StepResult) -> StepRecord:
        """The step's numbers; whoever has a clock fills in the times."""
        pool, builder = self.kv_manager.pool, in_flight.builder
        return StepRecord(
            step=in_flight.plan.step,
            at_s=0.0,
            num_tokens=self.limits.max_num_batched_tokens - builder.budget,
            num_requests=len(in_flight.slots),
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            num_preempted=builder.num_preempted,
            prompt_tokens=builder.prompt_tokens,
            cached_tokens=builder.cached_tokens,
            device_us=result.device_us,
        )


def share(slots: Slots, start: I32, count: I32, budget: int) -> tuple[Slots, I32, I32]:
    """Cuts counts to a token budget and drops rows that get nothing. Rows come best rank first.

    One token each for those that need just one, so that no long prompt stalls a stream; then the others in order.
    counts [5, 1, 5, 1] with budget 8 -> [5, 1, 1, 1]
    """
    single: NDArray[np.bool_] = count == 1
    single &= np.cumsum(single) <= budget
    left = budget - int(np.count_nonzero(single))
    several = np.where(count > 1, count, 0)
    several = np.clip(left - (np.cumsum(several) - several), 0, several)
    count = np.where(single, 1, several).astype(np.int32)
    keep = np.flatnonzero(count)
    return slots[keep], start[keep], count[keep]
