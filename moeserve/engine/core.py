"""The engine's loop: messages in, one step planned ahead of the one that runs, outputs out."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, assert_never

import msgspec

from moeserve.engine.expert_load import LoadReport
from moeserve.engine.plan import Agreed, Runner, StepHandle, StepPlan, StepResult
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import RequestError
from moeserve.messages import (
    Abort,
    Answer,
    Call,
    Drain,
    EngineIn,
    EngineOut,
    Join,
    Parted,
    Ping,
    Place,
    Placed,
    Pong,
    Refused,
    StepOutput,
    Stopped,
    Submit,
    Traced,
    TraceEvent,
    TraceNext,
)

AUDIT_EVERY_S = 10.0  # an idle engine checks its books, but not after each of many short requests


class MessageSource(Protocol):
    """Where messages come from; `moeserve.actor.inbox.Inbox` is one."""

    async def drain(self, wait: bool) -> list[EngineIn]:
        """All messages that are there; with `wait` at least one, sleeping until it comes."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that the runner has. agreed: what the group decided about it, if there is a group."""

    plan: StepPlan
    handle: StepHandle
    at_s: float
    plan_us: int
    agreed: Agreed | None = None
    vote_us: int = 0


class EngineCore:
    """Runs a scheduler against a runner until it is drained, and says why whenever it ends.

    The runner stays the caller's: `run` never closes it. Every request gets its ending through `emit`, by a row of a
    `StepOutput`, a `Refused`, or the `Stopped` that is always the last message.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: MessageSource,
        emit: Callable[[EngineOut], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.inbox = inbox
        self.emit = emit
        self.num_finished_steps = 0
        self._depth = scheduler.limits.depth
        self._clock = clock
        self._in_flight: deque[Step] = deque()
        self._draining = False
        self._deadline_s = math.inf
        self._audited_s = -math.inf
        self._trace_next = False
        self._dp_rank = 0
        self._load = LoadReport(emit)

    @property
    def busy(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    @property
    def over(self) -> bool:
        """Whether a Drain is done."""
        return self._draining and not self.busy

    async def run(self) -> None:
        """Serves until a Drain is done. An error of the runner or of ours ends everything, with its cause."""
        try:
            while not self.over:
                await self._turn()
            self._load.flush()
        except BaseException as error:
            self.emit(Stopped(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._load.close()
        self.emit(Stopped(""))

    async def _turn(self) -> None:
        """Reads what came, then starts a step, or else settles the oldest."""
        if not self.busy:
            self._audit_when_due()
        for msg in await self.inbox.drain(wait=not self.busy):
            self.handle(msg)
        self._abort_when_late()
        if len(self._in_flight) < self._depth and (step := self._start()) is not None:
            self._in_flight.append(step)
        elif self._in_flight:
            step = self._in_flight.popleft()
            self._update_from_output(step, await step.handle.result())
            await asyncio.sleep(0)  # a result that was there already did not let the wires move

    def handle(self, msg: EngineIn) -> None:
        match msg:
            case Submit():
                self._submit(msg)
            case Abort(rids=rids):
                self._emit_rows(self.scheduler.abort(rids))
            case Drain(deadline_s=deadline_s):
                self._draining = True
                self._deadline_s = min(self._deadline_s, self._clock() + deadline_s)
            case Ping(seq=seq):
                self.emit(Pong(seq, self.num_finished_steps, self.busy))
            case Call():
                self._call(msg)
            case TraceNext():
                self._trace_next = True
            case Join(epoch=epoch):
                self.emit(Parted(epoch, "this engine was started to serve alone"))
            case Place(placement=placement):
                self.emit(Placed(version=placement.version, error="this engine serves alone and has all experts"))
            case _:
                assert_never(msg)

    def _submit(self, msg: Submit) -> None:
        if self._draining:
            self.emit(Refused(msg.rid, "the engine is shutting down", "server_draining"))
            return
        try:
            self.scheduler.submit(msg)
        except RequestError as error:
            self.emit(Refused(msg.rid, error.message, error.code or error.type))

    def _call(self, msg: Call) -> None:
        match msg.what:
            case "reset_prefix_cache":
                self.scheduler.reset_prefix_cache()
                self.emit(Answer(msg.id, True))
            case "audit":
                try:
                    self.scheduler.audit()
                    self.emit(Answer(msg.id, True))
                except AssertionError as error:
                    self.emit(Answer(msg.id, False, str(error)))
            case _:
                assert_never(msg.what)

    def _start(self) -> Step | None:
        at_s = self._clock()
        plan = self.scheduler.plan()
        if plan is None:
            assert self._in_flight or not self.scheduler.has_work, "requests wait, and nothing will ever wake them"
            return None
        plan_us = round((self._clock() - at_s) * 1e6)
        if not self._trace_next:
            return Step(plan, self.runner.start(plan), at_s, plan_us)
        self._trace_next = False
        agreed = Agreed(plan.step, most_tokens=(plan.num_tokens, 0), trace=True)
        return Step(plan, self.runner.start(replace(plan, agreed=agreed)), at_s, plan_us, agreed)

    def _update_from_output(self, step: Step, result: StepResult) -> None:
        start_s = self._clock()
        output = self.scheduler.update_from_output(step.plan, result)
        updated_s = self._clock()
        assert output.record is not None
        record = msgspec.structs.replace(
            output.record,
            at_s=step.at_s,
            plan_us=step.plan_us,
            update_us=round((updated_s - start_s) * 1e6),
            comm_us=result.comm_us,
            exposed_comm_us=result.exposed_comm_us,
            ubatches=step.agreed.ubatches if step.agreed is not None else 1,
            vote_us=step.vote_us,
            dp_rank=self._dp_rank,
        )
        self.emit(msgspec.structs.replace(output, record=record))
        self._account(step, result, start_s, updated_s)

    def _account(self, step: Step, result: StepResult, start_s: float, updated_s: float) -> None:
        """What a step says beside its tokens, which were settled from start_s to updated_s."""
        self.num_finished_steps += 1
        if result.load_LE is not None:
            self._load.add(result.load_LE)
        if step.agreed is not None and step.agreed.trace:
            spans = _spans(step, start_s, updated_s)
            self.emit(Traced(step.agreed.step, self._dp_rank, 0, [*spans, *result.events]))

    def _abort_when_late(self) -> None:
        """At the deadline of a drain, ends what is left."""
        if self._clock() >= self._deadline_s:
            self._emit_rows(self.scheduler.abort_all())

    def _emit_rows(self, output: StepOutput | None) -> None:
        if output is not None:
            self.emit(output)

    def _audit_when_due(self) -> None:
        if (now_s := self._clock()) - self._audited_s >= AUDIT_EVERY_S:
            self.scheduler.audit()
            self._audited_s = now_s


def _spans(step: Step, start_s: float, updated_s: float) -> list[TraceEvent]:
    """What the loop did for a step; "run" is from handing it to the runner to its result, the step before included."""
    planned_s = step.at_s + step.plan_us / 1e6
    voted_s = planned_s + step.vote_us / 1e6
    times_s = {"plan": (step.at_s, planned_s), "vote": (planned_s, voted_s), "run": (voted_s, start_s)}
    times_s["update_from_output"] = (start_s, updated_s)
    return [
        TraceEvent(name, "engine", round(begin * 1e9), round(end * 1e9))
        for name, (begin, end) in times_s.items()
        if end > begin
    ]
