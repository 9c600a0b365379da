"""The scheduler decides which requests run in each step (continuous batching).

It has no torch, no clock and no I/O: the same calls have the same plans and outputs.

There is no prefill phase and no decode phase, only positions of a request that are not computed
yet. A plan may be made before the results of earlier plans are known (`Limits.depth`). Results
arrive in the order of their plans. Freed blocks are reused at once. That is safe because the runner
executes plans strictly in order: the last read of a block comes before any write by a later plan.

A step has two halves. `Scheduler.plan` adds rows to a PlanBuilder and allocates blocks from the
KVCacheManager, whose `batch` holds the running requests. `Scheduler.update_from_output` applies the
result.

Suffix _R: one entry per row of the step, that is, per scheduled request (engine/plan.py).
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeserve.config import Limits
from moeserve.engine.blocks import KVGroup
from moeserve.engine.connector import KVConnector, When
from moeserve.engine.draft_policy import DraftPolicy
from moeserve.engine.drafts import drafts_among, settle_drafts
from moeserve.engine.kv_cache_manager import NOTHING, Growth, Hit, KVCacheManager
from moeserve.engine.output import NO_TOKEN, append_tokens, endings, take_outputs, take_unsent_hits
from moeserve.engine.plan import I32, GrammarJob, NewRequest, Slots, StepPlan, StepResult
from moeserve.engine.preparing import GrammarSource, Need, PreparingSet
from moeserve.engine.requests import Request, WaitingQueue, fit_to_budget, request_of
from moeserve.engine.step_state import (
    Fetching,
    InFlightStep,
    NoRoom,
    PlanBuilder,
    idle_record,
    step_record,
)
from moeserve.engine.token_budget import TokenBudget
from moeserve.errors import InvalidRequest
from moeserve.messages import FinishReason, StepOutput, StepRecord, Submit

KV_POLL_INTERVAL_S = 0.002  # interval at which a sleeping engine checks on fetches of KV blocks
_UNLIMITED_VOCAB = 2**31 - 1


class Scheduler:
    """Plans steps for requests that may arrive and end at any time.

    A request is `preparing` until its grammar and its fetched KV blocks are ready
    (engine/preparing.py), then `waiting` in the queue, then running in a slot of the batch. Up to
    limits.depth plans may be without a result.

    `batch.scheduled` and `batch.known` are the progress of each request (engine/requests.py).

    eos_ids: the model's end tokens. If another stop id ends a request, it is reported in
    `StepOutput.stop_ids`.
    vocab_size: requests with token ids outside of 0 .. vocab_size - 1 are refused.
    """

    def __init__(
        self,
        limits: Limits,
        groups: tuple[KVGroup, ...],
        *,
        eos_ids: Iterable[int] = (),
        vocab_size: int = _UNLIMITED_VOCAB,
        connector: KVConnector | None = None,
        identity: Mapping[str, bytes] = NOTHING,
    ) -> None:
        assert {group.block_size for group in groups} == {limits.block_size}, groups
        self.limits = limits
        self.groups = groups
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = vocab_size
        self.kv_manager = KVCacheManager(limits, groups, connector, identity)
        self.decoding = self.kv_manager.decoding
        self.waiting = WaitingQueue()
        self.preparing = PreparingSet()
        self.grammars: GrammarSource | None = None  # None: the runner compiles when a step needs it
        self.num_planned = 0
        self.budget: TokenBudget | None = None
        if limits.itl_target_us:
            self.budget = TokenBudget(limits.max_num_batched_tokens, limits.itl_target_us)
        self.policy = DraftPolicy(limits.max_num_seqs, limits.num_drafts, auto=limits.auto_drafts)
        self._speculates = limits.num_drafts > 0
        self._may_have_drafts = False  # whether any running request may have drafts
        self._ran_draft_model = False  # after the last processed step
        self._in_flight: deque[InFlightStep] = deque()
        self._num_arrivals = 0
        self._tickets = itertools.count(1)  # for grammars and fetches: see engine/preparing.py
        self._fetches: dict[int, Fetching] = {}  # by ticket
        self._now_s = 0.0  # the latest time that was passed to a method
        self._no_room: NoRoom | None = None  # last finding of `_hit_if_fits`
        self._no_room_preempting: NoRoom | None = None  # last finding of `_preempt_for_head`

    @property
    def num_running(self) -> int:
        """The number of requests with a slot."""
        return self.kv_manager.batch.num_running

    @property
    def num_waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self.waiting) + len(self.preparing)

    @property
    def has_work(self) -> bool:
        """Whether there is any request."""
        return bool(self.num_running or self.num_waiting)

    @property
    def can_run(self) -> bool:
        """Whether a step can be planned, now or once the steps in flight have their results."""
        return bool(self.num_running or len(self.waiting))

    @property
    def check_at_s(self) -> float:
        """Time at which to plan again even if no message arrives; infinity: never."""
        return self._now_s + KV_POLL_INTERVAL_S if self._fetches else math.inf

    @property
    def awaits_result(self) -> bool:
        """Whether the next plan needs the result of the step in flight.

        With drafts it does, because the result says how many were accepted. So it does with blocks,
        because the result says which have no more masks.
        """
        return (self._may_have_drafts or self.decoding.block > 0) and bool(self._in_flight)

    # ---- requests

    def submit(self, msg: Submit, now_s: float = 0.0) -> None:
        """Queue a request. Raises InvalidRequest if it is malformed or could never fit.

        now_s: monotonic time, on the same clock as that of `plan`.
        """
        self._now_s = max(self._now_s, now_s)
        rid = msg.rid
        if rid in self.waiting or rid in self.preparing or rid in self.kv_manager.batch.slot_of:
            raise InvalidRequest(f"request {rid} exists already", code="duplicate_request")
        request = request_of(msg, self._num_arrivals, self.limits.max_model_len, self.vocab_size)
        self.decoding.check(msg.sampling)
        self.decoding.check_resumption(len(request.tokens), msg.num_prompt)
        num_needed = self.kv_manager.peak_blocks(self.decoding.goal(request.max_total - 1))
        num_usable = self.limits.num_blocks - 1  # all but the null block
        if num_needed > num_usable:
            raise InvalidRequest(
                f"prompt and answer of up to {request.max_total} tokens need {num_needed} KV "
                f"blocks of {self.limits.block_size} tokens, but there are {num_usable}: "
                "lower max_tokens",
                param="max_tokens",
                code="does_not_fit",
            )
        self._num_arrivals += 1
        self._enqueue(request)

    def grammar_prepared(self, ticket: int, error: str = "") -> StepOutput | None:
        """Stop waiting for the grammar of a request; `error`: end the request with this error."""
        request = self.preparing.request_of(ticket)
        if request is None:
            return None
        if error:
            self.preparing.remove(request.rid)
            self._drop_grammars([ticket])
            self._end_fetch(request.kv_ticket)
            return endings([request.rid], FinishReason.ERROR, {request.rid: error})
        self._close_ticket(ticket)
        return None

    def abort(self, rids: Iterable[int]) -> StepOutput | None:
        """End requests at once, and free their slots and blocks. Unknown ids are ignored."""
        ended = []
        for rid in rids:
            slot = self.kv_manager.batch.slot_of.get(rid)
            if slot is not None:
                self._end_request(slot)
            elif rid in self.waiting or rid in self.preparing:
                pending = self.waiting if rid in self.waiting else self.preparing
                request = pending.remove(rid)
                self._drop_grammars([request.grammar_ticket])
                self._end_fetch(request.kv_ticket)
            else:
                continue
            ended.append(rid)
        return endings(ended, FinishReason.ABORT) if ended else None

    def abort_all(self) -> StepOutput | None:
        """End all requests at once."""
        running = list(self.kv_manager.batch.slot_of)
        return self.abort([*running, *(r.rid for r in (*self.waiting, *self.preparing))])

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache: later requests find no block that was computed before."""
        self.kv_manager.reset_prefix_cache()

    # ---- one step

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        """Return the plan of the next step; None if no request can run before a result arrives.

        now_s: monotonic time, for the time limits of requests that wait for a connector.
        """
        self._now_s = max(self._now_s, now_s)
        if self._fetches:
            self._check_fetches()
        batch = self.kv_manager.batch
        if self.awaits_result:
            return None
        builder = PlanBuilder(
            self.budget.tokens(batch) if self.budget else self.limits.max_num_batched_tokens
        )
        self._preempt_for_head(builder)
        if self._schedule_running(builder):
            self._schedule_waiting(builder)
        diffs, stores, loads = self.kv_manager.pop_changes()
        if not builder.rows:
            assert not stores, "blocks were evicted although no row was scheduled"
            return None
        slots, starts, counts = builder.columns
        self.kv_manager.register(slots)
        plan = StepPlan(
            step=self.num_planned,
            slots_R=slots.astype(np.int32),
            starts_R=starts,
            counts_R=counts,
            samples_R=batch.scheduled[slots] >= self.decoding.goal(batch.known[slots]),
            num_drafts_R=drafts_among(batch, slots) if self._may_have_drafts else None,
            propose=self._speculates and (self.policy.propose or not self.limits.draft_model),
            diffs=diffs,
            new_requests=tuple(builder.new_requests),
            stores=stores,
            loads=loads,
        )
        self.num_planned += 1
        self._in_flight.append(InFlightStep(plan, slots, batch.generation[slots], builder))
        return plan

    def start_over(self) -> None:
        """Discard the steps in flight and the whole KV cache, and preempt all running requests.

        Their answers stay the same, because they keep their known tokens.
        """
        # Some of these plans have not reached the runner, which still holds their grammars.
        new_requests = [new for step in self._in_flight for new in step.plan.new_requests]
        self._drop_grammars([request.grammar_ticket for request in new_requests])
        self._in_flight.clear()
        self._preempt_all()

    def audit(self) -> None:
        """Raise AssertionError unless every slot, block and ticket is accounted for."""
        self.kv_manager.audit()
        self.preparing.audit()

    # ---- planning

    def _preempt_for_head(self, builder: PlanBuilder) -> None:
        """Preempt running requests of lower priority than the head of the queue, if it fits then.

        If the head does not fit, its cost is computed again only once more blocks could be freed,
        because a long prompt has thousands of hashes to look up.
        """
        head = self.waiting.head
        batch = self.kv_manager.batch
        if head is None or not batch.num_running:
            return
        order = batch.order
        if batch.request(int(order[-1])).priority <= head.priority:
            return
        kv_manager = self.kv_manager
        lowest_first = order[::-1].tolist()
        candidates = list(
            itertools.takewhile(lambda s: batch.request(s).priority > head.priority, lowest_first)
        )
        gained_blocks = [
            kv_manager.num_exclusive(slot) + kv_manager.num_promised(np.array([slot], np.intp))
            for slot in candidates
        ]
        num_available = self._available_blocks(order)
        max_available = num_available + sum(gained_blocks)
        no_room = self._no_room_preempting
        if no_room and no_room.head is head and max_available <= no_room.num_blocks:
            return
        num_lacking = kv_manager.num_needed(head, kv_manager.match(head)) - num_available
        num_victims = 0
        while num_lacking > 0 or batch.num_free + num_victims == 0:  # no blocks, or no slot
            if num_victims == len(candidates):
                if num_victims < len(order):
                    self._no_room_preempting = NoRoom(head, max_available)
                    return
                break  # no other request is left, and any request fits alone (see `submit`)
            num_lacking -= gained_blocks[num_victims]
            num_victims += 1
        for slot in candidates[:num_victims]:
            self._preempt(slot)
        builder.num_preempted += num_victims

    def _schedule_running(self, builder: PlanBuilder) -> bool:
        """Schedule running requests in priority order. Return False if blocks ran out, so that some
        were preempted.
        """
        kv_manager = self.kv_manager
        batch = self.kv_manager.batch
        enough_blocks = True
        while batch.num_running:
            slots = batch.order
            start = batch.scheduled[slots]
            # At least 1: the position of a token that is still in flight.
            count = np.maximum(self.decoding.goal(batch.known[slots]) - start, 1)
            if self._may_have_drafts:
                count += batch.num_drafts[slots]
            np.minimum(count, batch.max_scheduled[slots] - start, out=count)
            np.minimum(count, kv_manager.chunk, out=count)
            if self._may_have_drafts and not self._all_fit(start, count, builder.budget):
                self._may_have_drafts = False
                batch.num_drafts[:] = 0  # a draft must not cost a preemption: plan without drafts
                continue
            if int(count.min()) <= 0 or int(count.sum()) > builder.budget:
                slots, start, count = fit_to_budget(
                    slots, start, count, builder.budget, self.decoding
                )
            kv_manager.release_passed(slots, start, count)
            growth = kv_manager.growth(start, start + count)
            if kv_manager.num_new_blocks(growth) <= kv_manager.pool.num_free:
                if len(slots):
                    self._schedule(builder, slots, start, count, growth)
                break
            self._preempt(int(batch.order[-1]))
            builder.num_preempted += 1
            enough_blocks = False
        return enough_blocks

    def _all_fit(self, start: I32, count: I32, budget: int) -> bool:
        """Whether all rows with their drafts fit into the budget and the free blocks."""
        kv_manager = self.kv_manager
        num_needed = kv_manager.num_new_blocks(kv_manager.growth(start, start + count))
        return int(count.sum()) <= budget and num_needed <= kv_manager.pool.num_free

    def _schedule_waiting(self, builder: PlanBuilder) -> None:
        """Admit waiting requests in order, up to the first one that does not fit."""
        kv_manager = self.kv_manager
        batch = self.kv_manager.batch
        while builder.budget > 0 and batch.num_free and (head := self.waiting.head) is not None:
            hit = self._hit_if_fits(head)
            if hit is None:
                return
            self.waiting.pop()
            if head.num_cached is None:
                head.num_cached = min(hit.num_blocks * self.limits.block_size, head.num_prompt)
                builder.started.append(head.rid)
                builder.prompt_tokens += head.num_prompt
                builder.cached_tokens += head.num_cached
            slot = kv_manager.admit(head, hit)
            self._end_fetch(head.kv_ticket)
            slots = np.array([slot], np.intp)
            if self._speculates:
                self.policy.admit(slots)
            builder.new_requests.append(
                NewRequest(
                    slot=slot,
                    tokens=head.tokens,
                    num_prompt=head.num_prompt,
                    sampling=head.sampling,
                    grammar_ticket=head.grammar_ticket,
                    task=head.task,
                )
            )
            start = batch.scheduled[slots]
            count = self.decoding.goal(batch.known[slots]) - start
            np.minimum(count, min(builder.budget, kv_manager.chunk), out=count)
            self._schedule(builder, slots, start, count, kv_manager.growth(start, start + count))
            kv_manager.register(slots)  # now, because the next request may have the same prefix

    def _hit_if_fits(self, head: Request) -> Hit | None:
        """Return the head's prefix-cache hit; None if its prompt does not fit beside the running
        requests and the watermark.
        """
        order = self.kv_manager.batch.order
        if not len(order):
            return self.kv_manager.match(head)
        num_available = self._available_blocks(order)
        no_room = self._no_room
        if no_room and no_room.head is head and num_available <= no_room.num_blocks:
            return None
        hit = self.kv_manager.match(head)
        if self.kv_manager.num_needed(head, hit) > num_available:
            self._no_room = NoRoom(head, num_available)
            return None
        return hit

    def _available_blocks(self, order: Slots) -> int:
        """Return how many free blocks a new request may use, beside running ones and watermark."""
        return (
            self.kv_manager.pool.num_free
            - self.kv_manager.num_promised(order)
            - self.limits.watermark_blocks
        )

    def _schedule(
        self, builder: PlanBuilder, slots: Slots, start: I32, count: I32, growth: Growth
    ) -> None:
        self.kv_manager.grow(slots, start, growth)
        self.kv_manager.batch.scheduled[slots] = start + count
        builder.rows.append((slots, start, count))
        num_tokens = int(count.sum())
        builder.num_tokens += num_tokens
        builder.budget -= num_tokens

    def _preempt(self, slot: int) -> None:
        """Put a request back into the queue with its known tokens. Tokens in flight are dropped.
        Later steps sample them again, with the same result.
        """
        batch = self.kv_manager.batch
        tokens = batch.tokens[slot, : batch.known[slot]].copy()
        request = self.kv_manager.free(slot)
        request.tokens = tokens
        self._enqueue(request)

    def _preempt_all(self) -> int:
        """Preempt all running requests and discard the KV cache. Return the number of requests."""
        slots = self.kv_manager.batch.order.tolist()
        for slot in slots:
            self._preempt(slot)
        self.kv_manager.discard_cache()
        return len(slots)

    # ---- waiting for grammars and KV blocks

    def _enqueue(self, request: Request) -> None:
        """Queue a request, or let it await its grammar and KV blocks first."""
        self._await_grammar(request)
        self._await_kv(request)
        if request.rid not in self.preparing:
            self.waiting.push(request)

    def _await_grammar(self, request: Request) -> None:
        grammar = request.sampling.grammar
        if grammar is None or self.grammars is None:
            return
        request.grammar_ticket = next(self._tickets)
        self.preparing.add(request, request.grammar_ticket, Need.GRAMMAR)
        answer = request.tokens[request.num_prompt :].tolist()
        self.grammars.begin(
            GrammarJob(request.grammar_ticket, grammar, answer, priority=request.priority)
        )

    def _await_kv(self, request: Request) -> None:
        connector = self.kv_manager.connector
        if connector is None or not connector.may_wait:
            return
        fetch = self.kv_manager.fetchable(request)
        if fetch.when is When.NOW:
            return
        ticket = next(self._tickets)
        request.kv_ticket = ticket
        self.preparing.add(request, ticket, Need.KV)
        is_begun = fetch.when is When.LATER  # for ASK_AGAIN, `_check_fetches` will ask again
        self._fetches[ticket] = Fetching(request, self._now_s + connector.wait_s, is_begun)
        if is_begun:
            connector.begin(ticket, fetch.keys)

    def _check_fetches(self) -> None:
        """Queue the requests whose blocks have arrived, or whose time limit has passed."""
        connector = self.kv_manager.connector
        assert connector is not None
        for ticket in connector.finished():
            fetching = self._fetches.get(ticket)
            if fetching is not None and fetching.request.rid in self.preparing:
                fetching.deadline_s = self._now_s + connector.lease_s  # now the end of the lease
                self._close_ticket(ticket)
        for ticket, fetching in list(self._fetches.items()):
            if not fetching.is_begun:
                fetch = self.kv_manager.fetchable(fetching.request)
                if fetch.when is When.LATER:
                    fetching.is_begun = True
                    connector.begin(ticket, fetch.keys)
                elif fetch.when is When.NOW:
                    self._end_fetch(ticket)
                    continue
            if self._now_s >= fetching.deadline_s:
                self._end_fetch(ticket)

    def _end_fetch(self, ticket: int) -> None:
        """End a fetch and the lease of its blocks. Its request no longer awaits them."""
        fetching = self._fetches.pop(ticket, None)
        if fetching is None:
            return
        assert self.kv_manager.connector is not None
        fetching.request.kv_ticket = 0
        if fetching.is_begun:
            self.kv_manager.connector.end(ticket)
        self._close_ticket(ticket)

    def _close_ticket(self, ticket: int) -> None:
        """Close a ticket. Queue its request if no other ticket of it is open."""
        request = self.preparing.close(ticket)
        if request is not None:
            self.waiting.push(request)

    def _drop_grammars(self, tickets: Sequence[int]) -> None:
        used = [ticket for ticket in tickets if ticket]
        if used and self.grammars is not None:
            self.grammars.drop(used)

    # ---- the result of a plan

    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Apply the result of the oldest plan: append tokens, and end complete or failed requests.

        Rows are ignored if their request has left the slot since the plan was made. If it was
        preempted, it will sample the token again; if it was aborted, its end was reported already.
        """
        in_flight = self._in_flight.popleft()
        assert in_flight.plan is plan, (in_flight.plan.step, plan.step)
        assert result.step == plan.step, (result.step, plan.step)
        batch = self.kv_manager.batch
        if result.kv_lost:
            # The blocks that were loaded may be wrong, and so may everything computed from them.
            for slot in batch.order.tolist():
                batch.request(slot).uses_connector = False
            in_flight.builder.num_preempted += self._preempt_all()
        errors = self._fail(in_flight, result.failed) if result.failed else {}
        live_R = batch.generation[in_flight.slots] == in_flight.generation
        slots, tokens, finish, stop_ids = append_tokens(
            batch, plan, in_flight.slots, live_R, result, self.eos_ids
        )
        cached = take_unsent_hits(batch, slots)
        logprobs, prompt_logprobs, digests = take_outputs(batch, in_flight.slots, live_R, result)
        if self.budget:
            self.budget.note(plan, result.took_us)
        drafts = self._settle_drafts(in_flight, live_R, result) if self._speculates else {}
        if self.decoding.block:
            self.kv_manager.unschedule_blocks(in_flight.slots[live_R & plan.samples_R])
        rids = batch.rid[slots]
        kv_params: dict[int, dict[str, Any]] = {}
        for row in np.flatnonzero(finish).tolist():
            request, params = self._end_request(int(slots[row]))
            if params:
                kv_params[request.rid] = params
        if errors:
            rids = np.concatenate((rids, np.array(list(errors), np.int64)))
            tokens = np.concatenate((tokens, np.full(len(errors), NO_TOKEN, np.int32)))
            finish = np.concatenate((finish, np.full(len(errors), FinishReason.ERROR, np.uint8)))
        return StepOutput(
            rids=rids.astype("<i8", copy=False).tobytes(),
            tokens=tokens.astype("<i4", copy=False).tobytes(),
            finish=finish.tobytes(),
            started=in_flight.builder.started,
            cached=cached,
            stop_ids=stop_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            digests=digests,
            drafts=drafts,
            errors=errors,
            kv_params=kv_params,
            record=step_record(self.gauges(result.step), in_flight, result),
        )

    def _end_request(self, slot: int) -> tuple[Request, dict[str, Any] | None]:
        """End the request in a slot. Return it, and the connector's `kv_params` for it."""
        request = self.kv_manager.free(slot)
        connector = self.kv_manager.connector
        if connector is None:
            return request, None
        return request, connector.request_finished(request.rid, request.hashes)

    def _settle_drafts(
        self, in_flight: InFlightStep, live_R: NDArray[np.bool_], result: StepResult
    ) -> dict[int, tuple[int, int]]:
        """Process drafts, and set those of the next step. Return (verified, accepted) by id."""
        plan = in_flight.plan
        verified = settle_drafts(self.kv_manager, self.policy, in_flight, live_R, result)
        batch = self.kv_manager.batch
        self._may_have_drafts = bool(batch.num_drafts[batch.order].any())
        self.policy.note(
            num_tokens=plan.num_tokens,
            num_rows=len(plan.slots_R),
            num_drafts=0 if plan.num_drafts_R is None else int(plan.num_drafts_R.sum()),
            took_us=result.took_us,
            ran_draft_model=self._ran_draft_model,
        )
        self._ran_draft_model = plan.propose and self.limits.draft_model
        return verified

    def _fail(self, in_flight: InFlightStep, failed: dict[int, str]) -> dict[int, str]:
        """End the requests whose sampling failed. Return their error messages by request id."""
        batch = self.kv_manager.batch
        planned = dict(zip(in_flight.slots.tolist(), in_flight.generation.tolist(), strict=True))
        live_slots = [slot for slot in failed if batch.generation[slot] == planned[slot]]
        return {self._end_request(slot)[0].rid: failed[slot] for slot in live_slots}

    def gauges(self, step: int) -> StepRecord:
        """Return a step record with running and waiting requests, free blocks, and no work."""
        return idle_record(self.kv_manager, self.num_waiting, step)
