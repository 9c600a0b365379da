"""The engine core of an engine that steps together with others (expert parallelism).

The engines of a group vote before each step (engine/vote.py). If the group breaks, each engine
leaves it and waits for the next Join, the message with the members of the next group (messages.py):

    waiting for a Join --form--> joined
    joined --PeerLost, or a vote to PAUSE because of a newer Join--> waiting for a Join

Requests, their progress and their KV cache survive a broken group. The engine keeps the plans of
failed steps, and runs them again in the same order, before any new plan. That is safe because they
write the same values to the same KV entries.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from moeserve.actor.actor import Inbox
from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.engine.core import EngineCore, Step
from moeserve.engine.plan import BlockDiff, StepDecision, StepPlan, StepResult, best_split
from moeserve.engine.scheduler import Scheduler
from moeserve.engine.vote import Action, DPCoordinator, GroupRunner, Vote
from moeserve.errors import PeerLost, StepSkew
from moeserve.messages import (
    EngineIn,
    EngineOut,
    Join,
    Joined,
    LeftGroup,
    PlacementResult,
    UpdatePlacement,
)

log = logging.getLogger(__name__)

RESPONSIVE_AFTER_S = 0.1  # if a wait for the group lasts longer, messages are handled during it
DRAIN_GRACE_S = 0.5  # time after the deadline of a drain in which the other engines may finish
PAUSE_TIMEOUT_S = 2.0  # time for the other engines to pause, after a newer Join has arrived
PLACEMENT_POLL_INTERVAL_S = 0.01  # how often a sleeping engine checks the pending placement
_OTHERS_TOO_SLOW = "the other engines did not pause or stop in time"

T = TypeVar("T")
Form = Callable[[Join], Coroutine[Any, Any, DPCoordinator]]


class GroupCore(EngineCore):
    """An EngineCore whose steps run together with those of other engines.

    Emits Joined and LeftGroup, besides the messages of an EngineCore.

    form: connects the engine and its runner to the other engines of a Join. It raises PeerLost if
    that fails, and this core cancels it when a newer Join arrives. In both cases this core calls
    `runner.leave`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: GroupRunner,
        inbox: Inbox[EngineIn],
        emit: Callable[[EngineOut], object],
        form: Form,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(scheduler, runner, inbox, emit, clock=clock)
        self._group_runner = runner
        self._form_coordinator = form
        self._coordinator: DPCoordinator | None = None
        self._join: Join | None = None  # the Join of the current epoch, or of the last one
        self._next_join: Join | None = None  # a newer Join, whose group is not formed yet
        # Plans of failed steps. They run again before any new plan.
        self._plans_to_repeat: deque[StepPlan] = deque()
        self._num_votes = 0  # votes in this epoch
        # (pause, drained, prepared) of the last vote, if its outcome was PARK (the group sleeps). A
        # vote equal to it is not sent again, unless another engine wakes this one.
        self._parked_state: tuple[bool, bool, int] | None = None
        # The progress that the last decision activated. It counts layers of placements that are
        # active on all ranks (runner/experts.py).
        self._active_progress = 0
        self._placement_pending = False
        self._pause_deadline_s = math.inf
        self._watcher: asyncio.Task[None]  # runs `_watch` while the engine is in a group
        self._own_task: asyncio.Task[Any] | None = None  # the task that runs this actor
        self._task_error: Exception | None = None  # the error of a background task
        # `groups` are layers with the same KV rule, not engines.
        self._empty_plan = _empty_plan(len(scheduler.groups))
        # Whether no row may be split between two micro-batches (`best_split`). The queries of a
        # block read the keys of the whole block.
        self._keeps_rows_whole = scheduler.limits.diffusion_block > 0 or any(
            group.has_states for group in scheduler.groups
        )

    @property
    def busy(self) -> bool:
        """Whether the engine is in a group and has a step to run."""
        return self._coordinator is not None and (super().busy or bool(self._plans_to_repeat))

    @property
    def over(self) -> bool:
        """Whether the group has decided to stop, or the engine is drained and in no group."""
        return self._stopping or (self._coordinator is None and self._drained)

    @property
    def _may_start(self) -> bool:
        """Whether another step may start while those in flight run, so that the engine votes on it
        now. With drafts, the next plan needs the result of the step in flight, so the vote waits
        for that result.
        """
        return len(self._in_flight) < (1 if self.scheduler.awaits_result else self._depth)

    @property
    def _leave_deadline_s(self) -> float:
        """Time at which to leave a group that does not let this engine stop or join a newer one."""
        return min(self._drain_deadline_s + DRAIN_GRACE_S, self._pause_deadline_s)

    @property
    def _newest_epoch(self) -> int:
        """The epoch of the newest Join; -1 before the first one."""
        newest = self._next_join or self._join
        return -1 if newest is None else newest.epoch

    async def on_start(self) -> None:
        self._own_task = asyncio.current_task()
        loop = asyncio.get_running_loop()

        def on_placement_result(result: PlacementResult) -> None:  # called from any thread
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._placement_ended, result)

        self._group_runner.on_placement_result = on_placement_result

    async def on_stop(self) -> None:
        await super().on_stop()
        self._group_runner.on_placement_result = None
        if self._coordinator is not None:
            self._watcher.cancel()
            self._coordinator.close()
        if self._task_error is not None:
            raise self._task_error

    def handle(self, msg: EngineIn) -> None:
        match msg:
            case Join(epoch=epoch) if epoch <= self._newest_epoch:
                log.warning(
                    "ignored a Join for epoch %d, which is late or a duplicate: this engine is at "
                    "epoch %d",
                    epoch,
                    self._newest_epoch,
                )
            case Join():
                self._next_join = msg
                self._pause_deadline_s = self._clock() + PAUSE_TIMEOUT_S
            case UpdatePlacement(placement=placement) if self._coordinator is None:
                error = "the engine is in no group; the next Join carries a placement"
                self.emit(PlacementResult(version=placement.version, error=error))
            case UpdatePlacement(placement=placement):
                self._placement_pending = True
                self._group_runner.prepare(placement)
            case _:
                super().handle(msg)

    async def turn(self) -> None:
        """Handle messages. Then form a group, vote on a step, finish the oldest step, or sleep."""
        coordinator = self._coordinator
        if coordinator is None:
            await self._form_group()
            return
        for msg in await self.inbox.drain(wait=False):
            self.handle(msg)
        self._abort_when_late()
        try:
            if self._clock() >= self._leave_deadline_s:
                raise PeerLost(_OTHERS_TOO_SLOW)
            if self._may_start and await self._vote_and_start(coordinator):
                return
            if self._in_flight:
                await self._finish_oldest()
            else:
                await self._sleep(coordinator)
        except (PeerLost, StepSkew) as error:
            await self._leave_broken_group(coordinator.lost or error)

    # ---- one step

    async def _vote_and_start(self, coordinator: DPCoordinator) -> bool:
        """Vote, and carry out the decision. Return False, without a vote, if the group sleeps and
        this engine's vote would be the same as before.
        """
        began_at_s = self._clock()
        plan = None
        if self._next_join is None:
            plan = (
                self._plans_to_repeat.popleft()
                if self._plans_to_repeat
                else self.scheduler.plan(began_at_s)
            )
        vote = self._vote(plan)
        state = (vote.pause, vote.drained, vote.prepared)
        if plan is None and state == self._parked_state and not coordinator.is_woken:
            return False
        vote_began_at_s = self._clock()
        try:
            outcome = await self._await_responsively(coordinator.exchange(vote))
        except BaseException:
            if plan is not None:
                self._plans_to_repeat.appendleft(plan)
            raise
        self._num_votes += 1
        self._parked_state = state if outcome.action is Action.PARK else None
        if outcome.step_decision is not None:
            vote_us = round((self._clock() - vote_began_at_s) * 1e6)
            self._start_step(
                plan,
                vote.split_at,
                outcome.step_decision,
                began_at_s=began_at_s,
                plan_us=round((vote_began_at_s - began_at_s) * 1e6),
                vote_us=vote_us,
            )
        elif outcome.action is not Action.PARK:
            # PAUSE or STOP: no engine has a step in flight or a plan.
            await self._disconnect()
            if outcome.action is Action.STOP or self._drained:
                self.stop()
        return True

    def _vote(self, plan: StepPlan | None) -> Vote:
        assert self._join is not None
        ubatches_ok = self._group_runner.ubatches_ok(plan)
        return Vote(
            step=self._num_votes,
            epoch=self._join.epoch,
            has_work=plan is not None,
            tokens=plan.num_tokens if plan is not None else 0,
            split_at=best_split(plan.counts_R, whole=self._keeps_rows_whole)
            if plan is not None and ubatches_ok
            else 0,
            requests=len(plan.slots_R) if plan is not None else 0,
            ubatches_ok=ubatches_ok,
            pause=self._next_join is not None and not self._in_flight,
            drained=self._drained and not self._in_flight,
            prepared=self._group_runner.prepared,
            active=self._active_progress,
            trace=self._trace_next,
        )

    def _start_step(
        self,
        plan: StepPlan | None,
        split_at: int,
        decision: StepDecision,
        *,
        began_at_s: float,
        plan_us: int,
        vote_us: int,
    ) -> None:
        """Start the agreed step. Without a plan, the experts of this engine still compute for the
        tokens of the other engines.
        """
        plan = self._empty_plan if plan is None else plan
        self._active_progress = decision.active
        self._trace_next = self._trace_next and not decision.trace
        decided = replace(
            plan, decision=decision, split_at=split_at if decision.ubatches == 2 else 0
        )
        self._in_flight.append(
            Step(plan, self.runner.start(decided), began_at_s, plan_us, decision, vote_us)
        )

    async def _finish_oldest(self) -> None:
        """Wait for the oldest step and process its result. Until then the step stays in
        `_in_flight`, so that it is not lost if the group breaks.
        """
        is_only_step = len(self._in_flight) == 1
        # Sleep once per step, so that the connections send and receive even if the result is ready
        # already. If no other step is in flight, sleep before the outputs of this step are emitted:
        # the next step then starts before the connections send these outputs.
        if is_only_step:
            await asyncio.sleep(0)
        result = await self._await_responsively(self._in_flight[0].handle.result())
        self._update_from_output(self._in_flight.popleft(), result)
        if not is_only_step:
            await asyncio.sleep(0)

    def _update_from_output(self, step: Step, result: StepResult) -> None:
        if step.plan is self._empty_plan:
            now_s = self._clock()
            self._report_step(step, result, now_s, now_s)
        else:
            super()._update_from_output(step, result)

    # ---- membership

    async def _form_group(self) -> None:
        """Wait for a Join and form its group. Abandon the attempt if a newer Join arrives, or once
        the engine is drained.
        """
        if self._next_join is None:
            await self._handle_until(None, self._drain_deadline_s)
            self._abort_when_late()
            return
        join = self._next_join
        self._join = join
        self._next_join = None
        self._dp_rank = join.dp_rank
        began_at_s = self._clock()
        forming = asyncio.get_running_loop().create_task(self._form_coordinator(join))
        try:
            while not forming.done() and self._next_join is None and not self.over:
                await self._handle_until(forming, self._drain_deadline_s)
                self._abort_when_late()
            await _cancel_and_wait(forming)
        except BaseException:
            forming.add_done_callback(drop_coordinator)
            await _cancel_and_wait(forming)
            raise
        if forming.cancelled():
            await self._disconnect()
        elif isinstance(error := forming.exception(), PeerLost):
            await self._disconnect()
            self._emit_left(error)
        else:
            self._begin_epoch(join, forming.result(), self._clock() - began_at_s)

    def _begin_epoch(self, join: Join, coordinator: DPCoordinator, took_s: float) -> None:
        self._coordinator = coordinator
        self._watcher = spawn(
            self._watch(coordinator), name="watch of the group", on_error=self._task_failed
        )
        self._num_votes = 0
        self._parked_state = None
        self._active_progress = 0
        self._placement_pending = False
        if self._next_join is None:
            self._pause_deadline_s = math.inf
        if join.placement is not None:
            self._expert_load_report.version = join.placement.version
        self.emit(Joined(join.epoch, took_s))

    async def _disconnect(self, cause: str = "", missing: tuple[int, ...] = ()) -> None:
        """Close all connections to the group, and wait until no step runs."""
        if self._coordinator is not None:
            await cancel(self._watcher)
            self._coordinator.close(cause, missing)
            self._coordinator = None
        await self._group_runner.leave()

    async def _leave_broken_group(self, error: PeerLost | StepSkew) -> None:
        """Leave the group, and keep the plans that have no result, so that they run again.

        Raises the error of a step that failed for a reason other than PeerLost.
        """
        await self._disconnect(str(error), _missing_ranks(error))
        failed: deque[StepPlan] = deque()
        while self._in_flight:
            step = self._in_flight.popleft()
            try:
                result = await step.handle.result()
            except PeerLost:
                if step.plan is not self._empty_plan:
                    failed.append(step.plan)
            else:
                assert not failed, f"step {step.plan.step} had a result, but one before it failed"
                self._update_from_output(step, result)
        if self._group_runner.overtaken:
            # A later step had begun before this one failed, and may have overwritten its blocks. So
            # no plan can run again, and all running requests are computed again.
            self._plans_to_repeat.clear()
            self.scheduler.start_over()
        else:
            self._plans_to_repeat.extendleft(reversed(failed))
        self._emit_left(error)

    def _emit_left(self, error: PeerLost | StepSkew) -> None:
        assert self._join is not None
        engines = tuple(sorted({rank // self._join.tp_size for rank in _missing_ranks(error)}))
        self.emit(LeftGroup(self._join.epoch, str(error), engines))

    def _placement_ended(self, result: PlacementResult) -> None:
        self._placement_pending = False
        if not result.error:
            self._expert_load_report.version = result.version
        self.emit(result)

    # ---- waiting

    async def _watch(self, coordinator: DPCoordinator) -> None:
        """When the group breaks, fail the running step at once. Otherwise the step would wait until
        its deadline for engines that are gone.
        """
        await coordinator.wait_lost()
        await self._group_runner.leave()

    def _task_failed(self, name: str, error: Exception) -> None:
        """End this actor with the error of a background task, which `on_stop` raises.

        Without its background tasks, the actor could wait for lost engines, or for a message that
        nobody handles.
        """
        log_error(name, error)
        if self._task_error is None and self._own_task is not None:
            self._task_error = error
            self._own_task.cancel()

    async def _sleep(self, coordinator: DPCoordinator) -> None:
        """Sleep until a message arrives, another engine wakes this one, or `_wake_at_s` passes."""
        self._audit_when_due()
        woken = asyncio.get_running_loop().create_task(coordinator.wait_woken())
        try:
            deadline_s = min(self._leave_deadline_s, self._wake_at_s)
            if self._placement_pending:
                deadline_s = self._clock() + PLACEMENT_POLL_INTERVAL_S
            await self._handle_until(woken, deadline_s)
        finally:
            await _cancel_and_wait(woken)
            # Retrieve the error even if this task is cancelled, so that asyncio does not warn.
            failure = None if woken.cancelled() else woken.exception()
        if failure is not None:
            raise failure

    async def _await_responsively(self, awaited: Awaitable[T]) -> T:
        """Await. If that takes longer than RESPONSIVE_AFTER_S, handle messages in the meantime."""
        helpers: list[asyncio.Task[None]] = []

        def begin_handling() -> None:
            helper = spawn(self._handle_messages(), name="messages", on_error=self._task_failed)
            helpers.append(helper)

        timer = asyncio.get_running_loop().call_later(RESPONSIVE_AFTER_S, begin_handling)
        try:
            return await awaited
        finally:
            timer.cancel()
            for helper in helpers:
                await _cancel_and_wait(helper)
                if not helper.cancelled():
                    helper.result()

    async def _handle_messages(self) -> None:
        """Handle messages until cancelled. At `_leave_deadline_s`, break the group, so that an
        awaited vote or step fails.
        """
        while self._clock() < self._leave_deadline_s:
            next_deadline_s = (
                self._drain_deadline_s
                if self._clock() < self._drain_deadline_s
                else self._leave_deadline_s
            )
            await self._handle_until(None, min(next_deadline_s, self._leave_deadline_s))
            self._abort_when_late()
        if self._coordinator is not None:
            self._coordinator.close(_OTHERS_TOO_SLOW)

    async def _handle_until(self, task: asyncio.Task[Any] | None, deadline_s: float) -> None:
        """Wait for messages and handle them. Return earlier if `task` ends or the clock reaches
        `deadline_s`.
        """
        draining = asyncio.get_running_loop().create_task(self.inbox.drain(wait=True))
        tasks: set[asyncio.Task[Any]] = {draining} if task is None else {draining, task}
        timeout_s = max(0.0, deadline_s - self._clock()) if deadline_s < math.inf else None
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when cancelled, so that messages that left the inbox are not lost
            await _cancel_and_wait(draining)
            if not draining.cancelled():
                for msg in draining.result():
                    self.handle(msg)


async def _cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task unless it is done, and wait for it. Its result or error is left in it."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


def drop_coordinator(
    forming: asyncio.Task[DPCoordinator], cause: str = "", missing: tuple[int, ...] = ()
) -> None:
    """Close the coordinator of a task that ended too late. For `Task.add_done_callback`."""
    if not forming.cancelled() and forming.exception() is None:
        forming.result().close(cause, missing)


def _missing_ranks(error: PeerLost | StepSkew) -> tuple[int, ...]:
    return error.missing if isinstance(error, PeerLost) else ()


def _empty_plan(num_groups: int) -> StepPlan:
    """Return the plan of an engine without tokens, whose experts compute for the other engines."""
    empty = np.zeros(0, np.int32)
    return StepPlan(
        step=-1,
        slots_R=empty,
        starts_R=empty,
        counts_R=empty,
        samples_R=np.zeros(0, np.bool_),
        diffs=(BlockDiff(empty, empty, empty),) * num_groups,
    )
