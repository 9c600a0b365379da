"""The engine's loop: handles messages, plans one step ahead of the one that runs, and emits
outputs.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from moeserve import messages
from moeserve.actor.actor import Actor, Inbox
from moeserve.engine.plan import Agreed, Runner, StepHandle, StepPlan, StepResult
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import RequestError

AUDIT_INTERVAL_S = 10.0  # an audit costs too much to run after each of many short requests
LOAD_REPORT_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step that the runner has. agreed: the group's decision about the step, if the engine is in
    a group.
    """

    plan: StepPlan
    handle: StepHandle
    at_s: float
    plan_us: int
    agreed: Agreed | None = None
    vote_us: int = 0


class EngineCore(Actor[messages.EngineIn]):
    """The actor that runs a scheduler's plans on a runner until it is drained.

    Every request ends by a message through `emit`: a row of a `StepOutput`, a `Refused`, or the
    `Stopped` that is always the last message and carries the cause. The caller closes the runner.
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
        """Whether a step is in flight or a request waits or runs."""
        return bool(self._in_flight) or self.scheduler.has_work

    @property
    def over(self) -> bool:
        """Whether the core was stopped, or was told to drain and has nothing left to do."""
        return self._stopping or (self._draining and not self.busy)

    async def run(self) -> None:
        """Serves until `over`. An error of the runner or the scheduler ends the actor; `Stopped`
        names the cause.
        """
        try:
            await super().run()
        except BaseException as error:
            self.emit(messages.Stopped(f"{type(error).__name__}: {error}"))
            raise
        self.emit(messages.Stopped(""))

    async def on_stop(self) -> None:
        """Reports the expert load that is not reported yet."""
        self._load.flush()

    async def turn(self) -> None:
        """Handles the messages that are there, then starts a step, or else waits for the oldest
        step's result.
        """
        if not self.busy:
            self._audit_when_due()
        for msg in await self.inbox.drain(wait=not self.busy):
            self.handle(msg)
        self._abort_when_late()
        if len(self._in_flight) < self._depth and (step := self._start()) is not None:
            self._in_flight.append(step)
        elif self._in_flight:
            step = self._in_flight.popleft()
            # The wires get time also where results are there already. Where no step is in flight,
            # the next one starts before the outputs of the last one are sent.
            if is_last := not self._in_flight:
                await asyncio.sleep(0)
            self._update_from_output(step, await step.handle.result())
            if not is_last:
                await asyncio.sleep(0)

    def handle(self, msg: messages.EngineIn) -> None:
        """Acts on one message."""
        match msg:
            case messages.Submit():
                self._submit(msg)
            case messages.Abort(rids=rids):
                self._emit_rows(self.scheduler.abort(rids))
            case messages.AbortAll():
                self._emit_rows(self.scheduler.abort_all())
            case messages.Drain(deadline_s=deadline_s):
                self._draining = True
                self._deadline_s = min(self._deadline_s, self._clock() + deadline_s)
            case messages.Ping(seq=seq):
                self.emit(messages.Pong(seq, self.num_finished_steps, self.busy))
            case messages.TraceNext():
                self._trace_next = True
            case messages.Join(epoch=epoch):
                self.emit(messages.Parted(epoch, "this engine was started to serve alone"))
            case messages.Place(placement=placement):
                self.emit(
                    messages.Placed(
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
            self.scheduler.submit(msg)
        except RequestError as error:
            self.emit(messages.Refused(msg.rid, error.message, error.code or error.type))

    def _start(self) -> Step | None:
        at_s = self._clock()
        plan = self.scheduler.plan()
        if plan is None:
            assert self._in_flight or not self.scheduler.has_work, (
                "requests wait, and nothing will ever wake them"
            )
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
        record = output.record
        assert record is not None
        record.at_s = step.at_s
        record.plan_us = step.plan_us
        record.vote_us = step.vote_us
        record.ubatches = step.agreed.ubatches if step.agreed is not None else 1
        record.dp_rank = self._dp_rank
        self.emit(output)
        self._account(step, result, start_s, updated_s)

    def _account(self, step: Step, result: StepResult, start_s: float, updated_s: float) -> None:
        """Counts the step, and reports its expert load and trace. The scheduler's update took
        start_s to updated_s.
        """
        self.num_finished_steps += 1
        if result.load_LE is not None:
            self._load.add(result.load_LE)
        if step.agreed is not None and step.agreed.trace:
            spans = _spans(step, start_s, updated_s)
            self.emit(messages.Traced(step.agreed.step, self._dp_rank, 0, [*spans, *result.events]))

    def _abort_when_late(self) -> None:
        """Aborts all requests once the deadline of a drain has passed."""
        if self._clock() >= self._deadline_s:
            self._emit_rows(self.scheduler.abort_all())

    def _emit_rows(self, output: messages.StepOutput | None) -> None:
        """Emits the ends of aborted requests, and the gauges if no step follows that would tell
        them.
        """
        if output is None:
            return
        self.emit(output)
        if not self.busy:
            record = self.scheduler.gauges(self.num_finished_steps)
            record.dp_rank = self._dp_rank
            self.emit(messages.StepOutput(rids=b"", tokens=b"", finish=b"", record=record))

    def _audit_when_due(self) -> None:
        if (now_s := self._clock()) - self._audited_s >= AUDIT_INTERVAL_S:
            self.scheduler.audit()
            self._audited_s = now_s


class LoadReport:
    """Sums the tokens per expert over steps, and emits an ExpertLoad one second after the first
    step of each sum.

    version: the number of the placement in force, which the messages carry.
    """

    def __init__(self, emit: Callable[[messages.ExpertLoad], object]) -> None:
        self.version = 0
        self._emit = emit
        self._sum_LE: NDArray[np.int64] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, load_LE: NDArray[np.int64]) -> None:
        """Adds one step's tokens. load_LE: int64 [layers, experts]. Must be called on the event
        loop.
        """
        if self._sum_LE is None:
            self._sum_LE = load_LE.astype(np.int64)  # a copy: the runner may reuse its own
        else:
            self._sum_LE += load_LE
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOAD_REPORT_INTERVAL_S, self.flush)

    def flush(self) -> None:
        """Emits the current sum, if there is one, and cancels the timer."""
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


def _spans(step: Step, start_s: float, updated_s: float) -> list[messages.TraceEvent]:
    """The loop's own spans of a step. "run" lasts from the start to the result, and so includes the
    step before.
    """
    planned_s = step.at_s + step.plan_us / 1e6
    voted_s = planned_s + step.vote_us / 1e6
    times_s = {
        "plan": (step.at_s, planned_s),
        "vote": (planned_s, voted_s),
        "run": (voted_s, start_s),
    }
    times_s["update"] = (start_s, updated_s)
    return [
        messages.TraceEvent(name, "engine", round(begin * 1e9), round(end * 1e9))
        for name, (begin, end) in times_s.items()
        if end > begin
    ]
