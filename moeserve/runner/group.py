"""The runner of an engine that steps together with other engines, or has several ranks, or both.

A step that fails because a rank was lost leaves everything usable: its plan is run again after the
next `join`. Any other error is final, as in `ThreadedRunner`.
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
from moeserve.runner.remote import Team, all_done, checked
from moeserve.runner.thread import StepFuture, ThreadedRunner

LEAVE_AGAIN_S = (
    0.1  # between attempts: a connection may have been made while the others were dropped
)


class GroupedRunner(ThreadedRunner):
    """The `GroupRunner` (engine/vote.py) of an engine's leader. model: this process's rank. team:
    the engine's other ranks, None if it has none. on_placement_result: set by the core, called from any
    thread."""

    def __init__(self, model: ModelRunnerBase, team: Team | None = None) -> None:
        super().__init__(model)
        self.team = team
        self.on_placement_result: Callable[[PlacementResult], None] | None = None
        self._on_traced: Callable[[Traced], object] | None = None
        model.on_placement_result = lambda result: (
            (callback := self.on_placement_result) and callback(result)
        )  # it may become None meanwhile
        self._lost: PeerLost | None = PeerLost("this engine has not joined its group yet")
        self.overtaken = False
        self._newest: StepPlan | None = None  # the last one that has begun
        self._dp_rank = 0
        self._policy = OverlapPolicy(
            "off" if len(model.ubatches.ubatches) == 1 else model.config.parallel.dbo
        )

    def watch_traces(self, on_traced: Callable[[Traced], object]) -> None:
        """Call `on_traced` with the traces of other ranks, from any thread."""
        self._on_traced = on_traced

    def prepare_model(self, progress: Progress) -> Limits:
        """Load and warms up all ranks of the engine, in a thread without a loop. Raises
        ConfigError.

        Returns the limits of all ranks: what the rank with the least memory can hold.
        """
        model = self.runner
        team = self.team
        if team is None:
            return asyncio.run(self.call(model.prepare, progress))
        team.wait_connected()
        report = team.on_progress = _SlowestProgress(model.world.tp_size, progress)
        placement = None if model.placement is None else model.placement.to_table()
        builds = team.ask(Build(model.config, model.world, placement))
        budget = asyncio.run(self.call(model.load, lambda name, percent: report(0, name, percent)))
        limits = model.resolve(min([budget, *(done.value for done in all_done(builds))]))
        asked = team.ask(Allocate(limits))
        asyncio.run(
            self.call(model.allocate, limits, lambda name, percent: report(0, name, percent))
        )
        all_done(asked)
        return limits

    async def died(self) -> Exception:
        """Return why this engine cannot go on, once one of its ranks is gone."""
        if self.team is None:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
        return await asyncio.wrap_future(self.team.dead)

    @property
    def prepared(self) -> int:
        """The progress of the engine's slowest rank with the pending placement."""
        own = self.runner.peers.prepared
        return own if self.team is None else min(own, self.team.prepared)

    async def join(self, join: Join) -> None:
        """Connect all ranks of the engine with the other engines'. Raises PeerLost."""
        self._lost = None
        self.overtaken = False
        self._dp_rank = join.dp_rank
        members = Members.of(join, 0)
        self._policy.restart(members.size)
        others = self._ask(join)
        own: asyncio.Future[None] = asyncio.ensure_future(
            self.call(self.runner.join, members, join.placement)
        )
        both: tuple[asyncio.Future[Any], ...] = own, others
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not own.done():
                checked(others.result())  # a worker that failed will not be waited for
            await own
            checked(await others)
        except BaseException as exc:
            self._lost = (
                exc if isinstance(exc, PeerLost) else PeerLost("this engine did not join its group")
            )
            for task in both:
                task.cancel()
            raise

    async def leave(self) -> None:
        """Drop all connections; returns when no step runs any more on any rank."""
        self._lost = self._lost or PeerLost("this engine left its group")
        left = self._ask(Leave())
        idle = asyncio.ensure_future(self._idle())
        while not idle.done():
            self.runner.leave()
            await asyncio.wait({idle}, timeout=LEAVE_AGAIN_S)
        await idle
        self.runner.leave()  # a `join` may have got through just before its thread was idle
        await left

    def _ask(self, what: msgspec.Struct) -> asyncio.Future[list[CommandDone]]:
        """Send the engine's other ranks a command. Returns their answers."""
        asked = [] if self.team is None else self.team.ask(what)
        answers = asyncio.gather(*map(asyncio.wrap_future, asked))
        answers.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # `died` reports it as well
        return answers

    def prepare(self, placement: PlacementTable) -> None:
        """Begin to prepare a placement on all ranks, in the background."""
        if self.team is not None:
            self.team.ask(Prepare(placement))
        self.runner.peers.prepare(placement)

    def prepare_grammar(self, job: GrammarJob, on_done: Callable[[str], None]) -> None:
        """Prepare a grammar on all ranks of the engine."""
        if self.team is None:
            super().prepare_grammar(job, on_done)
            return
        asked = self.team.ask(PrepareGrammar(job))
        all_ranks = _AllPrepared(1 + len(asked), on_done)
        for answer in asked:
            answer.add_done_callback(all_ranks.add_answer)
        super().prepare_grammar(job, all_ranks.add)

    def drop_grammars(self, tickets: Sequence[int]) -> None:
        """Forget prepared grammars on all ranks."""
        if self.team is not None:
            self.team.ask(DropGrammars(list(tickets)))
        super().drop_grammars(tickets)

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        """Whether two micro-batches would pay for this plan."""
        return self._policy.ubatches_ok(plan)

    def close(self) -> None:
        """End the other ranks, then this one, also in the middle of a step that waits for peers."""
        model = self.__dict__.get("runner")
        if model is None:
            return
        if self.team is not None:
            self.team.close()
        closing = threading.Thread(target=super().close, name="runner stop")
        closing.start()
        while closing.is_alive():  # its thread may wait for peers
            model.leave()
            closing.join(LEAVE_AGAIN_S)
        model.close()

    # In the runner's thread.

    def _begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._newest = plan
        if self.team is not None and plan.num_drafts_R is not None:
            # What this rank guesses goes for all: a proposer that has had a step which runs again,
            # because it failed on another rank, guesses something else than the others.
            plan = replace(plan, drafts_N=self.runner.drafts_of(plan).cpu().numpy())
        asked = [] if self.team is None else self.team.ask(Run(encode_plan(plan)))
        collect = super()._begin(plan)

        def wait() -> StepResult:
            result = collect()
            if self.team is not None:
                done = all_done(asked)
                self._compare(self.team, plan, result, done)
                if any(answer.kv_lost for answer in done):
                    result = replace(result, kv_lost=True)
            self._policy.note(plan, result)
            return result

        return wait

    def _compare(
        self, team: Team, plan: StepPlan, result: StepResult, done: Sequence[CommandDone]
    ) -> None:
        """Raise EngineDied if a rank has other tokens than this one; forward their traces."""
        mine = checksum(result)
        for tp_rank, answer in enumerate(done, 1):
            if answer.value != mine:
                raise EngineDied(
                    f"tensor-parallel rank {tp_rank} has other tokens than rank 0 in step "
                    f"{plan.step}: the machine's "
                    "arithmetic is not reproducible, or there is a bug in moeserve"
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
            self.overtaken = self.overtaken or (handle is not None and self._newest is not plan)
            if handle is not None:
                handle.fail(exc)
        else:
            super()._fail(plan, handle, exc)


class _AllPrepared:
    """Waits for the reports of all ranks about one grammar, then passes on the first error or "".

    A rank that is lost never reports: its engine ends.
    """

    def __init__(self, size: int, on_done: Callable[[str], None]) -> None:
        self._missing = size
        self._error = ""
        self._on_done = on_done
        self._lock = threading.Lock()

    def add(self, error: str) -> None:
        """Add one rank's report; from any thread."""
        with self._lock:
            self._missing -= 1
            self._error = self._error or error
            complete = not self._missing
        if complete:
            self._on_done(self._error)

    def add_answer(self, answer: "Future[CommandDone]") -> None:
        """Add the report of another rank."""
        if not answer.cancelled() and answer.exception() is None:
            self.add(answer.result().error)


class _SlowestProgress:
    """Reports the progress of several ranks as one: that of the slowest."""

    def __init__(self, size: int, progress: Progress) -> None:
        self._at = [("starting", 0)] * size
        self._progress = progress
        self._reported = 0

    def __call__(self, tp_rank: int, name: str, percent: int) -> None:
        self._at[tp_rank] = name, percent
        name, percent = min(self._at, key=lambda at: at[1])
        if percent > self._reported:
            self._reported = percent
            self._progress(name, percent)


def checksum(result: StepResult) -> int:
    """Return a checksum of a step's tokens, which is equal on all ranks of an engine."""
    arrays = result.tokens_N, result.counts_S
    return zlib.crc32(b"".join(array.tobytes() for array in arrays if array is not None))
