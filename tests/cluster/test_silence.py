"""Engines that hang: no death is reported, so their missing answers must be noticed."""

from __future__ import annotations

import asyncio
import os
import signal

from moeserve.frontend.front_end import FrontEnd

from .test_fleet import Open, answers, fleet, kill, some, until

__all__ = ["fleet"]  # a fixture

STALL_S = 2.0


def restarts(front: FrontEnd) -> list[int]:
    return [engine.restarts for engine in front.fleet.view.engines]


async def test_an_engine_that_stops_while_the_others_wait_for_it_is_replaced(fleet: Open) -> None:
    """The group breaks before its silence is noticed: from then on it is held for the next meeting,
    where it is waited for, and steps are not expected of it any more."""
    async with fleet(2, stall_s=2 * STALL_S) as front:  # time for the other one to be back
        streams = await some(front, 6, 300)
        first = front.fleet.view.engines[0].pid

        def held() -> bool:
            stopped, killed = front.fleet.engines
            return killed.restarts == 1 and killed.up and stopped.held

        os.kill(first, signal.SIGSTOP)
        kill(front, 1)
        await until(held)
        await until(lambda: restarts(front)[0] == 1 and front.fleet.view.complete, 20)
        assert front.fleet.view.engines[0].pid != first
        assert await streams == answers(6, 300)


async def test_an_engine_that_answers_may_wait_as_long_as_it_takes(fleet: Open) -> None:
    """The other one's start takes long."""
    async with fleet(2, stall_s=STALL_S) as front:
        kill(front, 1)
        await until(lambda: restarts(front)[1] == 1 and front.fleet.view.engines[1].pid is not None)
        starting = front.fleet.view.engines[1].pid
        os.kill(starting, signal.SIGSTOP)
        await asyncio.sleep(2 * STALL_S)
        os.kill(starting, signal.SIGCONT)
        await until(lambda: front.fleet.view.complete, 20)
        assert restarts(front) == [0, 1]
