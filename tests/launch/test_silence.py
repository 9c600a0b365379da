"""Engines that stand still: nobody hears of a death, so somebody must miss their answers."""

from __future__ import annotations

import asyncio
import os
import signal

from moeserve.launch.fleet import Fleet

from .test_fleet import Open, answers, fleet, some, until

__all__ = ["fleet"]  # a fixture

STALL_S = 1.5


def impatient(fleet: Fleet) -> None:
    for member in fleet.members:
        member.seat._stall_s = STALL_S


async def test_an_engine_that_stops_while_the_others_wait_for_it_is_replaced(fleet: Open) -> None:
    """The group breaks before its silence is noticed: from then on it is held for the next meeting, where it is
    waited for, and steps are not expected of it any more."""
    async with fleet(2) as front:
        streams = await some(front, 6, 300)
        stopped, killed = front.fleet.members
        impatient(front.fleet)
        first = stopped.seat.pid
        os.kill(stopped.seat.pid, signal.SIGSTOP)
        os.kill(killed.seat.pid, signal.SIGKILL)
        await until(lambda: killed.restarts == 1 and killed.up and stopped.seat.held)
        await until(lambda: stopped.restarts == 1 and front.fleet.view.complete, 20)
        assert stopped.seat.pid != first
        assert await streams == answers(6, 300)


async def test_an_engine_that_answers_may_wait_as_long_as_it_takes(fleet: Open) -> None:
    """The other one's start takes long."""
    async with fleet(2) as front:
        waiting, killed = front.fleet.members
        impatient(front.fleet)
        os.kill(killed.seat.pid, signal.SIGKILL)
        await until(lambda: killed.restarts == 1 and killed.seat.pid is not None)
        os.kill(killed.seat.pid, signal.SIGSTOP)
        await asyncio.sleep(2 * STALL_S)
        os.kill(killed.seat.pid, signal.SIGCONT)
        await until(lambda: front.fleet.view.complete, 20)
        assert (waiting.restarts, killed.restarts) == (0, 1)
