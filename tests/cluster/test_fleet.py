"""Fleets of real engine processes around made-up tokens: what dies, joins, grows and shrinks, and
what streams show.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from moeserve.actor.process import Child
from moeserve.actor.supervisor import RestartPolicy
from moeserve.cluster import forks
from moeserve.cluster.engine_supervisor import EngineSupervisor
from moeserve.cluster.fleet import Fleet
from moeserve.cluster.heartbeat import STALL_S
from moeserve.config import Config, ParallelConfig
from moeserve.errors import ConfigError, Conflict, DoesNotFit, EngineDied, InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.sampling import SamplingParams

FAST = RestartPolicy(first_pause_s=0.01, max_pause_s=0.05, max_deaths=30)
Open = Callable[..., Any]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, warm: None) -> Open:
    """fleet(dp=2, builder="paced") opens a front end over a fleet, with its log lines, and waits
    until it is ready.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    @asynccontextmanager
    async def open_fleet(
        dp: int = 2,
        *,
        builder: str = "paced",
        ready: bool = True,
        policy: RestartPolicy = FAST,
        stall_s: float = STALL_S,
        **parallel: Any,
    ) -> AsyncIterator[FrontEnd]:
        config = Config(
            parallel=ParallelConfig(dp=dp, rebalance="off", **{"fork_server": "off"} | parallel)
        )
        link = Fleet(config, builder=f"builders:{builder}", policy=policy, stall_s=stall_s)
        await link.start()
        front = FrontEnd(
            link,
            model_name="m",
            model_dir=Path(),
            tokenizer=None,
            chat_template=None,
            defaults={},
            max_queued=1000,
        )
        runs = asyncio.create_task(front.run())
        try:
            async with asyncio.timeout(120):  # both cores may be busy
                if ready:
                    await front.wait_ready()
                yield front
        finally:
            await link.close(0.0)
            runs.cancel()
            await asyncio.gather(runs, return_exceptions=True)

    return open_fleet


async def stream(front: FrontEnd, prompt_len: int, num_tokens: int) -> list[int]:
    prompt = list(range(1, prompt_len + 1))
    tokens: list[int] = []
    async with await front.generate(
        prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    ) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
    return tokens


def expected(prompt_len: int, num_tokens: int) -> list[int]:
    """Return the tokens that a NullRunner with 1000 tokens makes up."""
    return [p * 48271 % 65537 % 1000 for p in range(prompt_len, prompt_len + num_tokens)]


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        await asyncio.sleep(0.005)


async def some(front: FrontEnd, count: int, num_tokens: int) -> asyncio.Task[list[list[int]]]:
    """Start `count` streams and wait until all have begun."""
    before = front.stats.generation_tokens
    task = asyncio.create_task(_gather(front, count, num_tokens))
    await until(lambda: front.stats.generation_tokens - before >= 3 * count or task.done())
    return task


async def _gather(front: FrontEnd, count: int, num_tokens: int) -> list[list[int]]:
    return await asyncio.gather(*(stream(front, 3 + i, num_tokens) for i in range(count)))


def answers(count: int, num_tokens: int) -> list[list[int]]:
    return [expected(3 + i, num_tokens) for i in range(count)]


def kill(front: FrontEnd, number: int) -> None:
    """Kill the process of an engine."""
    pid = front.fleet.view.engines[number].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def rids(front: FrontEnd, rank: int) -> set[int]:
    """Requests that this engine has."""
    load = front.fleet._state.traffic.balancer.loads.get(rank)
    return set(load.live_rids) if load is not None else set()


async def test_engines_share_the_requests_and_add_up(fleet: Open) -> None:
    async with fleet(2) as front:
        assert front.ready.max_num_seqs == 16
        assert front.ready.num_blocks == 2 * 9_999 + 1
        streams = await some(front, 8, 400)
        view = front.fleet.view
        assert [engine.num_requests for engine in view.engines] == [4, 4]
        assert [engine.state for engine in view.engines] == ["serving", "serving"]
        assert view.complete
        assert await streams == answers(8, 400)
        assert [engine.num_requests for engine in front.fleet.view.engines] == [0, 0]
        assert front.healthy


@pytest.mark.parametrize("ep", ["on", "off"])
async def test_a_killed_engine_costs_no_token(fleet: Open, ep: str) -> None:
    async with fleet(2, ep=ep) as front:
        streams = await some(front, 8, 600)
        kept = rids(front, 0)
        killed_s = time.monotonic()
        kill(front, 1)
        await until(lambda: not rids(front, 1) or not front.fleet.engines[1].up)
        assert time.monotonic() - killed_s < 15
        assert front.state == "ready"
        assert kept <= rids(front, 0)  # what lives keeps its own
        assert await streams == answers(8, 600)
        await until(lambda: front.fleet.view.complete)
        assert front.stats.total.restarts == 1
        assert front.stats.engines[1].restarts == 1
        assert [engine.restarts for engine in front.fleet.view.engines] == [0, 1]


async def test_kills_at_random_moments_cost_no_token(fleet: Open) -> None:
    rng = random.Random(7)
    async with fleet(2) as front:
        for _ in range(3):
            streams = await some(front, 6, 300)
            for _ in range(2):  # the second often hits a start or a join
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                pid = rng.choice(front.fleet.view.engines).pid
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
            assert await streams == answers(6, 300)


async def test_both_engines_die_and_the_streams_go_on(fleet: Open) -> None:
    async with fleet(2) as front:
        streams = await some(front, 6, 400)
        for rank in range(2):
            kill(front, rank)
        await until(lambda: front.fleet.view.waiting == 6)
        assert await streams == answers(6, 400)


async def test_a_new_request_waits_while_nobody_serves_and_may_be_aborted(fleet: Open) -> None:
    async with fleet(2) as front:
        for rank in range(2):
            kill(front, rank)
        await until(lambda: not any(engine.up for engine in front.fleet.engines))
        patient = asyncio.create_task(stream(front, 4, 20))
        hasty = asyncio.create_task(stream(front, 5, 20))
        await until(lambda: front.fleet.view.waiting == 2)
        hasty.cancel()
        await until(lambda: front.fleet.view.waiting == 1)
        assert await patient == expected(4, 20)


async def test_growing_and_shrinking_under_load(fleet: Open) -> None:
    async with fleet(2) as front:
        streams = await some(front, 8, 500)
        assert await front.fleet.scaling.scale(3) == 2
        assert front.ready.max_num_seqs == 24
        assert front.fleet.view.dp == 3
        late = [asyncio.create_task(stream(front, 30 + i, 300)) for i in range(3)]
        await until(lambda: bool(rids(front, 2)))
        gone = [engine.pid for engine in front.fleet.view.engines[1:]]
        assert await front.fleet.scaling.scale(1) == 3
        assert front.ready.max_num_seqs == 8
        assert await streams == answers(8, 500)
        assert [await task for task in late] == [expected(30 + i, 300) for i in range(3)]
        assert front.stats.total.restarts == 0
        assert not any(map(psutil.pid_exists, gone))


async def test_a_grow_that_fails_leaves_everything_as_it_was(fleet: Open) -> None:
    async with fleet(2, builder="two_only") as front:
        streams = await some(front, 4, 300)
        epoch = front.fleet.view.epoch
        with pytest.raises(
            Conflict, match="2 engines continue, growing to 3 failed: needs 80 GiB, has 1 GiB"
        ):
            await front.fleet.scaling.scale(3)
        assert (front.fleet.view.dp, front.fleet.view.epoch) == (2, epoch)
        assert await streams == answers(4, 300)


async def test_a_grow_whose_meeting_fails_goes_back(fleet: Open) -> None:
    async with fleet(2, builder="two_meet") as front:
        streams = await some(front, 4, 300)
        with pytest.raises(
            Conflict, match=r"2 engines continue, growing to 3 failed: .*three is a crowd"
        ):
            await front.fleet.scaling.scale(3)
        await until(lambda: front.fleet.view.complete)
        assert front.fleet.view.dp == 2
        assert await streams == answers(4, 300)


async def test_one_change_at_a_time_and_only_ones_that_make_sense(fleet: Open) -> None:
    async with fleet(2) as front:
        scaling = front.fleet.scaling
        growing = asyncio.create_task(scaling.scale(3))
        await asyncio.sleep(0)
        with pytest.raises(Conflict, match="another change is in progress"):
            await scaling.scale(1)
        assert await growing == 2
        for dp in (0, -1, 2000):
            with pytest.raises(InvalidRequest, match=f"not {dp}"):
                await scaling.scale(dp)
        assert await scaling.scale(3) == 3


async def test_engines_that_never_meet_end_the_fleet_with_their_reason(fleet: Open) -> None:
    async with fleet(2, builder="nobody_meets", ready=False) as front:
        with pytest.raises(
            EngineDied,
            match=r"could not form a group, 6 times in a row: engine . reported: .*no thanks",
        ):
            await front.wait_ready()


async def test_an_engine_that_finds_another_checkpoint_is_never_let_in(
    fleet: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "Child", Child)  # the environment is that of each start
    monkeypatch.setenv("CHECKPOINT", "first")
    async with fleet(2, builder="fingerprinted") as front:
        streams = await some(front, 4, 300)
        epoch = front.fleet.view.epoch
        monkeypatch.setenv("CHECKPOINT", "second")
        with pytest.raises(Conflict, match=r"checkpoint is 'first' in process .* 'second' in"):
            await front.fleet.scaling.scale(3)
        assert await streams == answers(4, 300)
        kill(front, 0)
        await until(lambda: front.failure is not None)
        assert "checkpoint is 'second' in process" in str(front.failure)
        assert "have changed since the first engine read them" in str(front.failure)
        assert front.fleet.view.epoch == epoch, "they never met"


async def test_settings_that_cannot_work_are_the_error_they_are(fleet: Open) -> None:
    async with fleet(2, builder="too_large", ready=False) as front:
        with pytest.raises(DoesNotFit, match=r"engine \d: needs 80 GiB, has 1 GiB"):
            await front.wait_ready()


async def test_an_engine_that_keeps_dying_ends_the_group_and_every_stream_is_told(
    fleet: Open,
) -> None:
    async with fleet(2, policy=RestartPolicy(first_pause_s=0.01, max_deaths=1)) as front:
        streams = await some(front, 4, 5000)
        for _ in range(2):
            await until(lambda: front.fleet.view.complete)
            kill(front, 0)
            await until(lambda: not front.fleet.view.complete)
        with pytest.raises(Exception, match="the engine stopped while this request ran"):
            await streams
        assert "was killed by SIGKILL" in str(front.failure)


async def test_with_ep_off_the_others_go_on_without_an_engine_that_keeps_dying(fleet: Open) -> None:
    async with fleet(2, ep="off", policy=RestartPolicy(first_pause_s=0.01, max_deaths=0)) as front:
        streams = await some(front, 6, 400)
        kill(front, 0)
        assert await streams == answers(6, 400)
        assert [engine.state for engine in front.fleet.view.engines] == ["gone", "serving"]
        assert front.healthy


async def test_it_does_not_shrink_to_engines_that_are_gone(fleet: Open) -> None:
    async with fleet(2, ep="off", policy=RestartPolicy(first_pause_s=0.01, max_deaths=0)) as front:
        kill(front, 0)
        await until(lambda: front.fleet.engines[0].end is not None)
        with pytest.raises(Conflict, match="would stay have failed"):
            await front.fleet.scaling.scale(1)
        assert await stream(front, 5, 10) == expected(5, 10)


async def test_it_shrinks_to_an_engine_that_is_being_replaced(fleet: Open) -> None:
    async with fleet(2, ep="off", policy=RestartPolicy(first_pause_s=1.5)) as front:
        kill(front, 0)
        await until(lambda: not front.fleet.engines[0].up)
        assert await front.fleet.scaling.scale(1) == 2
        assert await stream(front, 5, 10) == expected(5, 10)
        assert front.ready.max_num_seqs == 8


async def test_a_drain_finishes_what_runs_also_over_a_death(fleet: Open) -> None:
    async with fleet(2) as front:
        streams = await some(front, 6, 300)
        draining = asyncio.create_task(front.drain(20.0))
        await asyncio.sleep(0.05)
        kill(front, 0)
        assert await streams == answers(6, 300)
        await draining
        await front.fleet.close(5.0)
        await until(lambda: front.failure is not None)
        assert "exited with code 0" in str(front.failure)


async def test_a_drain_replaces_the_only_busy_engine(fleet: Open) -> None:
    async with fleet(2) as front:
        streams = await some(front, 1, 300)
        (busy,) = (engine for engine in front.fleet.engines if rids(front, engine.rank))
        draining = asyncio.create_task(front.drain(20.0))
        await asyncio.sleep(0.05)
        kill(front, busy.rank)
        assert await streams == answers(1, 300)
        await draining
        assert [engine.state for engine in front.fleet.view.engines] == ["serving", "serving"]


async def test_requests_that_come_while_engines_meet_again_are_served(
    fleet: Open, monkeypatch: Any
) -> None:
    async with fleet(2) as front:
        late: list[asyncio.Task[list[int]]] = []
        check_groups = front.fleet._state._check_groups

        def also_submit() -> None:  # before the engine group wakes up
            late.append(asyncio.create_task(stream(front, 5, 10)))
            check_groups()

        monkeypatch.setattr(front.fleet._state, "_check_groups", also_submit)
        kill(front, 0)
        await until(lambda: front.fleet.view.epoch == 2 and front.fleet.view.complete)
        monkeypatch.undo()
        assert await asyncio.gather(*late) == [expected(5, 10)] * len(late)
        assert len(late) >= 4  # it died, was up, and both joined


@pytest.mark.parametrize("ep", ["on", "off"])
async def test_a_drain_ends_what_runs_at_its_deadline(fleet: Open, ep: str) -> None:
    async with fleet(2, ep=ep) as front:
        streams = await some(front, 4, 5_000)
        began_s = time.monotonic()
        await front.drain(0.3)
        assert time.monotonic() - began_s >= 0.3
        assert [len(tokens) < 5_000 for tokens in await streams] == [True] * 4
        assert front.stats.finished == {
            "abort": 4
        }  # the engines did it, not the front end after its patience


async def test_what_a_leaving_engine_said_last_is_not_computed_twice(
    fleet: Open, monkeypatch: Any
) -> None:
    async with fleet(2) as front:
        streams = await some(front, 4, 400)
        handle = EngineSupervisor._handle
        late: list[tuple[EngineSupervisor, Any]] = []

        with monkeypatch.context() as slow:  # as if the front end did not keep up
            slow.setattr(EngineSupervisor, "_handle", lambda *call: late.append(call))
            await asyncio.sleep(0.1)
            scaling = asyncio.create_task(front.fleet.scaling.scale(1))
            await until(lambda: front.fleet.dp == 1)
        for supervisor, msg in late:
            handle(supervisor, msg)
        assert await scaling == 2
        assert await streams == answers(4, 400)


def epochs_in(folder: str) -> dict[str, int]:
    return {
        e.name: e.stat().st_mode & 0o777 for e in os.scandir(folder) if e.name.startswith("epoch")
    }


async def test_nothing_is_left_behind(fleet: Open) -> None:
    async with fleet(2) as front:
        folder = front.fleet.scaling._run_dir.path
        kill(front, 0)
        await until(lambda: not front.fleet.view.complete)
        await until(lambda: front.fleet.view.complete)
        await until(
            lambda: "epoch-1" not in os.listdir(folder)
        )  # it goes when the engines have left it
        assert epochs_in(folder) == {"epoch-2": 0o700}
        pids = [engine.pid for engine in front.fleet.view.engines]
    assert folder not in [entry.path for entry in os.scandir(os.path.dirname(folder))]
    assert not any(map(psutil.pid_exists, pids))


async def test_engines_that_leave_take_their_epoch_with_them(fleet: Open) -> None:
    async with fleet(2, ep="off", tp=2) as front:
        folder = front.fleet.scaling._run_dir.path
        assert len(epochs_in(folder)) == 2
        assert await front.fleet.scaling.scale(1) == 2
        assert len(epochs_in(folder)) == 1
        assert await stream(front, 5, 10) == expected(5, 10)


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        ({"dp": 2, "tp": 3}, "tp=3 cannot divide"),
        ({"dp": 2, "nnodes": 2}, "needs --rendezvous"),
        ({"dp": 2, "redundant_experts": 10_000}, "are of use"),
        ({"dp": 2, "ep": "off", "redundant_experts": 1}, "needs experts sharded"),
    ],
)
async def test_what_cannot_work_is_said_at_once(parallel: dict[str, Any], why: str) -> None:
    link = Fleet(Config(parallel=ParallelConfig(**parallel)))
    with pytest.raises(ConfigError, match=why):
        await link.start()
    await link.close(0.0)
