"""The engine core: the actor that connects the scheduler, the model runner and the front end.

It handles messages, plans the next step while the current one runs, and emits outputs.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from moeserve import messages
from moeserve.actor.actor import Actor, Inbox
from moeserve.engine.plan import GrammarJob, Runner, StepDecision, StepHandle, StepPlan, StepResult
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import RequestError

AUDIT_INTERVAL_S = 10.0  # an audit costs too much to run after each of many short requests
EXPERT_LOAD_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step that the runner has started."""

    plan: StepPlan
    handle: StepHandle
    began_at_s: float  # when planning began, on the core's clock
    plan_us: int  # time spent in the scheduler
    # What the engines of the group decided. A lone engine has a decision only for a traced step.
    decision: StepDecision | None = None
    vote_us: int = 0  # time until the group had decided


class EngineCore(Actor[messages.EngineIn]):
    """The actor of an engine that serves alone.

    It runs a scheduler's plans on a runner until it is drained. `GroupCore` extends it to engines
    that step together.

    Every request ends with a message through `emit`: a row of a `StepOutput`, a `Refused`, or the
    final `Stopped`. `Stopped` is always the last message and carries the cause. The caller closes
    the runner.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox[messages.EngineIn],
        emit: Callable[[messages.EngineOut], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("engine", inbox)
        self.scheduler = scheduler
        self.runner = runner
        self.emit = emit
        self.num_finished_steps = 0
        self._depth = scheduler.limits.depth  # the most steps in flight
        self._clock = clock
        self._in_flight: deque[Step] = deque()
        self._draining = False
        self._drain_deadline_s = math.inf
        self._audited_at_s = -math.inf
        self._trace_next = False
        self._dp_rank = 0
        self._expert_load_report = ExpertLoadReport(emit)
        scheduler.grammars = GrammarJobs(runner, self._grammar_prepared)

    @property
    def busy(self) -> bool:
        """Whether a step is in flight or can be planned.

        An engine whose requests all await a grammar or KV blocks is not busy. It sleeps until
        `GrammarJobs` or the timer of `_wake_at_s` wakes it.
        """
        return bool(self._in_flight) or self.scheduler.can_run

    @property
    def over(self) -> bool:
        """Whether the core was stopped, or is drained."""
        return self._stopping or (self._drained and not self._in_flight)

    @property
    def _drained(self) -> bool:
        return self._draining and not self.scheduler.has_work

    @property
    def _wake_at_s(self) -> float:
        """Time at which a sleeping engine must wake, even if no message arrives.

        It then plans again, or aborts all requests because the deadline of a drain has passed.
        """
        if not self.scheduler.has_work:
            return math.inf
        return min(self.scheduler.check_at_s, self._drain_deadline_s)

    async def run(self) -> None:
        """Serve until `over`.

        An error of the runner or the scheduler ends the actor, and `Stopped` carries the error.
        """
        try:
            await super().run()
        except BaseException as error:
            self.emit(messages.Stopped(f"{type(error).__name__}: {error}"))
            raise
        self.emit(messages.Stopped(""))

    async def on_stop(self) -> None:
        self._expert_load_report.flush()

    async def turn(self) -> None:
        """Handle the messages in the inbox. Then start a step, or wait for the oldest step."""
        if self.busy:
            msgs = await self.inbox.drain(wait=False)
        else:
            msgs = await self._sleep_for_messages()
        for msg in msgs:
            self.handle(msg)
        self._abort_when_late()
        if len(self._in_flight) < self._depth and (step := self._start()) is not None:
            self._in_flight.append(step)
        elif self._in_flight:
            step = self._in_flight.popleft()
            # Sleep once per step, so that the connections send and receive even if the result is
            # ready already. If no other step is in flight, sleep before the outputs of this step
            # are emitted: the next step then starts before the connections send these outputs.
            was_only_step = not self._in_flight
            if was_only_step:
                await asyncio.sleep(0)
            self._update_from_output(step, await step.handle.result())
            if not was_only_step:
                await asyncio.sleep(0)

    async def _sleep_for_messages(self) -> list[messages.EngineIn]:
        self._audit_when_due()
        wake_at_s = self._wake_at_s
        if math.isinf(wake_at_s):
            return await self.inbox.drain(wait=True)
        delay_s = max(0.0, wake_at_s - self._clock())
        timer = asyncio.get_running_loop().call_later(delay_s, self.inbox.wake)
        try:
            return await self.inbox.drain(wait=True)
        finally:
            timer.cancel()

    def handle(self, msg: messages.EngineIn) -> None:
        match msg:
            case messages.Submit():
                self._submit(msg)
            case messages.Abort(rids=rids):
                self._emit_rows(self.scheduler.abort(rids))
            case messages.AbortAll():
                self._emit_rows(self.scheduler.abort_all())
            case messages.Drain(deadline_s=deadline_s):
                self._draining = True
                self._drain_deadline_s = min(self._drain_deadline_s, self._clock() + deadline_s)
            case messages.Ping(seq=seq):
                self.emit(messages.Pong(seq, self.num_finished_steps, self.busy))
            case messages.TraceNext():
                self._trace_next = True
            case messages.Join(epoch=epoch):
                self.emit(messages.LeftGroup(epoch, "this engine was started to serve alone"))
            case messages.UpdatePlacement(placement=placement):
                self.emit(
                    messages.PlacementResult(
                        version=placement.version,
                        error="this engine serves alone and has all experts",
                    )
                )
            case _:
                assert_never(msg)

    def _submit(self, msg: messages.Submit) -> None:
        if self._draining:
            self.emit(messages.Refused(msg.rid, "the engine is shutting down", "server_draining"))
            return
        try:
            self.scheduler.submit(msg, self._clock())
        except RequestError as error:
            self.emit(messages.Refused(msg.rid, error.message, error.code or error.type))

    def _grammar_prepared(self, ticket: int, error: str) -> None:
        """Report to the scheduler, and wake the engine so that it plans again."""
        self._emit_rows(self.scheduler.grammar_prepared(ticket, error))
        self.inbox.wake()

    def _start(self) -> Step | None:
        began_at_s = self._clock()
        plan = self.scheduler.plan(began_at_s)
        if plan is None:
            assert self._in_flight or not self.scheduler.can_run, (
                "requests wait, but no step can be planned and none is in flight"
            )
            return None
        plan_us = round((self._clock() - began_at_s) * 1e6)
        if not self._trace_next:
            return Step(plan, self.runner.start(plan), began_at_s, plan_us)
        self._trace_next = False
        # One micro-batch, which has all tokens.
        decision = StepDecision(plan.step, most_tokens=(plan.num_tokens, 0), trace=True)
        handle = self.runner.start(replace(plan, decision=decision))
        return Step(plan, handle, began_at_s, plan_us, decision)

    def _update_from_output(self, step: Step, result: StepResult) -> None:
        update_began_at_s = self._clock()
        output = self.scheduler.update_from_output(step.plan, result)
        updated_at_s = self._clock()
        record = output.record
        assert record is not None
        record.at_s = step.began_at_s
        record.plan_us = step.plan_us
        record.vote_us = step.vote_us
        record.ubatches = step.decision.ubatches if step.decision is not None else 1
        record.dp_rank = self._dp_rank
        self.emit(output)
        self._report_step(step, result, update_began_at_s, updated_at_s)

    def _report_step(
        self, step: Step, result: StepResult, update_began_at_s: float, updated_at_s: float
    ) -> None:
        """Count the step, and report its expert load and its trace.

        The scheduler's update ran from update_began_at_s to updated_at_s.
        """
        self.num_finished_steps += 1
        if result.expert_tokens_LE is not None:
            self._expert_load_report.add(result.expert_tokens_LE)
        if step.decision is not None and step.decision.trace:
            spans = _spans(step, update_began_at_s, updated_at_s)
            self.emit(
                messages.Traced(
                    step=step.decision.step,
                    dp_rank=self._dp_rank,
                    tp_rank=0,
                    events=[*spans, *result.events],
                )
            )

    def _abort_when_late(self) -> None:
        """Abort all requests once the deadline of a drain has passed."""
        if self._clock() >= self._drain_deadline_s:
            self._emit_rows(self.scheduler.abort_all())

    def _emit_rows(self, output: messages.StepOutput | None) -> None:
        """Emit the ends of requests. If the engine is idle now, also emit the gauges, because no
        step will emit them.
        """
        if output is None:
            return
        self.emit(output)
        if not self.busy:
            record = self.scheduler.gauges(self.num_finished_steps)
            record.dp_rank = self._dp_rank
            self.emit(messages.StepOutput(rids=b"", tokens=b"", finish=b"", record=record))

    def _audit_when_due(self) -> None:
        if (now_s := self._clock()) - self._audited_at_s >= AUDIT_INTERVAL_S:
            self.scheduler.audit()
            self._audited_at_s = now_s


class GrammarJobs:
    """The scheduler's GrammarSource. It passes jobs to the runner, and their results to
    `on_prepared`.
    """

    def __init__(self, runner: Runner, on_prepared: Callable[[int, str], None]) -> None:
        self._runner = runner
        self._on_prepared = on_prepared

    def begin(self, job: GrammarJob) -> None:
        """Start a job. `on_prepared` is called later, on the running loop."""
        loop = asyncio.get_running_loop()

        def on_done(error: str) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._on_prepared, job.ticket, error)

        self._runner.prepare_grammar(job, on_done)

    def drop(self, tickets: Sequence[int]) -> None:
        """Forget prepared grammars."""
        self._runner.drop_grammars(tickets)


class ExpertLoadReport:
    """Sums the tokens per expert over steps. Emits an ExpertLoad one second after the first step of
    each sum.
    """

    def __init__(self, emit: Callable[[messages.ExpertLoad], object]) -> None:
        self.version = 0  # version of the active placement
        self._emit = emit
        self._sum_LE: NDArray[np.int64] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, expert_tokens_LE: NDArray[np.int64]) -> None:
        """Add the tokens of one step: int64 [layers, experts]. To be called on the event loop."""
        if self._sum_LE is None:
            # A copy, because the runner may reuse its array.
            self._sum_LE = expert_tokens_LE.astype(np.int64)
        else:
            self._sum_LE += expert_tokens_LE
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EXPERT_LOAD_INTERVAL_S, self.flush)

    def flush(self) -> None:
        """Emit the current sum, if there is one, and cancel the timer."""
        if self._timer is None or self._sum_LE is None:
            return
        self._timer.cancel()
        self._timer = None
        report = messages.ExpertLoad(
            counts=self._sum_LE.astype("<i8", copy=False).tobytes(),
            num_layers=len(self._sum_LE),
            version=self.version,
        )
        self._sum_LE = None
        self._emit(report)


def _spans(step: Step, update_began_at_s: float, updated_at_s: float) -> list[messages.TraceEvent]:
    """Return the core's spans of a step.

    "run" is the time from the start of the step to its result. With several steps in flight, it
    includes the time in which the previous step still ran.
    """
    planned_at_s = step.began_at_s + step.plan_us / 1e6
    voted_at_s = planned_at_s + step.vote_us / 1e6
    spans_s = {
        "plan": (step.began_at_s, planned_at_s),
        "vote": (planned_at_s, voted_at_s),
        "run": (voted_at_s, update_began_at_s),
        "update": (update_began_at_s, updated_at_s),
    }
    return [
        messages.TraceEvent(name, "engine", round(begin * 1e9), round(end * 1e9))
        for name, (begin, end) in spans_s.items()
        if end > begin
    ]
