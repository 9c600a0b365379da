"""Several engines on one event loop: real cores and DP coordinators around fake models.

A step needs all ranks, as with a real exchange, and breaks off in the middle when the test says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from moeserve.actor.actor import Inbox
from moeserve.cluster.assemble import join_group
from moeserve.config import Limits
from moeserve.engine.group_core import GroupCore
from moeserve.engine.plan import GrammarJob, StepDecision, StepPlan, StepResult
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import PeerLost
from moeserve.messages import (
    Drain,
    EngineIn,
    EngineOut,
    FinishReason,
    Join,
    Joined,
    LeftGroup,
    PlacementResult,
    PlacementTable,
    StepOutput,
    Submit,
)
from tests.engine.fake_model import VOCAB, FakeModelRunner, oracle
from tests.engine.harness import EOS, FULL, limits_of, submit_of


class Exchange:
    """The collectives of one epoch.

    A step ends on a rank once all ranks have started it. All must agree on its decision.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.steps: dict[int, StepDecision] = {}
        self.here: dict[int, set[int]] = {}
        self.broken = False
        self._changed = asyncio.Event()

    async def meet(self, rank: int, decision: StepDecision) -> None:
        assert self.steps.setdefault(decision.step, decision) == decision, (
            "the ranks run different steps"
        )
        self.here.setdefault(decision.step, set()).add(rank)
        self._change()
        while len(self.here[decision.step]) < self.size or self.broken:
            if self.broken:
                raise PeerLost("the exchange broke")
            await self._changed.wait()

    def break_off(self) -> None:
        self.broken = True
        self._change()

    def _change(self) -> None:
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()


class GroupModel:
    """A GroupRunner around the fake model.

    A step that fails has applied its tables and overwritten its KV entries.
    """

    on_placement_result: Callable[[PlacementResult], None] | None = None
    overtaken = False
    # Whether a step may start before the previous one has ended, so that both fail and overwrite.
    ahead = False

    def __init__(
        self, limits: Limits, rank: int, exchanges: dict[int, Exchange], rng: random.Random
    ) -> None:
        self.model = FakeModelRunner(limits, FULL)
        self.rank = rank
        self.exchanges = exchanges
        self.rng = rng
        self.exchange: Exchange | None = None
        self.prepared = 0
        self.gives_up = False
        self.seen: list[StepDecision] = []
        self.num_empty = 0
        self.failing: BaseException | None = None
        self._last: asyncio.Task[StepResult] | None = None
        self._moved = -1
        self.grammar_s = 0.0  # the most that compiling a grammar takes
        self.grammars: dict[int, list[int]] = {}  # prepared answers by ticket

    def prepare_grammar(self, job: GrammarJob, on_done: Callable[[str], None]) -> None:
        def prepared() -> None:
            self.grammars[job.ticket] = job.answer
            on_done("")

        asyncio.get_running_loop().call_later(self.grammar_s * self.rng.random(), prepared)

    def drop_grammars(self, tickets: Sequence[int]) -> None: ...

    def start(self, plan: StepPlan) -> Step:
        self._last = asyncio.create_task(self._run(plan, self._last, self.exchange))
        self._last.add_done_callback(lambda task: task.cancelled() or task.exception())
        return Step(self._last)

    async def _run(
        self, plan: StepPlan, before: asyncio.Task[StepResult] | None, began: Exchange | None
    ) -> StepResult:
        if before is not None:
            await asyncio.wait({before})
        if self.failing is not None:
            raise self.failing
        exchange = self.exchange
        decision = plan.decision
        if exchange is None or exchange.broken:
            if self.ahead and began is not None:
                self._execute(plan, spoil=True)
                self.overtaken = True
            raise PeerLost("not connected")
        assert decision is not None
        assert not self.seen or decision.step > self.seen[-1].step
        assert plan.num_tokens <= decision.most_tokens[0] + decision.most_tokens[1]
        self.seen.append(decision)
        self.num_empty += not len(plan.slots_R)
        try:
            await exchange.meet(self.rank, decision)
            for _ in range(self.rng.randrange(4)):
                await asyncio.sleep(0)
            if exchange.broken:  # other ranks may have finished the step
                raise PeerLost("the exchange broke")
        except PeerLost:
            self._execute(plan, spoil=True)
            self.exchange = None
            raise
        return self._execute(plan)

    def _execute(self, plan: StepPlan, spoil: bool = False) -> StepResult:
        # A retried step: its blocks were stored at the first attempt and have other contents now.
        if plan.step == self._moved:
            plan = _without_stores(plan)
        elif plan.step >= 0:
            self._moved = plan.step
        for new in plan.new_requests:
            if new.sampling.grammar is not None:
                answer = new.tokens[new.num_prompt :].tolist()
                assert self.grammars[new.grammar_ticket] == answer
        tokens = self.model.tokens.copy()
        result = self.model.execute(plan)
        if spoil:
            self.model.tokens = np.where(tokens >= 0, tokens, self.model.tokens)
            for slot, start, count in zip(plan.slots_R, plan.starts_R, plan.counts_R, strict=True):
                if plan.samples_R[plan.slots_R.tolist().index(slot)]:
                    # A wrong token, or none.
                    self.model.tokens[slot, start + count] = 3 if self.ahead else -1
                where = np.arange(start, start + count)
                self.model.spoil(int(slot), where)
        return result

    async def join(self, join: Join) -> None:
        self.exchange = self.exchanges.setdefault(join.epoch, Exchange(len(join.hosts)))
        self.seen = []
        self.overtaken = False

    async def leave(self) -> None:
        if self.exchange is not None:
            self.exchange.break_off()
        if self._last is not None:
            await asyncio.wait({self._last})

    def prepare(self, placement: PlacementTable) -> None:
        self.prepared = -placement.version if self.gives_up else 2 * placement.version

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        return self.rng.random() < 0.7

    def close(self) -> None: ...


@dataclass(frozen=True)
class Step:
    task: asyncio.Task[StepResult]

    async def result(self) -> StepResult:
        return await asyncio.shield(self.task)


def _without_stores(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, stores=())


@dataclass
class Answer:
    msg: Submit
    rank: int
    tokens: list[int] = field(default_factory=list)
    finish: str = ""


class Engine:
    def __init__(self, group: Group, rank: int) -> None:
        self.rank = rank
        self.group = group
        self.inbox: Inbox[EngineIn] = Inbox(f"engine {rank}")
        self.out: list[EngineOut] = []
        self.scheduler = Scheduler(group.limits, FULL, eos_ids=(EOS,), vocab_size=VOCAB)
        self.runner = GroupModel(group.limits, rank, group.exchanges, group.rng)
        self.core = GroupCore(
            self.scheduler, self.runner, self.inbox, self._hear, partial(join_group, self.runner)
        )
        self.task = asyncio.create_task(self.core.run())
        self.dead = False

    def tell(self, msg: EngineIn) -> None:
        """Send a message as the cluster does: one for an ended engine is dropped."""
        if not self.inbox.closed:
            self.inbox.put(msg, force=True)

    def _hear(self, msg: EngineOut) -> None:
        if self.dead:
            return
        self.out.append(msg)
        self.group.hear(self.rank, msg)


class Group:
    """Plays the front end.

    It numbers epochs, sends every engine its Join, and resubmits the requests of a dead engine.
    """

    def __init__(self, size: int, rng: random.Random | None = None, **limits: int | bool) -> None:
        self.size = size
        self.rng = rng or random.Random(0)
        self.limits = limits_of(**limits)
        self.exchanges: dict[int, Exchange] = {}
        self.answers: dict[int, Answer] = {}
        self.epoch = 0
        self.joined: dict[int, int] = {}
        self.left: list[tuple[int, LeftGroup]] = []
        self.rejoins = True
        self._folder = tempfile.TemporaryDirectory(prefix="moeserve-test-")
        self.engines = [Engine(self, rank) for rank in range(size)]

    async def __aenter__(self) -> Group:
        self.send_joins()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for engine in self.engines:
            engine.task.cancel()
        await asyncio.gather(*(engine.task for engine in self.engines), return_exceptions=True)
        self._folder.cleanup()

    def send_joins(self, ranks: list[int] | None = None) -> None:
        self.epoch += 1
        directory = f"{self._folder.name}/{self.epoch}"
        os.mkdir(directory, 0o700)
        for rank in range(self.size) if ranks is None else ranks:
            self.engines[rank].tell(self.join_of(rank, directory))

    def join_of(self, rank: int, directory: str, token: str = "t") -> Join:
        return Join(
            epoch=self.epoch,
            dp_rank=rank,
            tp_size=1,
            hosts=("here",) * self.size,
            directory=directory,
            store="127.0.0.1:0",
            token=token,
        )

    def submit(self, rank: int, rid: int, prompt: list[int], **sampling: object) -> Answer:
        msg = submit_of(rid, prompt, **sampling)  # type: ignore[arg-type]
        self.answers[rid] = Answer(msg, rank)
        self.engines[rank].tell(msg)
        return self.answers[rid]

    def hear(self, rank: int, msg: EngineOut) -> None:
        if isinstance(msg, Joined):
            self.joined[rank] = msg.epoch
        elif isinstance(msg, LeftGroup):
            self.left.append((rank, msg))
            if self.rejoins and msg.epoch == self.epoch:
                self.send_joins()
        elif isinstance(msg, StepOutput):
            rids = np.frombuffer(msg.rids, "<i8").tolist()
            for rid, token, finish in zip(
                rids, np.frombuffer(msg.tokens, "<i4").tolist(), msg.finish, strict=True
            ):
                answer = self.answers[rid]
                assert not answer.finish, f"request {rid} goes on after its end"
                assert answer.rank == rank
                answer.tokens += [token] if token >= 0 else []
                answer.finish = FinishReason.NAMES[finish]

    def break_off(self) -> None:
        if (exchange := self.exchanges.get(self.epoch)) is not None:
            exchange.break_off()

    async def kill(self, rank: int) -> None:
        """Kill an engine; a fresh one replaces it and gets its unfinished requests again."""
        old = self.engines[rank]
        old.dead = True
        old.task.cancel()
        self.break_off()
        await asyncio.gather(old.task, return_exceptions=True)
        self.engines[rank] = Engine(self, rank)
        self.send_joins()
        for answer in self.answers.values():
            if answer.rank == rank and not answer.finish:
                prompt = np.frombuffer(answer.msg.tokens, "<i4").tolist()
                again = np.array(prompt + answer.tokens, "<i4").tobytes()
                self.engines[rank].tell(msgspec.structs.replace(answer.msg, tokens=again))

    async def until(self, condition: Callable[[], bool], what: str = "") -> None:
        for _ in range(20_000):
            if condition():
                return
            for engine in self.engines:
                if engine.task.done() and not engine.dead and (error := engine.task.exception()):
                    raise error
            await asyncio.sleep(0.0005)
        raise AssertionError(f"never happened: {what}; {self.states()}")

    def states(self) -> list[object]:
        return [
            (e.rank, e.core._coordinator is not None, e.core.busy, len(e.core._in_flight))
            for e in self.engines
        ]

    async def all_answered(self) -> None:
        await self.until(
            lambda: all(answer.finish for answer in self.answers.values()), "all answers"
        )

    async def drained(self, deadline_s: float = 20.0) -> None:
        self.rejoins = False
        for engine in self.engines:
            engine.tell(Drain(deadline_s))
        await asyncio.wait_for(asyncio.gather(*(engine.task for engine in self.engines)), 10.0)
        for engine in self.engines:
            engine.scheduler.audit()

    def check(self) -> None:
        """Check that every answer is the oracle's, or a prefix of it if aborted."""
        for answer in self.answers.values():
            prompt = np.frombuffer(answer.msg.tokens, "<i4").tolist()
            tokens, finish = oracle(FULL, prompt, answer.msg.sampling, self.limits.max_model_len)
            if answer.finish == "abort":
                assert answer.tokens == tokens[: len(answer.tokens)]
            else:
                assert (answer.tokens, answer.finish) == (tokens, finish), answer
