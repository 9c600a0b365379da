"""Build an engine: its runner in a thread, then the EngineCore around it on the running loop.

`join_group` connects the ranks of an engine to the other engines of its group.
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

# The result of a builder: runner, resolved limits, facts for the front end, KV groups and
# end-of-text token ids. A builder's arguments are the settings, the role and a Progress.
Built = tuple["Runner", Limits, Ready, "tuple[KVGroup, ...]", "tuple[int, ...]"]
Progress = Callable[[str, int], None]  # called with the name of a phase and the percentage done


@runtime_checkable
class SeveralRanks(Protocol):
    """A runner whose engine has more than one process."""

    def watch_traces(self, on_traced: Callable[[Traced], object]) -> None:
        """Call `on_traced` with the traces of other ranks, from any thread."""

    async def died(self) -> Exception:
        """Wait until the engine has lost one of its ranks, and return the cause."""


async def assemble(
    config: Config,
    builder: str,
    role: Role,
    inbox: Inbox[EngineIn],
    emit: Callable[[EngineOut], object],
    born_s: float,
) -> tuple[EngineCore, Ready]:
    """Build a runner and an EngineCore for it, and emit Phase messages meanwhile.

    The loop is never blocked, not even by slow imports. Raises the errors of the builder. If this
    coroutine is cancelled, the building thread runs on, and its result is ignored.

    Args:
        builder: `module:function` that makes the runner, see `Built`.
        role: the engine's part in the fleet.
        born_s: monotonic time at which the start began.
    """
    loop = asyncio.get_running_loop()
    is_over = False  # the runner is built, or building it failed or was cancelled

    def emit_phase(name: str, percent: int) -> None:
        if not is_over:  # the thread may run on
            emit(Phase(name, percent, time.monotonic() - born_s))

    def progress(name: str, percent: int) -> None:  # called in the building thread
        loop.call_soon_threadsafe(emit_phase, name, percent)

    def build() -> Built:  # runs in a thread
        # Slow imports, which are needed below on the loop.
        import moeserve.engine.group_core
        import moeserve.engine.scheduler  # noqa: F401

        module, _, function = builder.partition(":")
        built: Built = getattr(import_module(module), function)(config, role, progress)
        return built

    emit_phase("importing libraries", 1)
    try:
        runner, limits, ready, groups, eos_ids = await in_thread("engine start", build)
    finally:
        is_over = True
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
    group_runner = cast("GroupRunner", runner)
    core = GroupCore(scheduler, group_runner, inbox, emit, partial(join_group, group_runner))
    return core, ready


def kv_identity(ready: Ready) -> dict[str, bytes]:
    """Return the parts of KV block keys that depend on the model and its numerics.

    Blocks of one engine can be used by another one only if these are equal.
    """
    numerics = msgspec.json.encode({"dtype": ready.dtype, **ready.numerics}, order="sorted")
    return {"model": ready.checkpoint.encode(), "numerics": numerics}


async def join_group(runner: GroupRunner, join: Join) -> DPCoordinator:
    """Execute a Join: connect the runner's ranks and the coordinator, and return the coordinator.

    Raises PeerLost as soon as the coordinator or the runner fails, or another engine leaves before
    both are connected.
    """
    from moeserve.comm.dp_coordinator import open_coordinator
    from moeserve.comm.members import Members
    from moeserve.engine.group_core import drop_coordinator

    # The front end made the directory only on its own machine.
    os.makedirs(join.directory, mode=0o700, exist_ok=True)
    loop = asyncio.get_running_loop()
    joining = loop.create_task(runner.join(join))
    opening = loop.create_task(open_coordinator(Members.of(join, 0)))
    tasks: set[asyncio.Task[Any]] = {joining, opening}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if joining.done():
            joining.result()
        coordinator = await opening
        group_lost = loop.create_task(coordinator.wait_lost())
        tasks.add(group_lost)
        await asyncio.wait({joining, group_lost}, return_when=asyncio.FIRST_COMPLETED)
        if coordinator.lost is not None:
            raise coordinator.lost
        await joining
        group_lost.cancel()
        return coordinator
    except BaseException as error:
        missing = error.missing if isinstance(error, PeerLost) else ()
        opening.add_done_callback(partial(drop_coordinator, cause=str(error), missing=missing))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
