"""Decides what runs next. Pure: no torch, no clock, no I/O; requests, results and times in, plans
and outputs out.

There is no prefill phase and no decode phase, only positions of a request that are not computed
yet. A plan may be made before the results of earlier ones are known (`Limits.depth`); results come
in the order of their plans. Nothing here waits for the device, and blocks are reused at once: the
runner executes plans strictly in order, so a block that one plan gives up is read for the last time
before any later plan writes it.

One step: `Scheduler.plan` grants rows in a PlanBuilder and takes blocks from the KVCacheManager
(kv_cache_manager.py), whose rows are the InputBatch (requests.py); `Scheduler.update_from_output`
applies the step's result.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeserve.config import Limits
from moeserve.engine.awaiting import AwaitingSet, GrammarSource, Need
from moeserve.engine.blocks import KVGroup
from moeserve.engine.connector import KVConnector, When
from moeserve.engine.draft_policy import DraftPolicy
from moeserve.engine.drafts import settle_drafts
from moeserve.engine.kv_cache_manager import NOTHING, Growth, Hit, KVCacheManager, concatenate
from moeserve.engine.output import NO_TOKEN, append_tokens, endings, outputs_of, unsent_hits
from moeserve.engine.plan import I32, GrammarJob, NewRequest, Slots, StepPlan, StepResult
from moeserve.engine.requests import Request, WaitingQueue, request_of, share
from moeserve.engine.step_state import Fetching, InFlightStep, PlanBuilder, idle_record, step_record
from moeserve.engine.token_budget import TokenBudget
from moeserve.errors import InvalidRequest
from moeserve.messages import FinishReason, StepOutput, StepRecord, Submit

KV_POLL_S = 0.002  # interval at which an engine that sleeps looks at fetches of KV blocks
_ANY_TOKEN = 2**31 - 1


class Scheduler:
    """Plans steps for requests that may come and go at any time.

    `plan` and `update_from_output` alternate, with up to limits.depth plans in between. eos_ids:
    the model's end tokens (an ending by any other stop id is reported as such). vocab_size: guards
    against token ids that the model does not have.

    A request is in one of three places: `awaiting` something (engine/awaiting.py), in the `waiting`
    queue, or running in a slot of the batch.
    """

    def __init__(
        self,
        limits: Limits,
        groups: tuple[KVGroup, ...],
        *,
        eos_ids: Iterable[int] = (),
        vocab_size: int = _ANY_TOKEN,
        connector: KVConnector | None = None,
        identity: Mapping[str, bytes] = NOTHING,
    ) -> None:
        assert {group.block_size for group in groups} == {limits.block_size}, groups
        self.limits = limits
        self.groups = groups
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = vocab_size
        self.kv_manager = KVCacheManager(limits, groups, connector, identity)
        self.waiting = WaitingQueue()
        self.awaiting = AwaitingSet()
        self.grammars: GrammarSource | None = None  # None: the runner compiles when a step needs it
        self.num_planned = 0
        self.budget = (
            TokenBudget(limits.max_num_batched_tokens, limits.itl_target_us)
            if limits.itl_target_us
            else None
        )
        self.policy = DraftPolicy(limits.max_num_seqs, limits.num_drafts, auto=limits.auto_drafts)
        self._speculates = limits.num_drafts > 0
        self._drafting = False  # whether any row may have drafts
        self._proposed = False  # whether a model guessed behind the last settled step
        self._in_flight: deque[InFlightStep] = deque()
        self._arrivals = 0
        self._num_tickets = 0
        self._fetches: dict[int, Fetching] = {}  # by ticket
        self._now_s = 0.0  # the newest time that a call gave
        # Heads that did not fit, and the room that there was: `_stuck` even by preemption.
        self._blocked: tuple[Request | None, int] = (None, 0)
        self._stuck: tuple[Request | None, int] = (None, 0)

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return self.kv_manager.batch.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that have none: in the queue, or awaiting something."""
        return len(self.waiting) + len(self.awaiting)

    @property
    def has_work(self) -> bool:
        """Whether there is any request."""
        return bool(self.num_running or self.num_waiting)

    @property
    def can_run(self) -> bool:
        """Whether a step can be planned, now or when those in flight have their results."""
        return bool(self.num_running or len(self.waiting))

    @property
    def check_s(self) -> float:
        """Time at which to plan again even if no message comes; infinity for never."""
        return self._now_s + KV_POLL_S if self._fetches else math.inf

    @property
    def awaits_result(self) -> bool:
        """Whether the next plan needs the result of the step in flight: some row has drafts, whose
        number and whose successor only that step tells."""
        return self._drafting and bool(self._in_flight)

    # ---- requests

    def submit(self, msg: Submit, now_s: float = 0.0) -> None:
        """Queues a request. Raises InvalidRequest if it is malformed or could never fit.

        now_s: monotonic time, like that of `plan`.
        """
        self._now_s = max(self._now_s, now_s)
        rid = msg.rid
        if rid in self.waiting or rid in self.awaiting or rid in self.kv_manager.batch.slot_of:
            raise InvalidRequest(f"request {rid} is running already", code="duplicate_request")
        request = request_of(msg, self._arrivals, self.limits.max_model_len, self.vocab_size)
        need = self.kv_manager.peak_blocks(request.max_total - 1)
        have = self.limits.num_blocks - 1
        if need > have:
            raise InvalidRequest(
                f"prompt and answer of up to {request.max_total} tokens need {need} KV blocks of "
                f"{self.limits.block_size} tokens and there are {have}: lower max_tokens",
                param="max_tokens",
                code="does_not_fit",
            )
        self._arrivals += 1
        self._enqueue(request)

    def grammar_prepared(self, ticket: int, error: str = "") -> StepOutput | None:
        """Admit a request from now on, or end it if its grammar cannot be used (`error`)."""
        request = self.awaiting.request_of(ticket)
        if request is None:
            return None
        if error:
            self.awaiting.remove(request.rid)
            self._drop_grammars([ticket])
            self._end_fetch(request.kv_ticket)
            return endings([request.rid], FinishReason.ERROR, {request.rid: error})
        self._admit_if_ready(ticket)
        return None

    def abort(self, rids: Iterable[int]) -> StepOutput | None:
        """Ends these requests at once: slot and blocks are free when this returns. Unknown ids are
        ignored.
        """
        ended = []
        for rid in rids:
            slot = self.kv_manager.batch.slot_of.get(rid)
            if slot is not None:
                self._free(slot)
            elif rid in self.waiting or rid in self.awaiting:
                pending = self.waiting if rid in self.waiting else self.awaiting
                request = pending.remove(rid)
                self._drop_grammars([request.grammar_ticket])
                self._end_fetch(request.kv_ticket)
            else:
                continue
            ended.append(rid)
        return endings(ended, FinishReason.ABORT) if ended else None

    def abort_all(self) -> StepOutput | None:
        """Ends every request at once."""
        running = list(self.kv_manager.batch.slot_of)
        return self.abort([*running, *(r.rid for r in (*self.waiting, *self.awaiting))])

    def reset_prefix_cache(self) -> None:
        """Makes later requests compute their whole prompts: they find nothing that was computed
        until now.
        """
        self.kv_manager.reset_prefix_cache()

    # ---- one step

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        """Returns the next step, or None if everything that may run is in flight already.

        now_s: monotonic time. It matters only to requests that wait for a connector.
        """
        self._now_s = max(self._now_s, now_s)
        if self._fetches:
            self._look_at_fetches()
        kv_manager = self.kv_manager
        batch = self.kv_manager.batch
        if self.awaits_result:
            return None
        builder = PlanBuilder(
            self.budget.tokens(batch) if self.budget else self.limits.max_num_batched_tokens
        )
        self._preempt_for_head(builder)
        if self._schedule_running(builder):
            self._schedule_waiting(builder)
        diffs, stores, loads = kv_manager.take_changes()
        if not builder.rows:
            assert not stores, "blocks were evicted for nothing"
            return None
        slots, starts, counts = concatenate(builder.rows)
        kv_manager.register(slots)
        plan = StepPlan(
            step=self.num_planned,
            slots_R=slots.astype(np.int32),
            starts_R=starts,
            counts_R=counts,
            samples_R=batch.scheduled[slots] >= batch.known[slots],
            num_drafts_R=self._drafts_of(slots) if self._drafting else None,
            propose=self._speculates and (self.policy.propose or not self.limits.draft_model),
            diffs=diffs,
            new_requests=tuple(builder.new_requests),
            stores=stores,
            loads=loads,
        )
        self.num_planned += 1
        self._in_flight.append(InFlightStep(plan, slots, batch.occupancy[slots], builder))
        return plan

    def start_over(self) -> None:
        """Discards the steps in flight and all computed K/V. Running requests wait again with their
        known tokens, and end with the same answers."""
        # Some of these plans never reached the runner, so it keeps the grammars of their requests.
        new = [request for step in self._in_flight for request in step.plan.new_requests]
        self._drop_grammars([request.grammar_ticket for request in new])
        self._in_flight.clear()
        self._preempt_all()

    def audit(self) -> None:
        """Raises AssertionError unless every slot, block and ticket is accounted for."""
        self.kv_manager.audit()
        self.awaiting.audit()

    # ---- the parts of a plan

    def _preempt_for_head(self, builder: PlanBuilder) -> None:
        """Preempt running requests of lower priority than the first waiting one, if that makes it
        fit.

        Its cost is computed once until more room can be made: a long prompt has thousands of hashes
        to look up.
        """
        head = self.waiting.head
        batch = self.kv_manager.batch
        if head is None or not batch.num_running:
            return
        order = batch.order
        if batch.request(int(order[-1])).priority <= head.priority:
            return
        kv_manager = self.kv_manager
        lower = list(
            takewhile(lambda s: batch.request(s).priority > head.priority, order[::-1].tolist())
        )
        gains = [
            kv_manager.num_exclusive(slot) + kv_manager.promised(np.array([slot], np.intp))
            for slot in lower
        ]
        room = self._room(order)
        most = room + sum(gains)
        if self._stuck[0] is head and most <= self._stuck[1]:
            return
        lacking = kv_manager.cost(head, kv_manager.match(head)) - room
        num_victims = 0
        while lacking > 0 or batch.num_free + num_victims == 0:
            if num_victims == len(lower):
                if num_victims < len(order):
                    self._stuck = (head, most)
                    return
                break  # alone it fits
            lacking -= gains[num_victims]
            num_victims += 1
        for slot in lower[:num_victims]:
            self._preempt(slot)
        builder.num_preempted += num_victims

    def _schedule_running(self, builder: PlanBuilder) -> bool:
        """Grants tokens and blocks to running requests, first in line first. Returns False if
        blocks ran out.
        """
        kv_manager = self.kv_manager
        batch = self.kv_manager.batch
        enough = True
        while batch.num_running:
            slots = batch.order
            start = batch.scheduled[slots]
            count = np.maximum(batch.known[slots] - start, 1)
            if self._drafting:
                count += batch.drafts[slots]
            np.minimum(count, batch.last[slots] - start, out=count)
            np.minimum(count, kv_manager.chunk, out=count)
            if self._drafting and not self._fits(start, count, builder.budget):
                self._drafting = False
                batch.drafts[:] = 0
                continue
            if int(count.min()) <= 0 or int(count.sum()) > builder.budget:
                slots, start, count = share(slots, start, count, builder.budget)
            kv_manager.release_passed(slots, start, count)
            new = kv_manager.growth(start, start + count)
            if kv_manager.num_taken(new) <= kv_manager.pool.num_free:
                if len(slots):
                    self._grant(builder, slots, start, count, new)
                break
            self._preempt(int(batch.order[-1]))
            builder.num_preempted += 1
            enough = False
        return enough

    def _fits(self, start: I32, count: I32, budget: int) -> bool:
        """Whether all rows with their drafts fit into the budget and the free blocks."""
        kv_manager = self.kv_manager
        taken = kv_manager.num_taken(kv_manager.growth(start, start + count))
        return int(count.sum()) <= budget and taken <= kv_manager.pool.num_free

    def _drafts_of(self, slots: Slots) -> I32:
        """Returns how many of the tokens that were granted to each row are drafts."""
        batch = self.kv_manager.batch
        drafts: I32 = np.where(
            batch.drafts[slots] > 0, batch.scheduled[slots] - batch.known[slots], 0
        )
        return drafts

    def _schedule_waiting(self, builder: PlanBuilder) -> None:
        """Admits waiting requests, first in line first, until one does not fit: nobody overtakes
        it.
        """
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
            if self._speculates:
                self.policy.admit(np.array([slot], np.intp))
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
            slots = np.array([slot], np.intp)
            start = batch.scheduled[slots]
            count = np.minimum(batch.known[slots] - start, min(builder.budget, kv_manager.chunk))
            new = kv_manager.growth(start, start + count)
            self._grant(builder, slots, start, count, new)
            kv_manager.register(slots)  # at once: the next one in line may begin alike

    def _hit_if_fits(self, head: Request) -> Hit | None:
        """Returns the head's cache hit if its whole prompt fits beside the running requests and the
        watermark.
        """
        order = self.kv_manager.batch.order
        if not len(order):
            return self.kv_manager.match(head)
        room = self._room(order)
        if self._blocked[0] is head and room <= self._blocked[1]:
            return None
        hit = self.kv_manager.match(head)
        if self.kv_manager.cost(head, hit) > room:
            self._blocked = (head, room)
            return None
        return hit

    def _room(self, order: Slots) -> int:
        """Returns the blocks that a new request may take, after those that running requests were
        promised.
        """
        return (
            self.kv_manager.pool.num_free
            - self.kv_manager.promised(order)
            - self.limits.watermark_blocks
        )

    def _grant(
        self, builder: PlanBuilder, slots: Slots, start: I32, count: I32, new: Growth
    ) -> None:
        self.kv_manager.grow(slots, start, new)
        self.kv_manager.batch.scheduled[slots] = start + count
        builder.rows.append((slots, start, count))
        num_tokens = int(count.sum())
        builder.num_tokens += num_tokens
        builder.budget -= num_tokens

    def _preempt(self, slot: int) -> None:
        """Puts a request back into the queue with its known tokens. Later ones are computed again,
        equal to before.
        """
        batch = self.kv_manager.batch
        tokens = batch.tokens[slot, : batch.known[slot]].copy()
        request = self.kv_manager.free(slot)
        request.tokens = tokens
        self._enqueue(request)

    def _preempt_all(self) -> int:
        """Preempt every running request and forget all computed K/V. Return their number."""
        slots = self.kv_manager.batch.order.tolist()
        for slot in slots:
            self._preempt(slot)
        self.kv_manager.discard_cache()
        return len(slots)

    # ---- what requests wait for

    def _enqueue(self, request: Request) -> None:
        """Put a request in line, or let it wait for its grammar and for KV blocks."""
        self._await_grammar(request)
        self._await_kv(request)
        if request.rid not in self.awaiting:
            self.waiting.push(request)

    def _await_grammar(self, request: Request) -> None:
        grammar = request.sampling.grammar
        if grammar is None or self.grammars is None:
            return
        request.grammar_ticket = self._next_ticket()
        self.awaiting.add(request, request.grammar_ticket, Need.GRAMMAR)
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
        ticket = request.kv_ticket = self._next_ticket()
        self.awaiting.add(request, ticket, Need.KV)
        begins = fetch.when is When.LATER
        self._fetches[ticket] = Fetching(request, self._now_s + connector.wait_s, begins)
        if begins:
            connector.begin(ticket, fetch.keys)

    def _look_at_fetches(self) -> None:
        """Admit the requests whose blocks have arrived, and those that have waited long enough."""
        connector = self.kv_manager.connector
        assert connector is not None
        for ticket in connector.finished():
            fetching = self._fetches.get(ticket)
            if fetching is not None and fetching.request.rid in self.awaiting:
                fetching.deadline_s = self._now_s + connector.lease_s
                self._admit_if_ready(ticket)
        for ticket, fetching in list(self._fetches.items()):
            if not fetching.begun:
                fetch = self.kv_manager.fetchable(fetching.request)
                if fetch.when is When.LATER:
                    fetching.begun = True
                    connector.begin(ticket, fetch.keys)
                elif fetch.when is When.NOW:
                    self._end_fetch(ticket)
                    continue
            if self._now_s >= fetching.deadline_s:
                self._end_fetch(ticket)

    def _end_fetch(self, ticket: int) -> None:
        """End the lease of a fetch. Its request, if it still waits, waits for it no longer."""
        fetching = self._fetches.pop(ticket, None)
        if fetching is None:
            return
        assert self.kv_manager.connector is not None
        fetching.request.kv_ticket = 0
        if fetching.begun:
            self.kv_manager.connector.end(ticket)
        self._admit_if_ready(ticket)

    def _admit_if_ready(self, ticket: int) -> None:
        """Close a ticket, and put its request in line if it was the last one."""
        request = self.awaiting.close(ticket)
        if request is not None:
            self.waiting.push(request)

    def _drop_grammars(self, tickets: Sequence[int]) -> None:
        used = [ticket for ticket in tickets if ticket]
        if used and self.grammars is not None:
            self.grammars.drop(used)

    def _next_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    # ---- the result of a plan

    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Applies the result of the oldest plan: appends tokens, ends requests that are complete or
        failed, frees what they held, and reports all of it.

        Rows are ignored if their request left the slot since the plan was made: a preempted request
        computes that token again, and an ended or aborted one has had its ending.
        """
        in_flight = self._in_flight.popleft()
        assert in_flight.plan is plan, (in_flight.plan.step, plan.step)
        assert result.step == plan.step, (result.step, plan.step)
        batch = self.kv_manager.batch
        if result.kv_lost:
            # What was loaded, and all that was computed from it, may be wrong.
            for slot in batch.order.tolist():
                batch.request(slot).uses_connector = False
            in_flight.builder.num_preempted += self._preempt_all()
        errors = self._fail(in_flight, result.failed) if result.failed else {}
        live = batch.occupancy[in_flight.slots] == in_flight.occupancy
        slots, tokens, finish, stop_ids = append_tokens(
            batch, plan, in_flight.slots, live, result, self.eos_ids
        )
        cached = unsent_hits(batch, slots)
        logprobs, prompt_logprobs, digests = outputs_of(batch, in_flight.slots, live, result)
        if self.budget:
            self.budget.note(plan, result.took_us)
        drafts = self._settle_drafts(in_flight, live, result) if self._speculates else {}
        rids = batch.rid[slots]
        kv_params: dict[int, dict[str, Any]] = {}
        for row in np.flatnonzero(finish).tolist():
            request, params = self._free(int(slots[row]))
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

    def _free(self, slot: int) -> tuple[Request, dict[str, Any] | None]:
        """End the request in a slot. Return it, with the connector's words about it."""
        request = self.kv_manager.free(slot)
        connector = self.kv_manager.connector
        if connector is None:
            return request, None
        return request, connector.request_finished(request.rid, request.hashes)

    def _settle_drafts(
        self, in_flight: InFlightStep, live_R: NDArray[np.bool_], result: StepResult
    ) -> dict[int, tuple[int, int]]:
        """Return verified and accepted drafts by request id; note the drafts of the next step."""
        plan = in_flight.plan
        verified = settle_drafts(self.kv_manager, self.policy, in_flight, live_R, result)
        batch = self.kv_manager.batch
        self._drafting = bool(batch.drafts[batch.order].any())
        total = 0 if plan.num_drafts_R is None else int(plan.num_drafts_R.sum())
        self.policy.note(plan.num_tokens, len(plan.slots_R), total, result.took_us, self._proposed)
        self._proposed = plan.propose and self.limits.draft_model
        return verified

    def _fail(self, in_flight: InFlightStep, failed: dict[int, str]) -> dict[int, str]:
        """Ends the requests that could not be sampled; returns their ids and messages."""
        planned = dict(zip(in_flight.slots.tolist(), in_flight.occupancy.tolist(), strict=True))
        live = [slot for slot in failed if self.kv_manager.batch.occupancy[slot] == planned[slot]]
        return {self._free(slot)[0].rid: failed[slot] for slot in live}

    def gauges(self, step: int) -> StepRecord:
        """Return the record of a step without work: running and waiting requests, free blocks."""
        return idle_record(self.kv_manager, self.num_waiting, step)
