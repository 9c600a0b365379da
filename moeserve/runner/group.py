"""The runner of an engine that steps together with others, or that has more than one rank, or both.

A step that fails because a rank was lost leaves everything usable: its plan comes again after the next `join`. Any
other error is the end, as in `ThreadedRunner`.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from moeserve.comm.members import Members
from moeserve.config import Limits
from moeserve.engine.plan import StepPlan, StepResult
from moeserve.engine.plan_codec import encode_plan
from moeserve.errors import EngineDied, PeerLost
from moeserve.messages import Join, Placed, PlacementTable, Traced
from moeserve.runner.base import ModelRunnerBase
from moeserve.runner.dbo import OverlapPolicy
from moeserve.runner.load import Progress
from moeserve.runner.orders import Allocate, Build, Meet, OrderDone, Part, Prepare, Run
from moeserve.runner.remote import Team, all_done, checked
from moeserve.runner.thread import StepFuture, ThreadedRunner

LEAVE_AGAIN_S = 0.1  # a connection that was being made while the others were dropped


class GroupedRunner(ThreadedRunner):
    """`GroupRunner` of engine/vote.py. model: this process's rank; team: the engine's other ones, None if it has none.

    on_placed, on_traced: set by the core, called from any thread.
    """

    def __init__(self, model: ModelRunnerBase, team: Team | None = None) -> None:
        super().__init__(model)
        self.model = model
        self.team = team
        self.on_traced: Callable[[Traced], object] | None = None
        self._lost: PeerLost | None = PeerLost("this engine has not joined its group yet")
        self.overtaken = False
        self._newest: StepPlan | None = None  # of those that have begun
        self._dp_rank = 0
        self._policy = OverlapPolicy("off" if len(model.ubatches.ubatches) == 1 else model.config.parallel.dbo)

    @property
    def on_placed(self) -> Callable[[Placed], None] | None:
        return self.model.on_placed

    @on_placed.setter
    def on_placed(self, hear: Callable[[Placed], None] | None) -> None:
        self.model.on_placed = hear

    def prepare_model(self, progress: Progress) -> Limits:
        """Loads and warms up all ranks of the engine, in a thread without a loop. Raises ConfigError.

        The ranks agree on limits: what the one with the least memory can hold.
        """
        model, team = self.model, self.team
        if team is None:
            return asyncio.run(self.call(model.prepare, progress))
        team.meet()
        tell = _Slowest(model.world.tp_size, progress)
        team.on_progress = tell
        placement = None if model.placement is None else model.placement.to_table()
        builds = team.ask(Build(model.config, model.world, placement))
        budget = asyncio.run(self.call(model.load, lambda name, percent: tell(0, name, percent)))
        limits = model.resolve(min([budget, *(done.value for done in all_done(builds))]))
        asked = team.ask(Allocate(limits))
        asyncio.run(self.call(model.allocate, limits, lambda name, percent: tell(0, name, percent)))
        all_done(asked)
        return limits

    async def died(self) -> Exception:
        """Returns why this engine cannot go on, once one of its ranks is gone."""
        if self.team is None:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
        return await asyncio.wrap_future(self.team.dead)

    # For the core; see `GroupRunner`.

    @property
    def placed(self) -> int:
        own = self.model.peers.placed
        return own if self.team is None else min(own, self.team.placed)

    async def join(self, join: Join) -> None:
        self._lost, self.overtaken = None, False
        self._dp_rank = join.dp_rank
        self._policy.restart()
        others = self._ask(Meet(join))
        own: asyncio.Future[None] = asyncio.ensure_future(
            self.call(self.model.join, Members.of(join, 0), join.placement)
        )
        both: tuple[asyncio.Future[Any], ...] = own, others
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not own.done():
                checked(others.result())  # a worker that failed will not be waited for
            await own
            checked(await others)
        except BaseException as exc:
            self._lost = exc if isinstance(exc, PeerLost) else PeerLost("this engine did not join its group")
            for task in both:
                task.cancel()
            raise

    async def leave(self) -> None:
        self._lost = self._lost or PeerLost("this engine left its group")
        parted = self._ask(Part())
        idle = asyncio.ensure_future(self._idle())
        while not idle.done():
            self.model.leave()
            await asyncio.wait({idle}, timeout=LEAVE_AGAIN_S)
        await idle
        self.model.leave()  # a `join` may have got through just before its thread was idle
        await parted

    def _ask(self, what: msgspec.Struct) -> asyncio.Future[list[OrderDone]]:
        """The answers of the engine's other ranks."""
        asked = [] if self.team is None else self.team.ask(what)
        answers = asyncio.gather(*(asyncio.wrap_future(one) for one in asked))
        answers.add_done_callback(lambda done: done.cancelled() or done.exception())  # `died` says it as well
        return answers

    def prepare(self, placement: PlacementTable) -> None:
        if self.team is not None:
            self.team.ask(Prepare(placement))
        self.model.peers.prepare(placement)

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        return self._policy.ubatches_ok(plan)

    def close(self) -> None:
        model = self.__dict__.pop("model", None)
        if model is None:
            return
        if self.team is not None:
            self.team.close()
        closing = threading.Thread(target=super().close, name="runner stop")
        closing.start()
        while closing.is_alive():  # whatever the runner's thread waits for
            model.leave()
            closing.join(LEAVE_AGAIN_S)
        model.close()

    def _handle(self, plan: StepPlan) -> StepFuture[StepResult]:
        return _Noted(plan, self._policy)

    # In the runner's thread.

    def _begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._newest = plan
        team = self.team
        if team is None:
            return super()._begin(plan)
        asked = team.ask(Run(encode_plan(plan)))
        collect = super()._begin(plan)

        def wait() -> StepResult:
            result = collect()
            done = all_done(asked)
            mine = checksum(result)
            for tp_rank, other in enumerate(done, 1):
                if other.value != mine:
                    raise EngineDied(
                        f"tensor-parallel rank {tp_rank} has other tokens than rank 0 in step {plan.step}: the "
                        "machine's arithmetic is not reproducible, or a bug of ours"
                    )
            if self.on_traced is not None and plan.agreed is not None and plan.agreed.trace:
                for traced in team.traced(done, plan.agreed.step, self._dp_rank):
                    self.on_traced(traced)
            return result

        return wait

    def _refusal(self) -> Exception | None:
        refusal = super()._refusal()
        if refusal is None and self._lost is not None:
            return PeerLost(str(self._lost), self._lost.missing)
        return refusal

    def _fail(self, plan: StepPlan, handle: StepFuture[StepResult], exc: BaseException) -> None:
        if isinstance(exc, PeerLost):
            self._lost = self._lost or exc
            self.overtaken = self.overtaken or self._newest is not plan
            handle.fail(exc)
        else:
            super()._fail(plan, handle, exc)


class _Noted(StepFuture[StepResult]):
    """Lets the policy of micro-batches learn from the result."""

    def __init__(self, plan: StepPlan, policy: OverlapPolicy) -> None:
        super().__init__()
        self._plan = plan
        self._policy = policy

    def _set_result(self, value: StepResult) -> None:
        self._policy.note(self._plan, value)
        super()._set_result(value)


class _Slowest:
    """Progress of several ranks as one: that of the rank that is behind."""

    def __init__(self, size: int, progress: Progress) -> None:
        self._at = [("starting", 0)] * size
        self._progress = progress
        self._told = 0

    def __call__(self, tp_rank: int, name: str, percent: int) -> None:
        self._at[tp_rank] = name, percent
        name, percent = min(self._at, key=lambda at: at[1])
        if percent > self._told:
            self._told = percent
            self._progress(name, percent)


def checksum(result: StepResult) -> int:
    """Of the tokens that a step sampled: equal on all ranks of an engine."""
    return zlib.crc32(result.tokens_S.tobytes())
