"""Builds an engine on the running loop: the runner in a thread, the core around it here. Connects
it to its group.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import msgspec

from moeserve.actor.actor import Inbox
from moeserve.actor.tasks import in_thread
from moeserve.cluster.order import Role
from moeserve.config import Config, Limits
from moeserve.errors import PeerLost
from moeserve.messages import EngineIn, EngineOut, Join, Phase, Ready, Traced

if TYPE_CHECKING:
    from moeserve.engine.blocks import KVGroup
    from moeserve.engine.core import EngineCore
    from moeserve.engine.plan import Runner
    from moeserve.engine.vote import DPCoordinator, GroupRunner

# A builder gets the settings, the role, and progress(name of the phase, percent of the whole). It
# returns runner, resolved limits, facts for the front end, KV groups, end-of-text ids.
Built = tuple["Runner", Limits, Ready, "tuple[KVGroup, ...]", "tuple[int, ...]"]
Progress = Callable[[str, int], None]


@runtime_checkable
class SeveralRanks(Protocol):
    """A runner whose engine has other processes, too."""

    def watch_traces(self, on_traced: Callable[[Traced], object]) -> None:
        """Call `on_traced` with the traces of other ranks, from any thread."""

    async def died(self) -> Exception:
        """Return why the engine cannot continue, once one of its ranks is gone."""


async def assemble(
    config: Config,
    builder: str,
    role: Role,
    inbox: Inbox[EngineIn],
    emit: Callable[[EngineOut], object],
    born_s: float,
) -> tuple[EngineCore, Ready]:
    """Build the runner (`builder` is `module:function`) and an EngineCore for it; emits Phase
    meanwhile.

    role: the engine's place among others. born_s: monotonic time at which the start began. Raises
    what the builder raises. The loop stays free throughout, imports of torch and the like included.
    Cancelled, it leaves the building thread to itself.
    """
    loop = asyncio.get_running_loop()
    abandoned = False

    def tell(name: str, percent: int) -> None:
        """Emit a Phase unless the build is over."""
        if not abandoned:
            emit(Phase(name, percent, time.monotonic() - born_s))

    def progress(name: str, percent: int) -> None:
        """Emit a Phase from the building thread."""
        loop.call_soon_threadsafe(tell, name, percent)

    def build() -> Built:
        """Build the runner; runs in a thread."""
        import moeserve.engine.group_core
        import moeserve.engine.scheduler  # noqa: F401  (slow: here, so that the loop stays free)

        module, _, function = builder.partition(":")
        built: Built = getattr(import_module(module), function)(config, role, progress)
        return built

    tell("importing libraries", 1)
    try:
        runner, limits, ready, groups, eos_ids = await in_thread("engine start", build)
    finally:
        abandoned = True
    from moeserve.engine.core import EngineCore
    from moeserve.engine.group_core import GroupCore
    from moeserve.engine.scheduler import Scheduler

    scheduler = Scheduler(
        limits,
        groups,
        eos_ids=eos_ids,
        vocab_size=ready.vocab_size,
        identity=kv_identity(ready),
    )
    if not role.grouped:
        return EngineCore(scheduler, runner, inbox, emit), ready
    if isinstance(runner, SeveralRanks):
        runner.watch_traces(lambda traced: loop.call_soon_threadsafe(emit, traced))
    grouped = cast("GroupRunner", runner)
    return GroupCore(scheduler, grouped, inbox, emit, partial(form, grouped)), ready


def kv_identity(ready: Ready) -> dict[str, bytes]:
    """Return what the keys of an engine's KV blocks have in common."""
    numerics = msgspec.json.encode({"dtype": ready.dtype, **ready.numerics}, order="sorted")
    return {"model": ready.checkpoint.encode(), "numerics": numerics}


async def form(runner: GroupRunner, join: Join) -> DPCoordinator:
    """Execute a Join: connects a runner's ranks, and return the connection to the coordinator,
    for `GroupCore`.

    Raises PeerLost as soon as coordinator or runner fails, or another engine gives up before both
    are connected.
    """
    from moeserve.comm.dp_coordinator import open_coordinator
    from moeserve.comm.members import Members
    from moeserve.engine.group_core import drop_coordinator

    os.makedirs(
        join.directory, mode=0o700, exist_ok=True
    )  # the front end may be on another machine
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
