"""One engine of a fleet: its engine process, where it stands with the others, and the requests that it has."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Protocol

from moeserve.cluster.engine_process import EngineProcess
from moeserve.cluster.host import Host
from moeserve.cluster.interface import EngineGone
from moeserve.cluster.order import Role
from moeserve.config import Config
from moeserve.errors import Overloaded
from moeserve.messages import Drain, EngineOut, Joined, Parted, StepOutput, Stopped
from moeserve.metrics import StepRecord


class Overseer(Protocol):
    """Who looks after all engines."""

    async def hear(self, engine: EngineHandle, msg: EngineOut) -> None: ...

    def lost(self, engine: EngineHandle) -> None: ...

    def gone(self, engine: EngineHandle, end: EngineGone) -> None: ...


class EngineHandle:
    """rank: data-parallel, and the engine process's name. role: what its next process is told. options: those of
    `EngineProcess`.

    epoch: of the group in which it serves, 0 for none. parted: why it is not in the group any more or did not get in.
    """

    def __init__(self, overseer: Overseer, rank: int, role: Role, config: Config, options: dict[str, Any]) -> None:
        self.rank = rank
        self.role = role
        self.rids: set[int] = set()
        self.epoch = 0
        self.parted: Parted | None = None
        self.restarts = 0
        self.retired = False  # nothing that it says counts any more
        self.draining = False  # it was told to stop: no new requests
        self.obeyed = False  # its process ended because it was told to
        self.last: StepRecord | None = None
        self.host = ""
        self.end: EngineGone | None = None  # it is gone for good
        self._overseer = overseer
        self._served = False  # the process that lives now has been in a group
        self.process = EngineProcess(config, self, name=f"engine {rank}", role=lambda: self.role, **options)
        self._task: asyncio.Task[None] | None = None

    def start(self, host: Host) -> None:
        self.host = host.name
        self._task = asyncio.get_running_loop().create_task(self.process.run(host), name=self.process.name)

    async def stop(self, deadline_s: float) -> None:
        if self._task is not None:
            await self.process.stop(deadline_s)
            await asyncio.wait([self._task])

    @property
    def up(self) -> bool:
        """Whether there is a process that could join."""
        return self.process.ready is not None and self.end is None

    @property
    def state(self) -> str:
        if self.end is not None:
            return "gone"
        if not self.up:
            return "loading" if not self.restarts else "lost"
        if self.draining:
            return "draining"
        return "serving" if self.epoch else "waiting"

    def join(self, epoch: int) -> None:
        """It serves in this epoch; its own word, or where no meeting is needed."""
        self.epoch, self.parted = epoch, None
        self._served = True

    # For the engine process

    async def hear(self, msg: EngineOut) -> None:
        match msg:
            case Joined(epoch=epoch):
                self.join(epoch)
            case Parted(epoch=epoch):
                if epoch >= self.epoch:
                    self.epoch, self.parted = 0, msg
            case StepOutput(record=record) if record is not None:
                self.last = record
            case Stopped(cause=""):
                self.obeyed = True
        await self._overseer.hear(self, msg)

    def lost(self) -> None:
        if self._cut():
            self._overseer.lost(self)

    def gone(self, end: EngineGone) -> None:
        if self._cut():
            self._overseer.lost(self)
        if end.restarting:
            self.restarts += 1
            self.obeyed = False
        else:
            self.end = end
        self._overseer.gone(self, end)

    def _cut(self) -> bool:
        """Whether the process had served; the next one has not."""
        served = self._served
        self._served = self.draining = False
        self.epoch, self.parted = 0, None
        return served

    def drain(self, deadline_s: float) -> None:
        self.draining = True
        with suppress(Overloaded):  # then it is stopped with the fleet
            self.process.send(Drain(deadline_s))
