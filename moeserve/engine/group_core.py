"""The engine's loop in a group: each step is voted on, and a broken group is left and formed anew.

    waiting for a Join --form--> joined --PeerLost, or a PAUSE for a newer Join--> waiting for a Join --> ...

Requests, their books and their K/V stay through all of it. Plans whose step failed are kept and started again, in
their order, before anything new: they write the same values to the same places.
"""

from __future__ import annotations

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

from moeserve.engine.core import EngineCore, MessageSource, Step
from moeserve.engine.plan import Agreed, BlockDiff, StepPlan, StepResult
from moeserve.engine.scheduler import Scheduler
from moeserve.engine.ubatch_split import best_split
from moeserve.engine.vote import Action, DPCoordinator, GroupRunner, Vote
from moeserve.errors import PeerLost, StepSkew
from moeserve.messages import EngineIn, EngineOut, Join, Joined, Parted, Place, Placed

log = logging.getLogger(__name__)

PATIENCE_S = 0.1  # how long a wait may be before messages are answered meanwhile
GRACE_S = 0.5  # beyond the deadline of a drain, for the others to be done as well
HOLD_S = 2.0  # for the others to hold, once a newer Join is here
LOOK_S = 0.01  # how often a sleeping engine looks whether a placement is prepared further

T = TypeVar("T")
Form = Callable[[Join], Coroutine[Any, Any, DPCoordinator]]


class GroupCore(EngineCore):
    """An EngineCore that steps together with others.

    `form` meets them for a Join and connects the runner: it raises PeerLost when that fails, and is cancelled when it
    has become pointless; `runner.leave` follows in both cases. Emits Joined and Parted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: GroupRunner,
        inbox: MessageSource,
        emit: Callable[[EngineOut], None],
        form: Form,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(scheduler, runner, inbox, emit, clock=clock)
        self._group_runner = runner
        self._form = form
        self._coordinator: DPCoordinator | None = None
        self._join: Join | None = None  # the epoch that we are in, or were last
        self._next_join: Join | None = None
        self._again: deque[StepPlan] = deque()  # planned, but without a result yet
        self._num_votes = 0  # in this epoch
        self._told: tuple[bool, bool, int] | None = None  # what the last vote said of us, if it ended in a PARK
        self._in_force = 0
        self._placing = False
        self._stopped = False
        self._hold_until_s = math.inf
        self._watching: asyncio.Task[None]  # of the DP coordinator
        self._no_rows = _no_rows(len(scheduler.groups))

    @property
    def busy(self) -> bool:
        """Whether progress is to be expected: not of an engine that waits for its group."""
        return self._coordinator is not None and (super().busy or bool(self._again))

    @property
    def over(self) -> bool:
        """In a group, all stop together. Without one, an engine stops by itself when it owes no answer."""
        return self._stopped or (self._coordinator is None and self._drained)

    @property
    def _drained(self) -> bool:
        return self._draining and not self.scheduler.has_work

    @property
    def _patience_until_s(self) -> float:
        """When we leave a group that does not let us stop, or join a newer one."""
        return min(self._deadline_s + GRACE_S, self._hold_until_s)

    @property
    def _newest_epoch(self) -> int:
        """That a Join was for; -1 before the first."""
        newest = self._next_join or self._join
        return -1 if newest is None else newest.epoch

    async def run(self) -> None:
        loop = asyncio.get_running_loop()

        def on_placed(placed: Placed) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._placed, placed)

        self._group_runner.on_placed = on_placed
        try:
            await super().run()
        finally:
            self._group_runner.on_placed = None
            if self._coordinator is not None:
                self._watching.cancel()
                self._coordinator.close()

    def handle(self, msg: EngineIn) -> None:
        match msg:
            case Join(epoch=epoch) if epoch <= self._newest_epoch:
                log.warning("a Join for epoch %d came late or twice: this engine is at %d", epoch, self._newest_epoch)
            case Join():
                self._next_join = msg
                self._hold_until_s = self._clock() + HOLD_S
            case Place(placement=placement) if self._coordinator is None:
                cause = "the engine is in no group; the next Join says what to load"
                self.emit(Placed(version=placement.version, error=cause))
            case Place(placement=placement):
                self._placing = True
                self._group_runner.prepare(placement)
            case _:
                super().handle(msg)

    async def _turn(self) -> None:
        coordinator = self._coordinator
        if coordinator is None:
            await self._meet()
            return
        for msg in await self.inbox.drain(wait=False):
            self.handle(msg)
        self._abort_when_late()
        try:
            if self._clock() >= self._patience_until_s:
                raise PeerLost("the others did not hold or stop in time")
            if len(self._in_flight) < self._depth and await self._step(coordinator):
                return
            if self._in_flight:
                await self._finish_oldest()
            else:
                await self._sleep(coordinator)
        except (PeerLost, StepSkew) as error:
            await self._part(coordinator.lost or error)

    # ---- one step

    async def _step(self, coordinator: DPCoordinator) -> bool:
        """Votes and does what follows from it; False when a sleeping engine has nothing to say."""
        at_s = self._clock()
        plan = self._next_plan()
        vote = self._vote(plan)
        news = (vote.pause, vote.drained, vote.placed)
        if plan is None and news == self._told and not coordinator.woken:
            return False
        voted_s = self._clock()
        try:
            decision = await self._attended(coordinator.decide(vote))
        except BaseException:
            if plan is not None:
                self._again.appendleft(plan)
            raise
        self._num_votes += 1
        self._told = news if decision.action is Action.PARK else None
        if decision.agreed is not None:
            vote_us = round((self._clock() - voted_s) * 1e6)
            self._start_agreed(plan, vote.split_at, decision.agreed, at_s, round((voted_s - at_s) * 1e6), vote_us)
        elif decision.action is not Action.PARK:
            await self._leave()  # in order: no engine has a step in flight, or plans one
            self._stopped = decision.action is Action.STOP or self._drained
        return True

    def _next_plan(self) -> StepPlan | None:
        if self._next_join is not None:
            return None
        return self._again.popleft() if self._again else self.scheduler.plan()

    def _vote(self, plan: StepPlan | None) -> Vote:
        assert self._join is not None
        ubatches_ok = self._group_runner.ubatches_ok(plan)
        return Vote(
            step=self._num_votes,
            epoch=self._join.epoch,
            has_work=plan is not None,
            tokens=plan.num_tokens if plan is not None else 0,
            split_at=best_split(plan.counts_R) if plan is not None and ubatches_ok else 0,
            requests=len(plan.slots_R) if plan is not None else 0,
            ubatches_ok=ubatches_ok,
            pause=self._next_join is not None and not self._in_flight,
            drained=self._drained and not self._in_flight,
            placed=self._group_runner.placed,
            in_force=self._in_force,
            trace=self._trace_next,
        )

    def _start_agreed(
        self, plan: StepPlan | None, split_at: int, agreed: Agreed, at_s: float, plan_us: int, vote_us: int
    ) -> None:
        """Starts what all have agreed on; without a plan, a step that only serves the others' tokens."""
        plan = self._no_rows if plan is None else plan
        self._in_force = agreed.placed
        self._trace_next = self._trace_next and not agreed.trace
        sent = replace(plan, agreed=agreed, split_at=split_at if agreed.ubatches == 2 else 0)
        self._in_flight.append(Step(plan, self.runner.start(sent), at_s, plan_us, agreed, vote_us))

    async def _finish_oldest(self) -> None:
        """A step stays in flight until its result is there, so that none is lost when the group breaks."""
        result = await self._attended(self._in_flight[0].handle.result())
        self._update_from_output(self._in_flight.popleft(), result)
        await asyncio.sleep(0)  # a result that was there already did not let the wires move

    def _update_from_output(self, step: Step, result: StepResult) -> None:
        if step.plan is self._no_rows:
            now_s = self._clock()
            self._account(step, result, now_s, now_s)
        else:
            super()._update_from_output(step, result)

    # ---- the group comes and goes

    async def _meet(self) -> None:
        """Waits for a Join and forms the group; gives up when a newer one comes, or when no answer is owed any more."""
        if self._next_join is None:
            await self._hear(None, self._deadline_s)
            self._abort_when_late()
            return
        join = self._join = self._next_join
        self._next_join = None
        self._dp_rank = join.dp_rank
        began_s = self._clock()
        forming = asyncio.get_running_loop().create_task(self._form(join))
        try:
            while not forming.done() and self._next_join is None and not self.over:
                await self._hear(forming, self._deadline_s)
                self._abort_when_late()
            await _end(forming)
        except BaseException:
            forming.add_done_callback(drop_coordinator)
            await _end(forming)
            raise
        if forming.cancelled():
            await self._leave()
        elif isinstance(error := forming.exception(), PeerLost):
            await self._leave()
            self._tell_parted(str(error), error.missing)
        else:
            self._begin(join, forming.result(), self._clock() - began_s)

    def _begin(self, join: Join, coordinator: DPCoordinator, took_s: float) -> None:
        self._coordinator = coordinator
        self._watching = asyncio.get_running_loop().create_task(self._watch(coordinator))
        self._num_votes, self._told, self._in_force, self._placing = 0, None, 0, False
        if self._next_join is None:
            self._hold_until_s = math.inf
        if join.placement is not None:
            self._load.version = join.placement.version
        self.emit(Joined(join.epoch, took_s))

    async def _leave(self, cause: str = "", missing: tuple[int, ...] = ()) -> None:
        """Returns when nothing connects us with the others any more, and no step runs."""
        if self._coordinator is not None:
            await _end(self._watching)
            self._coordinator.close(cause, missing)
            self._coordinator = None
        await self._group_runner.leave()

    async def _part(self, error: PeerLost | StepSkew) -> None:
        """Leaves a broken group, and keeps the plans that got no result. Any other error of a step ends the engine."""
        missing = error.missing if isinstance(error, PeerLost) else ()
        await self._leave(str(error), missing)
        failed: deque[StepPlan] = deque()
        while self._in_flight:
            step = self._in_flight.popleft()
            try:
                result = await step.handle.result()
            except PeerLost:
                if step.plan is not self._no_rows:
                    failed.append(step.plan)
            else:
                assert not failed, f"step {step.plan.step} had a result, but one before it failed"
                self._update_from_output(step, result)
        if self._group_runner.overtaken:  # by steps that wrote where this one is to read
            self._again.clear()
            self.scheduler.start_over()
        else:
            self._again.extendleft(reversed(failed))
        self._tell_parted(str(error), missing)

    def _tell_parted(self, cause: str, missing: tuple[int, ...]) -> None:
        assert self._join is not None
        engines = tuple(sorted({rank // self._join.tp_size for rank in missing}))
        self.emit(Parted(self._join.epoch, cause, engines))

    def _placed(self, placed: Placed) -> None:
        self._placing = False
        if not placed.error:
            self._load.version = placed.version
        self.emit(placed)

    # ---- waiting

    async def _watch(self, coordinator: DPCoordinator) -> None:
        """A step that waits for engines which the vote knows to be gone fails at once."""
        await coordinator.broken()
        await self._group_runner.leave()

    async def _sleep(self, coordinator: DPCoordinator) -> None:
        """Until a message comes, another engine wakes this one, or it is time to look again."""
        self._audit_when_due()
        ringing = asyncio.get_running_loop().create_task(coordinator.wait_woken())
        try:
            await self._hear(ringing, self._clock() + LOOK_S if self._placing else self._patience_until_s)
        finally:
            await _end(ringing)
            failure = None if ringing.cancelled() else ringing.exception()  # looked at also when we are cancelled
        if failure is not None:
            raise failure

    async def _attended(self, awaited: Awaitable[T]) -> T:
        """Waits for it; when that takes long, messages are handled meanwhile."""
        loop = asyncio.get_running_loop()
        helpers: list[asyncio.Task[None]] = []
        timer = loop.call_later(PATIENCE_S, lambda: helpers.append(loop.create_task(self._attend())))
        try:
            return await awaited
        finally:
            timer.cancel()
            for helper in helpers:
                await _end(helper)
                if not helper.cancelled():
                    helper.result()

    async def _attend(self) -> None:
        """Handles messages until cancelled; breaks the group when patience ends, which ends the wait with PeerLost."""
        while self._clock() < self._patience_until_s:
            due_s = self._deadline_s if self._clock() < self._deadline_s else self._patience_until_s
            await self._hear(None, min(due_s, self._patience_until_s))
            self._abort_when_late()
        if self._coordinator is not None:
            self._coordinator.close("the others did not hold or stop in time")

    async def _hear(self, other: asyncio.Task[Any] | None, until_s: float) -> None:
        """Handles messages as soon as there are some, unless `other` is done before, or the clock shows `until_s`."""
        mail = asyncio.get_running_loop().create_task(self.inbox.drain(wait=True))
        waits: set[asyncio.Task[Any]] = {mail} if other is None else {mail, other}
        timeout_s = max(0.0, until_s - self._clock()) if until_s < math.inf else None
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when cancelled: what was taken out of the inbox must not be lost
            await _end(mail)
            if not mail.cancelled():
                for msg in mail.result():
                    self.handle(msg)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits until it is gone; does not look at how it ended."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


def drop_coordinator(forming: asyncio.Task[DPCoordinator], cause: str = "", missing: tuple[int, ...] = ()) -> None:
    """Closes a DP coordinator that comes when nobody wants it any more."""
    if not forming.cancelled() and forming.exception() is None:
        forming.result().close(cause, missing)


def _no_rows(num_groups: int) -> StepPlan:
    """The plan of an engine that has nothing to compute but serves its experts to the others."""
    nothing = np.zeros(0, np.int32)
    diffs = (BlockDiff(nothing, nothing, nothing),) * num_groups
    return StepPlan(-1, nothing, nothing, nothing, np.zeros(0, np.bool_), diffs)
