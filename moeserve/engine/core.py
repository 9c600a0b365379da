"""The engine's loop: messages in, one step planned ahead of the one that runs, outputs out."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, assert_never

import msgspec

from moeserve.engine.plan import Runner, StepHandle, StepPlan
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import RequestError
from moeserve.messages import (
    Abort,
    Answer,
    Call,
    Drain,
    EngineIn,
    EngineOut,
    Ping,
    Pong,
    Refused,
    StepOutput,
    Stopped,
    Submit,
)

AUDIT_EVERY_S = 10.0  # an idle engine checks its books, but not after each of many short requests


class Mail(Protocol):
    """Where messages come from; `moeserve.actor.inbox.Inbox` is one."""

    async def drain(self, wait: bool) -> list[EngineIn]:
        """All messages that are there; with `wait` at least one, sleeping until it comes."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that the runner has."""

    plan: StepPlan
    handle: StepHandle
    at_s: float
    plan_us: int


class EngineCore:
    """Runs a scheduler against a runner until it is drained, and says why whenever it ends.

    The runner stays the caller's: `run` never closes it. Every request gets its ending through `emit`, by a row of a
    `StepOutput`, a `Refused`, or the `Stopped` that is always the last message.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Mail,
        emit: Callable[[EngineOut], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.inbox = inbox
        self.emit = emit
        self.num_settled = 0
        self._depth = scheduler.limits.depth
        self._clock = clock
        self._in_flight: deque[Step] = deque()
        self._draining = False
        self._deadline_s = math.inf
        self._audited_s = -math.inf

    @property
    def busy(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    async def run(self) -> None:
        """Serves until a Drain is done. An error of the runner or of ours ends everything, with its cause."""
        try:
            while self.busy or not self._draining:
                if not self.busy:
                    self._audit_when_due()
                for msg in await self.inbox.drain(wait=not self.busy):
                    self.handle(msg)
                if self._clock() >= self._deadline_s:
                    self._emit_rows(self.scheduler.abort_all())
                # With more ranks, the step vote stands between the two halves of `_start`: all ranks decide alike.
                if len(self._in_flight) < self._depth and (step := self._start()) is not None:
                    self._in_flight.append(step)
                elif self._in_flight:
                    await self._settle(self._in_flight.popleft())
        except BaseException as error:
            self.emit(Stopped(f"{type(error).__name__}: {error}"))
            raise
        self.emit(Stopped(""))

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
                self.emit(Pong(seq, self.num_settled, self.busy))
            case Call():
                self._call(msg)
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
        return Step(plan, self.runner.start(plan), at_s, plan_us)

    async def _settle(self, step: Step) -> None:
        result = await step.handle.result()
        start_s = self._clock()
        output = self.scheduler.settle(step.plan, result)
        self.num_settled += 1
        assert output.record is not None
        settle_us = round((self._clock() - start_s) * 1e6)
        record = msgspec.structs.replace(output.record, at_s=step.at_s, plan_us=step.plan_us, settle_us=settle_us)
        self.emit(msgspec.structs.replace(output, record=record))
        await asyncio.sleep(0)  # a result that was there already did not let the wires move

    def _emit_rows(self, output: StepOutput | None) -> None:
        if output is not None:
            self.emit(output)

    def _audit_when_due(self) -> None:
        if (now_s := self._clock()) - self._audited_s >= AUDIT_EVERY_S:
            self.scheduler.audit()
            self._audited_s = now_s
