"""The engine processes of this machine: forks of one that has imported what takes long, so that any of them is there
within tens of milliseconds, however many die in a row. They also share the libraries' memory.

That one knows nothing of the model, the settings, or any secret. Where it cannot be had, engines start on their own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress

from moeserve.actor.forked import POSSIBLE, ForkServer
from moeserve.actor.process import Child, Death
from moeserve.cluster.command import command_of
from moeserve.errors import ConfigError

log = logging.getLogger(__name__)

ENGINE = "moeserve.cluster.engine_main"
FORK_SERVER = "moeserve.cluster.fork_server"
PAUSE_S = 0.5  # before a fork server that died is replaced; twice as long each time in a row
MAX_PAUSE_S = 60.0

Forward = Callable[[str], None]


class Forks:
    """On the machine's loop: `keep` a fork server, or not, then `start` engines."""

    def __init__(self) -> None:
        self._tp_size = 1
        self._server: ForkServer | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._failures = 0  # of the server, in a row

    @property
    def server(self) -> ForkServer | None:
        """The one that lives now, if it is warm."""
        return self._server if self._server is not None and self._server.warm else None

    def keep(self, tp_size: int) -> None:
        """From now on engines are forked, together with their workers: tp_size processes each."""
        self._tp_size = tp_size
        if POSSIBLE and self._keeping is None:
            self._new()
            self._keeping = asyncio.get_running_loop().create_task(self._keep(), name="fork server")

    def start(self, name: str, order: bytes, forward: Forward | None) -> Child | ForkedEngine:
        """The engine of that name. Raises ConfigError."""
        if self._server is None:
            return start_alone(name, order, forward)
        return ForkedEngine(name, order, forward, self._server, self._tp_size)

    async def close(self) -> None:
        """Ends the server; no engine ends with it."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
            self._keeping = None
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def _keep(self) -> None:
        while True:
            if self._server is not None:
                log.warning("%s", await self._until_death(self._server))
                await self._server.close()
                self._server = None
                self._failures += 1
            pause_s = min(PAUSE_S * 2.0**self._failures, MAX_PAUSE_S)
            log.warning("engines start on their own until there is another fork server, in %g s", pause_s)
            await asyncio.sleep(pause_s)
            self._new()

    async def _until_death(self, server: ForkServer) -> Death:
        with suppress(OSError):
            await server.until_warm()
            self._failures = 0
            log.info("the fork server is warm (pid %d)", server.child.pid)
        return await server.child.death()

    def _new(self) -> None:
        try:
            self._server = ForkServer(command_of(FORK_SERVER))
        except (ConfigError, OSError) as error:
            self._failures += 1
            log.warning("%s", error)


def start_alone(name: str, order: bytes, forward: Forward | None) -> Child:
    """An engine that imports everything itself. Raises ConfigError."""
    return Child.start(name, command_of(ENGINE), order, forward=forward)


class ForkedEngine:
    """`Process` that is forked as soon as the server is warm; it starts alone if the server fails."""

    def __init__(self, name: str, order: bytes, forward: Forward | None, server: ForkServer, num_ranks: int) -> None:
        self.name = name
        self._order = order
        self._forward = forward
        self._child: Child | None = None
        self._begun = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._death: asyncio.Future[Death] = loop.create_future()
        self._life = loop.create_task(self._live(server, num_ranks), name=name)

    @property
    def pid(self) -> int:
        return 0 if self._child is None else self._child.pid

    @property
    def alive(self) -> bool:
        return not self._death.done() if self._child is None else self._child.alive

    async def started(self) -> int:
        """Returns its pid once it has one, 0 if it ended without."""
        await self._begun.wait()
        return self.pid

    async def death(self) -> Death:
        return await asyncio.shield(self._death)

    def kill(self, verdict: str) -> None:
        if self._child is not None:
            self._child.kill(verdict)
        else:
            self._end(Death(self.name, 0, -signal.SIGKILL, 0.0, (), verdict or "was killed"))

    async def stop(self, term_s: float, verdict: str = "") -> Death:
        if self._child is not None:
            return await self._child.stop(term_s, verdict)
        self.kill(verdict or "was stopped before it began")
        return await self.death()

    def _end(self, death: Death) -> None:
        if not self._death.done():
            self._death.set_result(death)
        self._begun.set()

    async def _live(self, server: ForkServer, num_ranks: int) -> None:
        try:
            child = await self._start(server, num_ranks)
        except ConfigError as error:
            self._end(Death(self.name, 0, error.exit_code, 0.0, (str(error),), f"was not started: {error}"))
            return
        if child is None:
            return
        if self._death.done():  # the server cannot take a fork back
            child.kill("was killed before it began")
            await child.death()
            return
        self._child = child
        self._begun.set()
        self._end(await child.death())

    async def _start(self, server: ForkServer, num_ranks: int) -> Child | None:
        """None if it is to end before it has begun. Raises ConfigError."""
        try:
            forked = await server.fork(num_ranks)
        except OSError as error:  # a timeout is one, too
            if self._death.done():
                return None
            log.warning("%s was not forked, and starts on its own: %s", self.name, error)
            return start_alone(self.name, self._order, self._forward)
        return Child.take(self.name, forked, self._order, forward=self._forward)
