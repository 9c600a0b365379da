"""An engine in a process of its own: one supervised engine process, as the front end's link."""

from __future__ import annotations

import asyncio
from typing import Any

from moeserve.actor.inbox import Inbox
from moeserve.cluster.engine_process import INBOX_LIMIT, EngineProcess
from moeserve.cluster.host import LocalHost
from moeserve.cluster.interface import EngineGone, FromEngine
from moeserve.cluster.rundir import RunDir
from moeserve.config import Config
from moeserve.messages import EngineIn, EngineOut, Phase, Ready


class ChildEngine:
    """`EngineLink` to a supervised process; see interface.py. Options are those of `EngineProcess`."""

    def __init__(self, config: Config, **options: Any) -> None:
        self.inbox: Inbox[FromEngine] = Inbox("front end", INBOX_LIMIT)
        self._process = EngineProcess(config, self, **options)
        self._run_dir: RunDir | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        assert self._task is None, "a link is started once"
        self._run_dir = RunDir()
        self._task = asyncio.get_running_loop().create_task(self._run(self._run_dir), name="engine link")

    async def _run(self, run_dir: RunDir) -> None:
        try:
            await self._process.run(LocalHost(run_dir.path))
        finally:
            run_dir.close()

    async def until_ready(self) -> Ready:
        return await asyncio.shield(self._process.first_ready)

    @property
    def phase(self) -> Phase:
        return self._process.phase

    @property
    def ready(self) -> Ready | None:
        return self._process.ready

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def stalled_s(self) -> float:
        return self._process.stalled_s

    @property
    def healthy(self) -> bool:
        return self._process.healthy

    def send(self, msg: EngineIn) -> None:
        self._process.send(msg)

    async def stop(self, deadline_s: float) -> None:
        if self._task is not None:
            await self._process.stop(deadline_s)
            await asyncio.wait([self._task])

    # For the engine process

    async def hear(self, msg: EngineOut) -> None:
        await self.inbox.room()
        if not self.inbox.closed:
            self.inbox.put(msg)

    def lost(self) -> None:
        """`gone` follows within a moment, and there is no other engine to turn to meanwhile."""

    def gone(self, end: EngineGone) -> None:
        if not self.inbox.closed:
            self.inbox.put(end, force=True)
