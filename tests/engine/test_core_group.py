"""Engines in a group: the same steps everywhere, and no answer lost or changed when the group
breaks.
"""

from __future__ import annotations

import asyncio
import gc
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moeserve.engine.group_core import GroupCore
from moeserve.engine.plan import StepPlan
from moeserve.errors import PeerLost
from moeserve.messages import (
    Abort,
    Drain,
    EngineIn,
    Join,
    Ping,
    PlacementTable,
    Pong,
    StepOutput,
    Stopped,
    TraceNext,
    UpdatePlacement,
)
from tests.comm.relay import DOWN, UP, Relay, flipped
from tests.engine.group_harness import Group, GroupModel, Step
from tests.engine.harness import GRAMMAR
from tests.ports import free_port

PROMPT = [20, 21, 22, 23, 24, 25]


async def test_all_engines_answer_and_park() -> None:
    async with Group(3) as group:
        for rid in range(9):
            group.submit(rid % 3, rid, [*PROMPT, 20 + rid])
        await group.all_answered()
        group.check()
        await group.until(lambda: not any(engine.core.busy for engine in group.engines), "rest")
        steps = [len(engine.runner.seen) for engine in group.engines]
        await asyncio.sleep(0.05)
        assert [len(engine.runner.seen) for engine in group.engines] == steps, (
            "a parked group runs no steps"
        )
        assert len(set(steps)) == 1


async def test_an_idle_engine_serves_the_others_and_wakes_for_them() -> None:
    async with Group(2) as group:
        for rank in (1, 0, 1):
            rid = len(group.answers)
            group.submit(rank, rid, PROMPT)
            await group.all_answered()
            await asyncio.sleep(0.02)
        group.check()
        assert all(engine.runner.num_empty >= 8 for engine in group.engines)
        records = [m.record for m in group.engines[1].out if isinstance(m, StepOutput) and m.record]
        assert {record.dp_rank for record in records} == {1}
        assert any(record.vote_us > 0 for record in records)


async def test_a_parked_group_wakes_for_a_grammar_that_is_prepared() -> None:
    """One engine's request waits for its grammar: the other one's are served, then both park, and
    run again when it is there."""
    async with Group(2) as group:
        group.engines[0].runner.grammar_s = 0.2
        group.rng = group.engines[0].runner.rng = random.Random(3)
        slow = group.submit(0, 0, PROMPT, grammar=GRAMMAR)
        quick = group.submit(1, 1, PROMPT)
        await group.until(lambda: bool(quick.finish), "the answer of the other engine")
        assert not slow.finish
        await group.until(lambda: not any(engine.core.busy for engine in group.engines), "rest")
        await group.all_answered()
        group.check()
        await group.drained()


async def test_a_drained_group_stays_until_a_grammar_is_prepared() -> None:
    async with Group(2) as group:
        group.engines[0].runner.grammar_s = 0.2
        await group.until(lambda: len(group.joined) == 2, "a group")
        slow = group.submit(0, 0, PROMPT, grammar=GRAMMAR)
        await group.drained()
        assert slow.finish == "length"
        group.check()


async def test_past_its_deadline_a_drained_group_does_not_wait_for_a_grammar() -> None:
    async with Group(2) as group:
        group.engines[0].runner.grammar_s = 1e6
        await group.until(lambda: len(group.joined) == 2, "a group")
        slow = group.submit(0, 0, PROMPT, grammar=GRAMMAR)
        await group.drained(deadline_s=0.1)
        assert slow.finish == "abort"


class TwoMachines(Group):
    """Machines "a" and "b", with someone on the way between them."""

    def __init__(self, relay: Relay, listens: str) -> None:
        self.votes = [listens, relay.address]
        super().__init__(2)

    def join_of(self, rank: int, directory: str, token: str = "t") -> Join:
        join = super().join_of(rank, directory, f"{token}{self.epoch}")
        return msgspec.structs.replace(join, hosts=("a", "b"), vote=self.votes[rank])


@pytest.mark.parametrize("way", [UP, DOWN])
async def test_a_vote_that_is_altered_on_the_way_costs_no_answer(way: str) -> None:
    listens = f"127.0.0.1:{free_port()}"
    flips = iter([False] * 5 + [True] + [False] * 100_000)

    def flip(at: str, frames: list[bytes]) -> list[bytes]:
        return [flipped(frames[-1]) if at == way and next(flips) else frames[-1]]

    async with Relay(listens, flip) as relay, TwoMachines(relay, listens) as group:
        for rid in range(6):
            group.submit(rid % 2, rid, [*PROMPT, 20 + rid])
        await group.all_answered()
        group.check()
        assert group.epoch == 2
        assert any("altered on the way, or is not its own" in left.cause for _, left in group.left)


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_placement_becomes_active_or_is_abandoned_while_nobody_has_work(
    gives_up: bool,
) -> None:
    table = PlacementTable(version=3, num_ranks=3, experts_per_rank=1, num_experts=3, experts=b"")
    async with Group(3) as group:
        await group.until(lambda: len(group.joined) == 3)
        group.engines[2].runner.gives_up = gives_up
        for engine in group.engines:
            engine.inbox.put(UpdatePlacement(table))
        wanted = -3 if gives_up else 6
        await group.until(
            lambda: all(e.runner.seen and e.runner.seen[-1].active == wanted for e in group.engines)
        )
        num_steps = len(group.engines[0].runner.seen)
        await asyncio.sleep(0.05)
        assert num_steps == 1 == len(group.engines[0].runner.seen), "one step is enough"
        assert not group.left


async def test_a_join_that_comes_twice_changes_nothing() -> None:
    async with Group(2) as group:
        await group.until(lambda: len(group.joined) == 2)
        group.engines[0].inbox.put(group.join_of(0, "/nowhere"))
        group.submit(0, 0, PROMPT)
        await group.all_answered()
        group.check()
        assert not group.left


async def test_a_drain_ends_all_engines_together() -> None:
    async with Group(3) as group:
        group.submit(1, 0, PROMPT, max_tokens=30)
        await group.until(lambda: bool(group.answers[0].tokens))
        await group.drained()
        group.check()
        assert all(engine.out[-1] == Stopped("") for engine in group.engines)
        assert not group.left


async def test_a_drained_engine_serves_on_until_the_others_are_done() -> None:
    async with Group(2) as group:
        group.rejoins = False
        await group.until(lambda: len(group.joined) == 2)
        group.submit(1, 0, PROMPT, max_tokens=40)
        group.engines[0].inbox.put(Drain(20.0))
        await group.all_answered()
        await asyncio.sleep(0.05)
        assert not group.engines[0].task.done()
        group.engines[1].inbox.put(Drain(20.0))
        await asyncio.wait_for(asyncio.gather(*(engine.task for engine in group.engines)), 5.0)
        group.check()
        assert not group.left


async def test_past_its_deadline_a_drained_engine_leaves_the_others() -> None:
    async with Group(2) as group:
        group.submit(0, 0, PROMPT, max_tokens=55)
        group.rejoins = False
        await group.until(lambda: len(group.joined) == 2)
        group.engines[0].inbox.put(Drain(0.0))
        await asyncio.wait_for(group.engines[0].task, 5.0)
        assert group.answers[0].finish == "abort"
        await group.until(lambda: any(rank == 1 for rank, _ in group.left))


async def test_a_newer_join_is_taken_between_two_steps() -> None:
    async with Group(3) as group:
        for rid in range(6):
            group.submit(rid % 3, rid, [*PROMPT, 20 + rid], max_tokens=40)
        await group.until(lambda: all(answer.tokens for answer in group.answers.values()))
        group.send_joins()
        await group.until(lambda: group.joined == {0: 2, 1: 2, 2: 2}, "the second epoch")
        await group.all_answered()
        group.check()
        assert not group.left, "nothing broke"


async def test_a_join_that_not_all_get_is_taken_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moeserve.engine.group_core.PAUSE_TIMEOUT_S", 0.1)
    async with Group(2) as group:
        group.submit(1, 0, PROMPT, max_tokens=50)
        await group.until(lambda: bool(group.answers[0].tokens))
        group.rejoins = False
        group.send_joins([0])
        await group.until(lambda: len(group.left) == 2, "both leave")
        group.send_joins()
        await group.all_answered()
        group.check()


async def test_pings_aborts_and_submits_are_handled_without_a_group() -> None:
    async with Group(2) as group:
        group.submit(0, 0, PROMPT, max_tokens=50)
        group.submit(1, 1, PROMPT, max_tokens=50)
        await group.until(lambda: all(answer.tokens for answer in group.answers.values()))
        group.rejoins = False
        group.break_off()
        await group.until(lambda: len(group.left) == 2)
        engine = group.engines[0]
        engine.inbox.put(Ping(5))
        engine.inbox.put(Abort([0]))
        group.submit(0, 2, PROMPT)
        await group.until(lambda: group.answers[0].finish == "abort")
        pongs = [msg for msg in engine.out if isinstance(msg, Pong)]
        assert [(pong.seq, pong.busy) for pong in pongs] == [(5, False)]
        group.send_joins()
        await group.all_answered()
        group.check()
        await group.drained()


@pytest.mark.parametrize("deadline_s", [0.0, 0.2])
async def test_a_drain_without_a_group_ends(deadline_s: float) -> None:
    async with Group(2) as group:
        group.submit(0, 0, PROMPT, max_tokens=50)
        await group.until(lambda: bool(group.answers[0].tokens))
        group.rejoins = False
        group.break_off()
        await group.until(lambda: len(group.left) == 2)
        await group.drained(deadline_s)
        assert group.answers[0].finish == "abort"


async def test_messages_are_answered_while_another_engine_is_silent() -> None:
    async with Group(2) as group:
        await group.until(lambda: len(group.joined) == 2)
        group.submit(0, 0, PROMPT)
        await group.all_answered()
        silent = group.engines[1]
        waiting = asyncio.Event()

        async def never(coordinator: object) -> None:
            await waiting.wait()

        silent.core._vote_and_start = never  # type: ignore[method-assign, assignment]
        group.submit(0, 1, PROMPT)
        await asyncio.sleep(0.05)
        group.engines[0].inbox.put(Ping(9))
        await group.until(
            lambda: any(isinstance(m, Pong) and m.seq == 9 for m in group.engines[0].out)
        )
        group.rejoins = False
        group.engines[0].inbox.put(Drain(0.0))
        await asyncio.wait_for(group.engines[0].task, 5.0)
        assert group.answers[1].finish == "abort"


async def test_an_error_of_the_runner_ends_one_engine_and_the_others_part() -> None:
    async with Group(3) as group:
        group.rejoins = False
        await group.until(lambda: len(group.joined) == 3)
        group.engines[1].runner.failing = RuntimeError("on fire")
        group.submit(0, 0, PROMPT)
        with pytest.raises(RuntimeError, match="on fire"):
            await asyncio.wait_for(group.engines[1].task, 5.0)
        assert group.engines[1].out[-1] == Stopped("RuntimeError: on fire")
        group.engines[1].dead = True
        await group.until(lambda: {rank for rank, _ in group.left} == {0, 2})


async def test_a_trace_is_taken_by_all_engines_in_one_step() -> None:
    async with Group(2) as group:
        await group.until(lambda: len(group.joined) == 2)
        group.engines[0].inbox.put(TraceNext())
        await asyncio.sleep(0.02)
        group.submit(1, 0, PROMPT)
        await group.all_answered()
        traced = [
            [decision.step for decision in engine.runner.seen if decision.trace]
            for engine in group.engines
        ]
        assert traced[0] == traced[1]
        assert len(traced[0]) == 1


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(6))
async def test_random_traffic_under_breaks_and_kills(
    seed: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `ahead`, steps fail after later ones have begun, as if the device lagged behind."""
    monkeypatch.setattr(GroupModel, "ahead", ahead)
    rng = random.Random(seed)
    size = rng.choice([2, 3, 4])
    tight = {"num_blocks": 24, "num_store_blocks": 12} if seed % 2 else {"num_store_blocks": 20}
    async with Group(size, rng, depth=rng.choice([1, 2, 2]), **tight) as group:
        stems = [[rng.randrange(20, 50) for _ in range(rng.choice([9, 17, 30]))] for _ in range(3)]
        for rid in range(60):
            stem = rng.choice(stems)
            prompt = stem[: rng.randint(0, len(stem))] + [
                rng.randrange(20, 50) for _ in range(rng.randint(1, 6))
            ]
            max_tokens = min(rng.randint(1, 25), 63 - len(prompt))
            rank = rng.randrange(size)
            group.engines[rank].runner.grammar_s = rng.choice([0.0, 0.001, 0.01])
            sampling = {"seed": rng.randrange(3), "max_tokens": max_tokens}
            group.submit(rank, rid, prompt, grammar=rng.choice([None, None, GRAMMAR]), **sampling)
            if rng.random() < 0.1:
                group.break_off()
            if rng.random() < 0.05:
                await group.kill(rng.randrange(size))
            if rng.random() < 0.1:
                rid = rng.choice(list(group.answers))
                group.engines[group.answers[rid].rank].inbox.put(Abort([rid]))
            if rng.random() < 0.05:
                group.send_joins()
            if rng.random() < 0.7:
                await asyncio.sleep(rng.choice([0, 0, 0.0005, 0.002, 0.02]))
        await group.all_answered()
        group.check()
        await group.until(
            lambda: all(group.joined.get(rank) == group.epoch for rank in range(size)), "one epoch"
        )
        await group.drained()
        for engine in group.engines:
            assert engine.scheduler.kv_manager.pool.num_free == group.limits.num_blocks - 1


@pytest.mark.parametrize("task", ["watch of the group", "messages"])
async def test_an_engine_ends_with_the_error_of_a_background_task(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step waits forever for another engine, so nothing else would notice the error."""

    async def fail_to_leave() -> None:
        raise RuntimeError("planted")

    def fail_to_handle(_: EngineIn) -> None:
        raise RuntimeError("planted")

    def start_nothing(_: StepPlan) -> Step:
        return Step(asyncio.create_task(asyncio.sleep(3600.0)))  # type: ignore[arg-type]

    async with Group(2) as group:
        await group.until(lambda: len(group.joined) == 2, "a group")
        engine, other = group.engines
        monkeypatch.setattr(other.runner, "start", start_nothing)
        group.submit(0, 0, PROMPT)
        await group.until(lambda: bool(engine.core._in_flight), "a step in flight")
        if task == "messages":
            monkeypatch.setattr(engine.core, "handle", fail_to_handle)
            engine.tell(Ping(1))
        else:
            monkeypatch.setattr(engine.runner, "leave", fail_to_leave)
            assert other.core._coordinator is not None
            other.core._coordinator.close("gone")
        with pytest.raises(RuntimeError, match="planted"):
            await asyncio.wait_for(asyncio.shield(engine.task), 10.0)
        assert engine.out[-1] == Stopped("RuntimeError: planted")


async def test_a_group_that_breaks_while_an_engine_sleeps_leaves_no_error_unseen() -> None:
    async def wait_woken() -> None:
        raise PeerLost("gone")

    async def hear(*_: Any) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise asyncio.CancelledError

    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    core: Any = SimpleNamespace(
        _audit_when_due=lambda: None,
        _handle_until=hear,
        _placement_pending=False,
        _leave_deadline_s=0.0,
        _wake_at_s=0.0,
    )
    core._clock = lambda: 0.0
    with pytest.raises(asyncio.CancelledError):
        await GroupCore._sleep(
            core,
            SimpleNamespace(wait_woken=wait_woken),
        )  # type: ignore[arg-type]
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []
