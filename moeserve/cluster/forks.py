"""Start the engine processes of this machine, as forks of a process that has done the slow imports.

A fork starts within tens of milliseconds, however many engines die in a row, and shares the memory
of the libraries. The fork server does not know the model, the settings or any secret. Without a
fork server, engines start as ordinary child processes.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress

from moeserve.actor.forking import IS_SUPPORTED, ForkServer
from moeserve.actor.handshake import Keys
from moeserve.actor.process import Child, to_stderr
from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.cluster.ahead import ENGINE, take_early_process
from moeserve.cluster.order import command_of
from moeserve.config import Config
from moeserve.errors import ConfigError

log = logging.getLogger(__name__)

FORK_SERVER = "moeserve.cluster.fork_server"
PAUSE_S = 0.5  # before a dead fork server is replaced; doubled for each failure in a row
MAX_PAUSE_S = 60.0


class LocalHost:
    """This machine, which starts engines: from a fork server once `keep_fork_server` was called.

    Belongs to one loop.
    """

    def __init__(self, folder: str) -> None:
        self.number = 0  # of the machine
        self.name = "node-0"  # engines on hosts with the same name can share memory
        self.folder = folder  # private, for sockets
        # As in `RemoteHost`: no engine ever waits for this machine.
        self.is_missing = False
        self.waiting_phase = ""
        self._tp_size = 1
        self._server: ForkServer | None = None
        self._server_task: asyncio.Task[None] | None = None

    def listen_address(self, name: str) -> tuple[str, Keys | None]:
        """Return the address to listen at for an engine, and the wire's keys (none here)."""
        return f"ipc://{os.path.join(self.folder, name.replace(' ', '-'))}.sock", None

    @property
    def server(self) -> ForkServer | None:
        """The fork server if it is warm (has done its imports), otherwise None."""
        return self._server if self._server is not None and self._server.warm else None

    def keep_fork_server(self, config: Config) -> None:
        """Run a fork server from now on, if the settings allow it and it is of use."""
        self._tp_size = config.parallel.tp
        is_wanted = config.parallel.fork_server == "on" and not config.device.null_runner
        if (
            self._server_task is None
            and IS_SUPPORTED
            and is_wanted
            and config.parallel.num_ranks > 1
        ):
            # Engines can start without the fork server, so its failure is only logged.
            self._server_task = spawn(
                self._run_fork_server(), name="fork server", on_error=log_error
            )

    async def start(
        self, name: str, order: bytes, forward: Callable[[str], None] = to_stderr
    ) -> Child:
        """Start an engine. Raises ConfigError.

        Args:
            order: JSON of an EngineOrder.
            forward: called with each line of the engine's log.
        """
        if self._server is not None:
            try:
                forked = await self._server.fork(self._tp_size)
            except OSError as error:  # also TimeoutError, which is a subclass
                log.warning("%s was not forked, starting it as a new process: %s", name, error)
            else:
                return Child.take(name, forked, order, forward=forward)
        if (early := take_early_process()) is not None:
            return Child.take(name, early, order, forward=forward)
        return Child.start(name, command_of(ENGINE), order, forward=forward)

    async def close(self) -> None:
        """End the fork server. Engines keep running."""
        await cancel(self._server_task)
        self._server_task = None

    async def _run_fork_server(self) -> None:
        """Run a fork server, and replace it when it ends."""
        num_failures = 0  # in a row
        while True:
            try:
                server = self._server = ForkServer(command_of(FORK_SERVER))
                with suppress(OSError):  # the process died, and the warning below says how
                    await server.until_warm()
                    num_failures = 0
                    log.info("the fork server is warm (pid %d)", server.child.pid)
                log.warning("%s", await server.child.death())
            except (ConfigError, OSError) as error:
                log.warning("%s", error)
            finally:
                ended = self._server
                self._server = None
                if ended is not None:
                    await ended.close()
            num_failures += 1
            pause_s = min(PAUSE_S * 2.0**num_failures, MAX_PAUSE_S)
            log.warning("engines start without a fork server; starting another in %g s", pause_s)
            await asyncio.sleep(pause_s)
