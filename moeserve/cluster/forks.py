"""Starts the engine processes of this machine, as forks of one process that has done the slow
imports.

A fork is there within tens of milliseconds, however many engines die in a row, and shares the
libraries' memory. The fork server knows nothing of the model, the settings, or any secret. Without
a fork server engines start on their own.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress

from moeserve.actor.forking import POSSIBLE, ForkServer
from moeserve.actor.handshake import Keys
from moeserve.actor.process import Child, to_stderr
from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.cluster.ahead import ENGINE, take
from moeserve.cluster.order import command_of
from moeserve.config import Config
from moeserve.errors import ConfigError

log = logging.getLogger(__name__)

FORK_SERVER = "moeserve.cluster.fork_server"
PAUSE_S = 0.5  # before a fork server that died is replaced; twice as long each time in a row
MAX_PAUSE_S = 60.0


class LocalHost:
    """This machine, which starts engines: from a fork server once `keep` was called. Belongs to one
    loop.

    number: of the machine. name: hosts of equal names share memory. folder: private here, for
    sockets. absent: why the machine is not here, for people; empty if it is.
    """

    def __init__(self, folder: str) -> None:
        self.number = 0
        self.name = "node-0"
        self.folder = folder
        self.absent = ""
        self._tp_size = 1
        self._server: ForkServer | None = None
        self._keeping: asyncio.Task[None] | None = None

    def listen_address(self, name: str) -> tuple[str, Keys | None]:
        """Return where to listen for an engine of this machine, and the wire's keys: a socket here
        needs none.
        """
        return f"ipc://{os.path.join(self.folder, name.replace(' ', '-'))}.sock", None

    @property
    def server(self) -> ForkServer | None:
        """The fork server, if there is one and it is warm."""
        return self._server if self._server is not None and self._server.warm else None

    def keep(self, config: Config) -> None:
        """Keep a fork server from now on, if the settings ask for one and it would be of use."""
        self._tp_size = config.parallel.tp
        wanted = config.parallel.fork_server == "on" and not config.device.null_runner
        if self._keeping is None and POSSIBLE and wanted and config.parallel.num_ranks > 1:
            # Engines start on their own without a fork server, so its end is only logged.
            self._keeping = spawn(self._keep(), name="fork server", on_error=log_error)

    async def start(
        self, name: str, order: bytes, forward: Callable[[str], None] = to_stderr
    ) -> Child:
        """Start an engine with this order (JSON of an EngineOrder). Raises ConfigError."""
        if self._server is not None:
            try:
                forked = await self._server.fork(self._tp_size)
            except OSError as error:  # TimeoutError is one, too
                log.warning("%s was not forked, and starts on its own: %s", name, error)
            else:
                return Child.take(name, forked, order, forward=forward)
        if (begun := take()) is not None:
            return Child.take(name, begun, order, forward=forward)
        return Child.start(name, command_of(ENGINE), order, forward=forward)

    async def close(self) -> None:
        """End the fork server; no engine ends with it."""
        await cancel(self._keeping)
        self._keeping = None

    async def _keep(self) -> None:
        failures = 0
        while True:
            try:
                server = self._server = ForkServer(command_of(FORK_SERVER))
                with suppress(OSError):  # its death says more
                    await server.until_warm()
                    failures = 0
                    log.info("the fork server is warm (pid %d)", server.child.pid)
                log.warning("%s", await server.child.death())
            except (ConfigError, OSError) as error:
                log.warning("%s", error)
            finally:
                ended = self._server
                self._server = None
                if ended is not None:
                    await ended.close()
            failures += 1
            pause_s = min(PAUSE_S * 2.0**failures, MAX_PAUSE_S)
            log.warning(
                "engines start on their own until there is another fork server, in %g s", pause_s
            )
            await asyncio.sleep(pause_s)
