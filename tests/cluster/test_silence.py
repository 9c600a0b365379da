"""Engines that stand still: nobody hears of a death, so somebody must miss their answers."""

from __future__ import annotations

import asyncio
import os
import signal

from moeserve.cluster.fleet import Fleet

from .test_fleet import Open, answers, fleet, some, until

__all__ = ["fleet"]  # a fixture

STALL_S = 1.5


def impatient(fleet: Fleet) -> None:
    for engine in fleet.engines:
        engine.process.stall_s = STALL_S


async def test_an_engine_that_stops_while_the_others_wait_for_it_is_replaced(fleet: Open) -> None:
    """The group breaks before its silence is noticed: from then on it is held for the next meeting,
    where it is waited for, and steps are not expected of it any more."""
    async with fleet(2) as front:
        streams = await some(front, 6, 300)
        stopped, killed = front.fleet.engines
        impatient(front.fleet)
        first = stopped.pid
        os.kill(stopped.pid, signal.SIGSTOP)
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: killed.restarts == 1 and killed.up and stopped.held)
        await until(lambda: stopped.restarts == 1 and front.fleet.view.complete, 20)
        assert stopped.pid != first
        assert await streams == answers(6, 300)


async def test_an_engine_that_answers_may_wait_as_long_as_it_takes(fleet: Open) -> None:
    """The other one's start takes long."""
    async with fleet(2) as front:
        waiting, killed = front.fleet.engines
        impatient(front.fleet)
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: killed.restarts == 1 and killed.pid is not None)
        os.kill(killed.pid, signal.SIGSTOP)
        await asyncio.sleep(2 * STALL_S)
        os.kill(killed.pid, signal.SIGCONT)
        await until(lambda: front.fleet.view.complete, 20)
        assert (waiting.restarts, killed.restarts) == (0, 1)
