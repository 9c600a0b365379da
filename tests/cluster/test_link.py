"""The guarantees of an engine link, for engines in this process and in a child."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from moeserve.cluster.link import EngineGone
from moeserve.errors import DoesNotFit, EngineDied
from moeserve.messages import Abort, Phase, Ready, Refused, StepOutput, Stopped

Open = Callable[..., Any]


async def test_phases_come_first_then_ready_then_tokens_then_the_end(engine: Open) -> None:
    async with engine("null") as (link, reader):
        ready = await reader.ready()
        assert link.ready == ready
        assert link.healthy
        assert [msg.name for msg in reader.seen if isinstance(msg, Phase)] == [
            "importing libraries",
            "making tokens up",
        ]
        reader.submit(1, max_tokens=5)
        assert len(await reader.finished(1)) == 5
        await link.close(1.0)
        assert (await reader.gone()).exit_code == 0
    kinds = [type(msg) for msg in reader.seen]
    assert kinds[:3] == [Phase, Phase, Ready]
    assert set(kinds[3:-2]) == {StepOutput}
    assert kinds[-2:] == [Stopped, EngineGone]
    assert reader.seen[-2].cause == ""
    assert not reader.seen[-1].restarting
    assert link.ready is None
    assert not link.healthy


async def test_a_stop_lets_running_requests_finish(engine: Open) -> None:
    async with engine("null") as (link, reader):
        await reader.ready()
        reader.submit(1, max_tokens=200)
        stopping = asyncio.ensure_future(link.close(10.0))
        assert len(await reader.finished(1)) == 200
        await stopping


async def test_a_stop_at_once_still_gives_each_request_its_end(engine: Open) -> None:
    async with engine("endless") as (link, reader):
        await reader.ready()
        reader.submit(1, max_tokens=10_000)
        await reader.until(lambda msg: isinstance(msg, StepOutput))
        stopping = asyncio.ensure_future(link.close(0.0))
        assert len(await reader.finished(1)) < 10_000
        assert not (await reader.gone()).restarting
        await stopping


async def test_a_second_stop_may_be_more_impatient(engine: Open) -> None:
    async with engine("endless") as (link, reader):
        await reader.ready()
        reader.submit(1, max_tokens=10_000)
        await reader.until(lambda msg: isinstance(msg, StepOutput))
        patient = asyncio.ensure_future(link.close(60.0))
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await link.close(0.0)
            await patient


async def test_settings_that_cannot_work_are_the_error_they_are(engine: Open) -> None:
    async with engine("too_large") as (_, reader):
        gone = await reader.gone()
        assert (gone.exit_code, gone.cause, gone.restarting) == (
            5,
            "needs 80 GiB, has 1 GiB",
            False,
        )
        assert isinstance(gone.error(), DoesNotFit)


async def test_a_crash_at_start_is_told_with_its_cause(engine: Open) -> None:
    async with engine("crash") as (_, reader):
        gone = await reader.gone()
        assert (gone.exit_code, gone.restarting) == (1, False)
        assert isinstance(gone.error(), EngineDied)
        assert "ValueError: a bug" in str(gone.error())


async def test_a_failing_step_is_told_with_its_cause(engine: Open) -> None:
    async with engine("failing") as (_, reader):
        await reader.ready()
        reader.submit(1, max_tokens=10)
        gone = await reader.gone()
        assert "the device is on fire" in gone.cause
        assert [type(msg) for msg in reader.seen].count(Stopped) == 1


async def test_stopping_while_it_loads_is_quick(engine: Open) -> None:
    async with engine("slow") as (link, reader):
        await reader.until(lambda msg: isinstance(msg, Phase) and msg.name == "loading")
        async with asyncio.timeout(20):
            await link.close(30.0)
        gone = await reader.gone()
        assert not gone.restarting
        assert isinstance(gone.error(), EngineDied)
        assert len(link.outbox) == 0


async def test_sending_without_an_engine_is_harmless(engine: Open) -> None:
    async with engine("null") as (link, reader):
        await reader.ready()
        await link.close(1.0)
        link.send(Abort([1]))
        await link.close(0.0)


async def test_refusals_reach_the_front_end(engine: Open) -> None:
    async with engine("null") as (_, reader):
        await reader.ready()
        reader.submit(2, max_tokens=1, prompt=(999_999,))  # not in the vocabulary
        refused = await reader.until(lambda msg: isinstance(msg, Refused | StepOutput))
        assert isinstance(refused, Refused)


async def test_a_step_that_takes_long_shows_as_stalled(
    child: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeserve.cluster.engine_supervisor.INTERVAL_S", 0.05)
    monkeypatch.setattr("moeserve.cluster.heartbeat.UNHEALTHY_S", 2.0)
    async with child("waiting") as (link, reader):
        await reader.ready()
        assert link.healthy
        reader.submit(1, max_tokens=100)
        async with asyncio.timeout(20):
            while link.healthy:  # noqa: ASYNC110  (health is a property that a probe asks for)
                await asyncio.sleep(0.02)
        assert not any(isinstance(msg, EngineGone) for msg in reader.seen)
