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
from moeserve.engine.columns import Slots
from moeserve.engine.draft import Draft, Flight, joined
from moeserve.engine.groups import KVGroup
from moeserve.engine.plan import I32, StepPlan, StepResult
from moeserve.engine.prefix_cache import Hit
from moeserve.engine.requests import Request, WaitingQueue, request_of
from moeserve.engine.residents import Residents
from moeserve.engine.settling import ended_rows, settle_flight
from moeserve.engine.store import BlockStore, HostStore
from moeserve.errors import InvalidRequest
from moeserve.messages import FinishReason, StepOutput, Submit
from moeserve.metrics import StepRecord

_ANY_TOKEN = 2**31 - 1


class Scheduler:
    """submit and abort at any time; plan and settle in turn, with up to limits.depth plans in between.

    eos_ids are the model's end tokens (an ending by any other stop id is reported as such); vocab_size guards
    against token ids that the model does not have; `store` replaces the host store of limits.store_cells.
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
        if store is None and limits.store_cells and limits.enable_prefix_caching:
            store = HostStore(limits.store_cells)
        self.limits = limits
        self.groups = groups
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = vocab_size
        self.residents = Residents(limits, groups, store)
        self.waiting = WaitingQueue()
        self.num_planned = 0
        self._flights: deque[Flight] = deque()
        self._arrivals = 0
        self._stuck: tuple[Request | None, int] = (None, 0)  # a head that did not fit, and the room it met

    @property
    def num_running(self) -> int:
        return self.residents.columns.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.num_running or self.num_waiting)

    # ---- requests come and go

    def submit(self, msg: Submit) -> None:
        """Takes a request in; raises InvalidRequest when it is malformed or could never fit."""
        if msg.rid in self.waiting or msg.rid in self.residents.columns.slot_of:
            raise InvalidRequest(f"request {msg.rid} is running already", code="duplicate_request")
        request = request_of(msg, self._arrivals, self.limits.max_model_len, self.vocab_size)
        need, have = self.residents.peak_blocks(request.max_total - 1), self.limits.num_blocks - 1
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
            slot = self.residents.columns.slot_of.get(rid)
            if slot is not None:
                self.residents.leave(slot)
            elif rid in self.waiting:
                self.waiting.remove(rid)
            else:
                continue
            ended.append(rid)
        return ended_rows(ended, FinishReason.ABORT) if ended else None

    def abort_all(self) -> StepOutput | None:
        running = list(self.residents.columns.slot_of)
        return self.abort([*running, *(request.rid for request in self.waiting)])

    def reset_prefix_cache(self) -> None:
        """Nothing that comes later reuses what was computed until now."""
        self.residents.cache.reset()

    # ---- one step

    def plan(self) -> StepPlan | None:
        """The next step, or None when all that may run is in flight already."""
        residents, columns = self.residents, self.residents.columns
        draft = Draft(len(self.groups), self.limits.max_num_batched_tokens)
        self._make_way(draft)
        if self._grant_running(draft):
            self._admit(draft)
        stores = residents.take_stores()
        if not draft.slots:
            assert not stores, "blocks were evicted for nothing"
            return None
        slots = joined(draft.slots)
        residents.register(slots)
        samples = columns.scheduled[slots] >= columns.known[slots]
        plan = draft.finish(self.num_planned, slots, samples, stores)
        self.num_planned += 1
        self._flights.append(Flight(plan, slots, columns.generation[slots], draft))
        return plan

    def start_over(self) -> None:
        """Forgets the steps in flight and all that was computed: every running request waits again, with all that is
        known of it, and comes out the same."""
        self._flights.clear()
        nobody = Draft(len(self.groups), 0)
        for slot in self.residents.columns.order.tolist():
            self._preempt(slot, nobody)
        self.reset_prefix_cache()

    def settle(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Takes the result of the oldest plan: appends tokens, ends requests, frees what they held."""
        flight = self._flights.popleft()
        assert flight.plan is plan, (flight.plan.step, plan.step)
        assert result.step == plan.step, (result.step, plan.step)
        output = settle_flight(self.residents, flight, result, self.eos_ids)
        return msgspec.structs.replace(output, record=self._record(flight, result))

    def audit(self) -> None:
        """Raises AssertionError unless every slot, block and cell is accounted for."""
        self.residents.audit()

    # ---- granting

    def _make_way(self, draft: Draft) -> None:
        """Lets the first waiting request take the place of running ones of lower priority, if that is enough."""
        head, columns = self.waiting.head, self.residents.columns
        if head is None or not columns.num_running:
            return
        order = columns.order
        if columns.request(int(order[-1])).priority <= head.priority:
            return
        residents = self.residents
        lacking = residents.cost(head, residents.cache.match(head)) - self._room(order)
        victims: list[int] = []
        for slot in order[::-1].tolist():
            if lacking <= 0 and columns.num_free + len(victims) > 0:
                break
            if columns.request(slot).priority <= head.priority:
                return
            victims.append(slot)
            lacking -= sum(residents.pool.num_exclusive(blocks) for blocks in columns.held(slot))
            lacking -= residents.promised(np.array([slot], np.intp))
        for slot in victims:
            self._preempt(slot, draft)

    def _grant_running(self, draft: Draft) -> bool:
        """Tokens and blocks for running requests, best rank first. False when blocks ran out for some."""
        residents, columns = self.residents, self.residents.columns
        enough = True
        while columns.num_running:
            slots = columns.order
            start = columns.scheduled[slots]
            count = np.maximum(columns.known[slots] - start, 1)
            np.minimum(count, columns.last[slots] - start, out=count)
            np.minimum(count, residents.chunk, out=count)
            if int(count.min()) <= 0 or int(count.sum()) > draft.budget:
                slots, start, count = share(slots, start, count, draft.budget)
            residents.release_passed(slots, start, draft)
            new = columns.num_blocks(start + count) - columns.num_blocks(start)
            if int(new.sum()) * len(self.groups) <= residents.pool.num_free:
                if len(slots):
                    self._grant(draft, slots, start, count, new)
                break
            self._preempt(int(columns.order[-1]), draft)
            enough = False
        return enough

    def _admit(self, draft: Draft) -> None:
        """Waiting requests, best rank first, until one does not fit: nobody overtakes it."""
        residents, columns = self.residents, self.residents.columns
        while draft.budget > 0 and columns.num_free and (head := self.waiting.head) is not None:
            hit = self._fitting(head)
            if hit is None:
                return
            self.waiting.pop()
            if head.num_cached is None:
                head.num_cached = min(hit.num_blocks * self.limits.block_size, head.num_prompt)
                draft.prompt_tokens += head.num_prompt
                draft.cached_tokens += head.num_cached
            slots = np.array([residents.enter(head, hit, draft)], np.intp)
            start = columns.scheduled[slots]
            count = np.minimum(columns.known[slots] - start, min(draft.budget, residents.chunk))
            new = columns.num_blocks(start + count) - columns.num_blocks(start)
            self._grant(draft, slots, start, count, new)
            residents.register(slots)  # at once: the next one in line may begin alike

    def _fitting(self, head: Request) -> Hit | None:
        """The head's cache hit if its whole prompt fits beside the others and the watermark."""
        order = self.residents.columns.order
        if not len(order):
            return self.residents.cache.match(head)
        room = self._room(order)
        if self._stuck[0] is head and room <= self._stuck[1]:
            return None
        hit = self.residents.cache.match(head)
        if self.residents.cost(head, hit) > room:
            self._stuck = (head, room)
            return None
        return hit

    def _room(self, order: Slots) -> int:
        """Blocks that a newcomer may take beside running requests, counting what those were promised."""
        return self.residents.pool.num_free - self.residents.promised(order) - self.limits.watermark_blocks

    def _grant(self, draft: Draft, slots: Slots, start: I32, count: I32, new: I32) -> None:
        self.residents.grow(slots, start, new, draft)
        self.residents.columns.scheduled[slots] = start + count
        draft.grant(slots, start, count)

    def _preempt(self, slot: int, draft: Draft) -> None:
        """Back to the queue with all that is known; what is in flight will be computed again, and come out the same."""
        tokens = self.residents.known_tokens(slot)
        request = self.residents.leave(slot)
        request.tokens = tokens
        self.waiting.push(request)
        draft.num_preempted += 1

    def _record(self, flight: Flight, result: StepResult) -> StepRecord:
        """The step's numbers; whoever has a clock fills in the times."""
        pool, draft = self.residents.pool, flight.draft
        return StepRecord(
            step=flight.plan.step,
            at_s=0.0,
            num_tokens=self.limits.max_num_batched_tokens - draft.budget,
            num_requests=len(flight.slots),
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            num_preempted=draft.num_preempted,
            prompt_tokens=draft.prompt_tokens,
            cached_tokens=draft.cached_tokens,
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
