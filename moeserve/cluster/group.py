"""Executes an engine's Join: connects the DP coordinator that votes and, at the same time, the runner's ranks."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from moeserve.errors import PeerLost
from moeserve.messages import Join

if TYPE_CHECKING:
    from moeserve.engine.vote import DPCoordinator, GroupRunner


async def form(runner: GroupRunner, join: Join) -> DPCoordinator:
    """Connects a runner's ranks and returns the coordinator's connection, which `GroupCore` votes over.

    Raises PeerLost as soon as coordinator or runner fails, or another engine gives up before both are connected.
    """
    from moeserve.comm.dp_coordinator import open_coordinator
    from moeserve.comm.members import Members
    from moeserve.engine.group_core import drop_coordinator

    os.makedirs(join.directory, mode=0o700, exist_ok=True)  # the front end may be on another machine
    loop = asyncio.get_running_loop()
    joining = loop.create_task(runner.join(join))
    meeting = loop.create_task(open_coordinator(Members.of(join, 0)))
    tasks: set[asyncio.Task[Any]] = {joining, meeting}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if joining.done():
            joining.result()
        coordinator = await meeting
        tasks.add(breaking := loop.create_task(coordinator.broken()))
        await asyncio.wait({joining, breaking}, return_when=asyncio.FIRST_COMPLETED)
        if coordinator.lost is not None:
            raise coordinator.lost
        await joining
        breaking.cancel()
        return coordinator
    except BaseException as error:
        missing = error.missing if isinstance(error, PeerLost) else ()
        meeting.add_done_callback(partial(drop_coordinator, cause=str(error), missing=missing))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
