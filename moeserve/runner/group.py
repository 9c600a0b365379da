"""The runner of an engine that steps together with other engines, has several ranks, or both.

If a step fails because a rank was lost, its plan can run again after the next `join`. Any other
error is final, as in `ThreadedRunner`.
"""

import asyncio
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec

from moeserve.comm.members import Members
from moeserve.config import Limits
from moeserve.engine.plan import GrammarJob, StepPlan, StepResult, encode_plan
from moeserve.errors import EngineDied, PeerLost
from moeserve.messages import Join, PlacementResult, PlacementTable, Traced
from moeserve.runner.base import ModelRunnerBase
from moeserve.runner.commands import (
    Allocate,
    Build,
    CommandDone,
    DropGrammars,
    Leave,
    Prepare,
    PrepareGrammar,
    Run,
)
from moeserve.runner.dbo import OverlapPolicy
from moeserve.runner.load import Progress
from moeserve.runner.remote import Team, all_done, raise_if_lost
from moeserve.runner.thread import StepFuture, ThreadedRunner

# Interval at which to close connections again, because one may have been made in the meantime.
LEAVE_INTERVAL_S = 0.1


class GroupedRunner(ThreadedRunner):
    """The `GroupRunner` (engine/vote.py) of an engine's leader.

    model: the rank of this process.
    team: the other ranks of the engine; None if there are none.
    """

    def __init__(self, model: ModelRunnerBase, team: Team | None = None) -> None:
        super().__init__(model)
        self.team = team
        self.on_placement_result: Callable[[PlacementResult], None] | None = None
        self._on_traced: Callable[[Traced], object] | None = None
        model.on_placement_result = self._forward_placement_result
        self._lost: PeerLost | None = PeerLost("this engine has not joined its group yet")
        self.overtaken = False
        self._last_begun: StepPlan | None = None
        self._dp_rank = 0
        self._policy = OverlapPolicy(
            "off" if len(model.ubatches.ubatches) == 1 else model.config.parallel.dbo
        )

    def watch_traces(self, on_traced: Callable[[Traced], object]) -> None:
        """Call `on_traced` with the traces of other ranks, from any thread."""
        self._on_traced = on_traced

    def prepare_model(self, progress: Progress) -> Limits:
        """Load and warm up all ranks of the engine. To be called in a thread without an event loop.

        Return the limits of all ranks. They fit in the memory of the rank with the least memory.
        Raises ConfigError.
        """
        model = self.runner
        team = self.team
        if team is None:
            return asyncio.run(self.call(model.prepare, progress))
        team.wait_connected()
        report = team.on_progress = _SlowestProgress(model.world.tp_size, progress)
        asyncio.run(self.call(model.fit))  # for all ranks
        placement = None if model.placement is None else model.placement.to_table()
        builds = team.send(Build(model.config, model.world, placement))
        budget = asyncio.run(self.call(model.load, lambda name, percent: report(0, name, percent)))
        limits = model.resolve(min([budget, *(done.value for done in all_done(builds))]))
        allocations = team.send(Allocate(limits))
        asyncio.run(
            self.call(model.allocate, limits, lambda name, percent: report(0, name, percent))
        )
        all_done(allocations)
        return limits

    async def died(self) -> Exception:
        """Wait until one of the engine's ranks is gone. Return the cause."""
        if self.team is None:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
        return await asyncio.wrap_future(self.team.dead)

    @property
    def prepared(self) -> int:
        """The progress of the engine's slowest rank with the pending placement."""
        own_progress = self.runner.peers.prepared
        return own_progress if self.team is None else min(own_progress, self.team.prepared)

    async def join(self, join: Join) -> None:
        """Connect all ranks of the engine with the other engines'. Raises PeerLost."""
        self._lost = None
        self.overtaken = False
        self._dp_rank = join.dp_rank
        members = Members.of(join, 0)
        self._policy.restart(members.size)
        workers_joined = self._send(join)
        leader_joined: asyncio.Future[None] = asyncio.ensure_future(
            self.call(self.runner.join, members, join.placement)
        )
        joining: tuple[asyncio.Future[Any], ...] = leader_joined, workers_joined
        try:
            await asyncio.wait(joining, return_when=asyncio.FIRST_COMPLETED)
            if not leader_joined.done():
                # Raises if a worker failed, without waiting for the leader.
                raise_if_lost(workers_joined.result())
            await leader_joined
            raise_if_lost(await workers_joined)
        except BaseException as exc:
            self._lost = (
                exc if isinstance(exc, PeerLost) else PeerLost("this engine did not join its group")
            )
            for task in joining:
                task.cancel()
            raise

    async def leave(self) -> None:
        """Close all connections, and wait until no step runs on any rank."""
        self._lost = self._lost or PeerLost("this engine left its group")
        workers_left = self._send(Leave())
        idle = asyncio.ensure_future(self._idle())
        while not idle.done():
            self.runner.leave()
            await asyncio.wait({idle}, timeout=LEAVE_INTERVAL_S)
        await idle
        self.runner.leave()  # a `join` may have succeeded just before its thread became idle
        await workers_left

    def _send(self, what: msgspec.Struct) -> asyncio.Future[list[CommandDone]]:
        """Send a command to the engine's other ranks. Return a future of their results."""
        sent = [] if self.team is None else self.team.send(what)
        results = asyncio.gather(*map(asyncio.wrap_future, sent))
        # Retrieve the exception, so that asyncio does not warn if nobody awaits the results. `died`
        # reports the same exception.
        results.add_done_callback(lambda done: done.cancelled() or done.exception())
        return results

    def _forward_placement_result(self, result: PlacementResult) -> None:
        callback = self.on_placement_result  # the core may set it to None in the meantime
        if callback is not None:
            callback(result)

    def prepare(self, placement: PlacementTable) -> None:
        """Start to prepare a placement on all ranks in the background."""
        if self.team is not None:
            self.team.send(Prepare(placement))
        self.runner.peers.prepare(placement)

    def prepare_grammar(self, job: GrammarJob, on_done: Callable[[str], None]) -> None:
        """Prepare a grammar on all ranks of the engine."""
        if self.team is None:
            super().prepare_grammar(job, on_done)
            return
        sent = self.team.send(PrepareGrammar(job))
        all_ranks = _AllPrepared(1 + len(sent), on_done)
        for result in sent:
            result.add_done_callback(all_ranks.add_result)
        super().prepare_grammar(job, all_ranks.add)

    def drop_grammars(self, tickets: Sequence[int]) -> None:
        """Drop prepared grammars on all ranks."""
        if self.team is not None:
            self.team.send(DropGrammars(list(tickets)))
        super().drop_grammars(tickets)

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        """Whether two micro-batches would be faster for this plan, or as fast."""
        return self._policy.ubatches_ok(plan)

    def close(self) -> None:
        """End the other ranks, then this one, even while a step waits for peers."""
        model = self.__dict__.get("runner")
        if model is None:
            return
        if self.team is not None:
            self.team.close()
        closing = threading.Thread(target=super().close, name="runner stop")
        closing.start()
        while closing.is_alive():  # the runner's thread may wait for peers
            model.leave()
            closing.join(LEAVE_INTERVAL_S)
        model.close()

    # In the runner's thread.

    def _begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._last_begun = plan
        if self.team is not None and plan.num_drafts_R is not None:
            # All ranks use the drafts of this rank. The drafts of other ranks could differ: if a
            # step failed on one rank and runs again, the proposers of other ranks have already seen
            # its result.
            plan = replace(plan, drafts_N=self.runner.drafts_of(plan).cpu().numpy())
        sent = [] if self.team is None else self.team.send(Run(encode_plan(plan)))
        collect = super()._begin(plan)

        def wait() -> StepResult:
            result = collect()
            if self.team is not None:
                done = all_done(sent)
                self._check_and_forward(self.team, plan, result, done)
                if any(other.kv_lost for other in done):
                    result = replace(result, kv_lost=True)
            self._policy.note(plan, result)
            return result

        return wait

    def _check_and_forward(
        self, team: Team, plan: StepPlan, result: StepResult, done: Sequence[CommandDone]
    ) -> None:
        """Raise EngineDied if a rank has other tokens than this rank. Forward the ranks' traces."""
        expected = checksum(result)
        for tp_rank, other in enumerate(done, 1):
            if other.value != expected:
                raise EngineDied(
                    f"tensor-parallel rank {tp_rank} has other tokens than rank 0 in step "
                    f"{plan.step}: the machine's arithmetic is not reproducible, or there is a bug "
                    "in moeserve"
                )
        if self._on_traced is not None and plan.decision is not None and plan.decision.trace:
            for traced in team.traced(done, plan.decision.step, self._dp_rank):
                self._on_traced(traced)

    def _refusal(self) -> Exception | None:
        refusal = super()._refusal()
        if refusal is None and self._lost is not None:
            return PeerLost(str(self._lost), self._lost.missing)
        return refusal

    def _fail(
        self, plan: StepPlan, handle: StepFuture[StepResult] | None, exc: BaseException
    ) -> None:
        if isinstance(exc, PeerLost):
            self._lost = self._lost or exc
            self.overtaken = self.overtaken or (handle is not None and self._last_begun is not plan)
            if handle is not None:
                handle.fail(exc)
        else:
            super()._fail(plan, handle, exc)


class _AllPrepared:
    """Waits until all ranks have prepared a grammar. Then calls `on_done` with the first error, or
    with "".

    If a rank is lost, `on_done` is never called, but then the engine ends.
    """

    def __init__(self, size: int, on_done: Callable[[str], None]) -> None:
        self._num_missing = size
        self._error = ""
        self._on_done = on_done
        self._lock = threading.Lock()

    def add(self, error: str) -> None:
        """Add the result of one rank. May be called from any thread."""
        with self._lock:
            self._num_missing -= 1
            self._error = self._error or error
            is_complete = not self._num_missing
        if is_complete:
            self._on_done(self._error)

    def add_result(self, result: "Future[CommandDone]") -> None:
        """Add the result of another rank. For `Future.add_done_callback`."""
        if not result.cancelled() and result.exception() is None:
            self.add(result.result().error)


class _SlowestProgress:
    """Reports the progress of the slowest of several ranks."""

    def __init__(self, size: int, progress: Progress) -> None:
        self._phases = [("starting", 0)] * size  # phase and percent of each rank
        self._progress = progress
        self._reported_percent = 0

    def __call__(self, tp_rank: int, name: str, percent: int) -> None:
        self._phases[tp_rank] = name, percent
        name, percent = min(self._phases, key=lambda phase: phase[1])
        if percent > self._reported_percent:
            self._reported_percent = percent
            self._progress(name, percent)


def checksum(result: StepResult) -> int:
    """Return a checksum of a step's tokens, which must be equal on all ranks of an engine."""
    arrays = result.tokens_N, result.counts_S
    return zlib.crc32(b"".join(array.tobytes() for array in arrays if array is not None))
