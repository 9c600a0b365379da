"""Tasks with an owner: errors are reported at once, and a bad tick does not end a timer."""

from __future__ import annotations

import asyncio
import logging

import pytest

from moeserve.actor.tasks import cancel, every, log_error, spawn


async def fail() -> None:
    raise ValueError("planted")


async def test_an_error_is_reported_with_the_tasks_name_before_anybody_awaits_it() -> None:
    heard: asyncio.Future[tuple[str, Exception]] = asyncio.get_running_loop().create_future()
    task = spawn(fail(), name="reader", on_error=lambda *ended: heard.set_result(ended))
    name, error = await heard
    assert name == "reader"
    assert str(error) == "planted"
    with pytest.raises(ValueError, match="planted"):
        await task


async def test_a_cancelled_task_and_one_that_returns_report_nothing() -> None:
    heard: list[str] = []
    sleeping = spawn(
        asyncio.sleep(60), name="sleeping", on_error=lambda name, _: heard.append(name)
    )
    done = spawn(asyncio.sleep(0), name="done", on_error=lambda name, _: heard.append(name))
    await done
    await cancel(sleeping, None)
    assert sleeping.cancelled()
    assert heard == []


async def test_log_error_names_the_task_and_keeps_the_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        task = spawn(fail(), name="metrics", on_error=log_error)
        await asyncio.wait([task])
        await asyncio.sleep(0)
    (record,) = caplog.records
    assert "'metrics' failed: ValueError: planted" in record.getMessage()
    assert record.exc_info is not None


async def test_a_timer_goes_on_after_a_tick_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    ticks = 0
    reached = asyncio.Event()

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 3:
            reached.set()
        raise OSError(f"tick {ticks}")

    timer = spawn(every(0.001, tick, name="pings"), name="pings", on_error=log_error)
    await reached.wait()
    await cancel(timer)
    assert "'pings' failed: OSError: tick 1" in caplog.text
    assert "tick 2" in caplog.text


async def test_a_timer_awaits_ticks_that_are_coroutines() -> None:
    reached = asyncio.Event()

    async def tick() -> None:
        await asyncio.sleep(0)
        reached.set()

    timer = spawn(every(0.001, tick, name="async"), name="async", on_error=log_error)
    await reached.wait()
    await cancel(timer)
    assert timer.cancelled()
