"""The core loop: every message is answered, steps keep their order, and its end has a reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest

from moeserve.actor.actor import Inbox
from moeserve.config import Limits
from moeserve.engine.core import EngineCore
from moeserve.engine.null_runner import NullRunner
from moeserve.engine.plan import GrammarJob, StepPlan, StepResult
from moeserve.engine.scheduler import Scheduler
from moeserve.messages import (
    Abort,
    AbortAll,
    Drain,
    EngineIn,
    EngineOut,
    FinishReason,
    Ping,
    Pong,
    Refused,
    StepOutput,
    Stopped,
)
from tests.engine.fake_model import VOCAB, FakeModelRunner, oracle
from tests.engine.harness import FULL, GRAMMAR, limits_of, submit_of

PROMPT = [20, 21, 22, 23, 24, 25]


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Held:
    """A runner whose results come one at a time, when the test lets them."""

    def __init__(self, limits: Limits) -> None:
        self.model = FakeModelRunner(limits, FULL)
        self.gate = asyncio.Semaphore(0)
        self.started: list[StepPlan] = []
        self.broken: str | None = None
        self.grammars: dict[int, tuple[GrammarJob, Callable[[str], None]]] = {}

    def start(self, plan: StepPlan) -> Held:
        self.started.append(plan)
        self.model.start(plan)
        return self

    async def result(self) -> StepResult:
        await self.gate.acquire()
        if self.broken:
            raise RuntimeError(self.broken)
        return self.model.result()

    def prepare_grammar(self, job: GrammarJob, on_done: Callable[[str], None]) -> None:
        self.grammars[job.ticket] = job, on_done

    def drop_grammars(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            self.grammars.pop(ticket, None)

    def let(self, count: int) -> None:
        for _ in range(count):
            self.gate.release()

    def close(self) -> None: ...


class Engine:
    def __init__(self, limits: Limits | None = None) -> None:
        limits = limits or limits_of()
        self.runner = Held(limits)
        self.inbox: Inbox[EngineIn] = Inbox("engine")
        self.out: list[EngineOut] = []
        self.clock = ManualClock()
        self.scheduler = Scheduler(limits, FULL, vocab_size=VOCAB)
        self.core = EngineCore(
            self.scheduler, self.runner, self.inbox, self.out.append, clock=self.clock
        )

    async def quiet(self) -> None:
        """Lets the loop run until it waits for a result or a message."""
        for _ in range(20):
            await asyncio.sleep(0)

    def tokens(self, rid: int) -> tuple[list[int], str]:
        tokens = []
        finish = ""
        for msg in self.out:
            if isinstance(msg, StepOutput):
                rids = np.frombuffer(msg.rids, "<i8").tolist()
                rows = zip(rids, np.frombuffer(msg.tokens, "<i4").tolist(), msg.finish, strict=True)
                for row_rid, token, code in rows:
                    if row_rid == rid:
                        tokens += [token] if token >= 0 else []
                        finish = FinishReason.NAMES[code]
        return tokens, finish


@contextlib.asynccontextmanager
async def engine(limits: Limits | None = None) -> AsyncIterator[Engine]:
    running = Engine(limits)
    task = asyncio.create_task(running.core.run())
    try:
        yield running
    finally:
        if not running.inbox.closed:
            running.inbox.put(Drain(0.0))
        running.runner.let(1000)
        await asyncio.gather(task, return_exceptions=True)
        running.scheduler.audit()


async def test_requests_run_to_their_end_with_a_record_per_step() -> None:
    async with engine() as e:
        e.runner.let(1000)
        for rid in (0, 1):
            e.inbox.put(submit_of(rid, PROMPT, seed=rid))
        await e.quiet()
    for rid in (0, 1):
        assert e.tokens(rid) == oracle(FULL, PROMPT, submit_of(rid, PROMPT, seed=rid).sampling, 64)
    records = [msg.record for msg in e.out if isinstance(msg, StepOutput) and msg.record]
    assert [r.step for r in records] == list(range(8))
    assert (records[0].prompt_tokens, records[0].cached_tokens, records[0].num_requests) == (
        12,
        4,
        2,
    )
    assert (records[-1].num_running, records[-1].num_free_blocks) == (0, 59)
    assert all(r.at_s == 1000.0 for r in records)
    assert e.out[-1] == Stopped("")


async def test_the_next_step_starts_before_the_last_result_is_there() -> None:
    async with engine() as e:
        e.inbox.put(submit_of(0, PROMPT))
        await e.quiet()
        assert [plan.step for plan in e.runner.started] == [0, 1]
        e.runner.let(1)
        await e.quiet()
        assert [plan.step for plan in e.runner.started] == [0, 1, 2]


async def test_depth_one_waits_for_each_result() -> None:
    async with engine(limits_of(depth=1)) as e:
        e.inbox.put(submit_of(0, PROMPT))
        await e.quiet()
        assert len(e.runner.started) == 1


async def test_an_abort_is_answered_before_the_next_result() -> None:
    async with engine() as e:
        e.inbox.put(submit_of(0, PROMPT))
        await e.quiet()
        e.inbox.put(Abort([0, 5]))
        e.runner.let(1)
        await e.quiet()
        assert e.tokens(0)[1] == "abort"
        assert not e.scheduler.has_work


async def test_requests_whose_front_end_is_gone_end_and_others_may_come() -> None:
    async with engine() as e:
        e.inbox.put(submit_of(0, PROMPT))
        e.inbox.put(submit_of(1, PROMPT))
        await e.quiet()
        e.inbox.put(AbortAll())
        e.runner.let(1)
        await e.quiet()
        assert e.tokens(0)[1] == e.tokens(1)[1] == "abort"
        assert not e.scheduler.has_work
        before = len(e.runner.started)
        e.inbox.put(submit_of(2, PROMPT))
        e.runner.let(1)  # of the two steps that were in flight
        await e.quiet()
        assert len(e.runner.started) > before


async def test_gauges_are_told_where_no_step_follows_an_abort() -> None:
    async with engine() as e:
        e.inbox.put(submit_of(0, PROMPT))
        e.inbox.put(Abort([0]))
        await e.quiet()
        assert not e.runner.started
        (record,) = [msg.record for msg in e.out if isinstance(msg, StepOutput) and msg.record]
        assert (
            record.num_requests,
            record.num_running,
            record.num_waiting,
            record.num_free_blocks,
        ) == (0, 0, 0, 59)


async def test_pings_tell_progress() -> None:
    async with engine() as e:
        e.inbox.put(Ping(1))
        await e.quiet()
        e.inbox.put(submit_of(0, PROMPT, max_tokens=2))
        await e.quiet()
        e.runner.let(1)
        e.inbox.put(Ping(2))
        await e.quiet()
        e.runner.let(5)
        e.inbox.put(Ping(3))
        await e.quiet()
    pongs = [msg for msg in e.out if isinstance(msg, Pong)]
    assert pongs[0] == Pong(1, 0, False)
    assert (pongs[1].seq, pongs[1].busy) == (2, True)
    assert pongs[2].steps >= pongs[1].steps >= 1


async def test_a_bad_submit_is_refused_and_hurts_nobody() -> None:
    async with engine() as e:
        e.runner.let(1000)
        e.inbox.put(submit_of(0, PROMPT))
        e.inbox.put(submit_of(1, [VOCAB]))
        e.inbox.put(submit_of(2, [3] * 64))
        await e.quiet()
        refused = [msg for msg in e.out if isinstance(msg, Refused)]
        assert [(msg.rid, msg.code) for msg in refused] == [
            (1, "invalid_value"),
            (2, "invalid_value"),
        ]
        assert e.tokens(0)[1] == "length"


async def test_draining_finishes_what_there_is_and_refuses_what_comes() -> None:
    async with engine() as e:
        e.inbox.put(submit_of(0, PROMPT))
        await e.quiet()
        e.inbox.put(Drain(60.0))
        e.inbox.put(submit_of(1, PROMPT))
        e.runner.let(1000)
        await e.quiet()
        assert e.tokens(0)[1] == "length"
        assert [msg.code for msg in e.out if isinstance(msg, Refused)] == ["server_draining"]
        assert e.out[-1] == Stopped("")


async def test_at_its_deadline_a_drain_aborts_the_rest() -> None:
    async with engine(limits_of(max_num_seqs=1)) as e:
        for rid in (0, 1):
            e.inbox.put(submit_of(rid, PROMPT))
        e.inbox.put(Drain(5.0))
        await e.quiet()
        e.clock.now_s += 5.0
        e.runner.let(1)
        await e.quiet()
        assert [e.tokens(rid)[1] for rid in (0, 1)] == ["abort", "abort"]
        e.runner.let(1)
        await e.quiet()
        assert e.out[-1] == Stopped("")


@pytest.mark.parametrize("deadlines", [(60.0, 0.0), (0.0, 60.0)])
async def test_of_two_drains_the_earlier_deadline_counts(deadlines: tuple[float, float]) -> None:
    async with engine() as e:
        e.inbox.put(submit_of(0, PROMPT))
        await e.quiet()
        for deadline_s in deadlines:
            e.inbox.put(Drain(deadline_s))
        e.runner.let(1)
        await e.quiet()
        assert e.tokens(0)[1] == "abort"


async def test_steps_go_on_while_a_grammar_is_prepared() -> None:
    async with engine() as e:
        e.runner.let(1000)
        e.inbox.put(submit_of(0, PROMPT, grammar=GRAMMAR))
        e.inbox.put(submit_of(1, PROMPT))
        await e.quiet()
        assert e.tokens(1)[1] == "length"
        assert e.tokens(0) == ([], "")
        e.inbox.put(Ping(1))
        await e.quiet()
        assert e.out[-1] == Pong(1, 8, False)  # asleep, and not to be taken for a hang
        ((job, on_done),) = e.runner.grammars.values()
        assert (job.grammar, job.answer) == (GRAMMAR, [])
        await asyncio.to_thread(on_done, "")
        await e.quiet()
        sampling = submit_of(0, PROMPT).sampling
        assert e.tokens(0) == oracle(FULL, PROMPT, sampling, 64)


async def test_a_grammar_that_fails_ends_its_request_with_the_reason() -> None:
    async with engine() as e:
        e.inbox.put(submit_of(0, PROMPT, grammar=GRAMMAR))
        await e.quiet()
        ((_, on_done),) = e.runner.grammars.values()
        on_done("it does not compile")
        await e.quiet()
        assert e.tokens(0) == ([], "error")
        (ending,) = [msg for msg in e.out if isinstance(msg, StepOutput) and msg.errors]
        assert ending.errors == {0: "it does not compile"}
        gauges = e.out[-1]
        assert isinstance(gauges, StepOutput)
        assert gauges.record is not None
        assert gauges.record.num_waiting == 0
        assert not e.runner.grammars


async def test_an_abort_drops_the_grammar_that_is_prepared() -> None:
    async with engine() as e:
        e.inbox.put(submit_of(0, PROMPT, grammar=GRAMMAR))
        await e.quiet()
        ((_, on_done),) = e.runner.grammars.values()
        e.inbox.put(Abort([0]))
        await e.quiet()
        assert e.tokens(0)[1] == "abort"
        assert not e.runner.grammars
        on_done("too late")
        await e.quiet()
        assert not e.runner.started


async def test_a_drain_waits_for_a_grammar_until_its_deadline() -> None:
    async with engine() as e:
        e.inbox.put(submit_of(0, PROMPT, grammar=GRAMMAR))
        e.inbox.put(Drain(0.05))
        await e.quiet()
        assert not e.core.over
        e.clock.now_s += 0.05
        await asyncio.sleep(0.1)  # nothing but its deadline wakes the engine
        assert e.tokens(0)[1] == "abort"
        assert e.out[-1] == Stopped("")


async def test_an_idle_engine_sleeps_on_its_inbox() -> None:
    drained = 0

    class Counting(Inbox[EngineIn]):
        async def drain(self, wait: bool) -> list[EngineIn]:
            nonlocal drained
            drained += 1
            return await super().drain(wait)

    inbox = Counting("engine")
    out: list[EngineOut] = []
    task = asyncio.create_task(
        EngineCore(Scheduler(limits_of(), FULL), NullRunner(), inbox, out.append).run()
    )
    for _ in range(50):
        await asyncio.sleep(0)
    assert drained == 1
    inbox.put(Drain(1.0))
    await task
    assert out == [Stopped("")]


async def test_a_busy_engine_lets_the_event_loop_run() -> None:
    inbox: Inbox[EngineIn] = Inbox("engine")
    out: list[EngineOut] = []
    core = EngineCore(Scheduler(limits_of(), FULL), NullRunner(), inbox, out.append)
    task = asyncio.create_task(core.run())
    inbox.put(submit_of(0, PROMPT, max_tokens=50))
    await asyncio.sleep(0)
    turns = 0
    while not (
        out and isinstance(out[-1], StepOutput) and out[-1].finish == bytes([FinishReason.LENGTH])
    ):
        await asyncio.sleep(0)
        turns += 1
    assert turns > 30
    inbox.put(Drain(0.0))
    await task


async def test_an_error_of_the_runner_stops_the_engine_with_its_cause() -> None:
    e = Engine()
    task = asyncio.create_task(e.core.run())
    e.inbox.put(submit_of(0, PROMPT))
    await e.quiet()
    e.runner.broken = "device is lost"
    e.runner.let(1)
    with pytest.raises(RuntimeError, match="device is lost"):
        await task
    assert e.out[-1] == Stopped("RuntimeError: device is lost")


async def test_an_idle_engine_finds_a_leak() -> None:
    e = Engine()
    task = asyncio.create_task(e.core.run())
    e.inbox.put(submit_of(0, PROMPT))
    await e.quiet()
    e.scheduler.kv_manager.pool.allocate(1)
    e.clock.now_s += 60.0
    e.runner.let(1000)
    with pytest.raises(AssertionError):
        await task
    assert isinstance(e.out[-1], Stopped)


async def test_the_null_runner_answers_by_position() -> None:
    runner = NullRunner(vocab_size=100)
    scheduler = Scheduler(limits_of(), FULL)
    scheduler.submit(submit_of(0, PROMPT))
    scheduler.submit(submit_of(1, PROMPT))
    plan = scheduler.plan()
    assert plan is not None
    result = await runner.start(plan).result()
    assert result.tokens_N.tolist() == [6 * 48271 % 65537 % 100] * 2
    runner.close()
