"""`moeserve serve --standby`: a root process that keeps the engines, and two front ends.

    root process: no HTTP, no text        front end 0: serves
      the listening sockets               front end 1: waits, with tokenizer and templates read
      the engines, by cluster/node.py

When the serving front end dies, the other one takes over at once. Meanwhile connections wait in the
backlog, and the engines keep their weights. All processes end with the root process, which does so
little that it hardly ever fails.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections import deque
from dataclasses import replace

import msgspec

from moeserve.actor.process import Child, Death
from moeserve.actor.tasks import log_error, spawn
from moeserve.actor.zmq_wire import listen
from moeserve.cluster.forks import LocalHost
from moeserve.cluster.host import HEARTBEAT_S, FleetSnapshot, Root, ToNode
from moeserve.cluster.node import NodeAgent, Orphans, end_all
from moeserve.cluster.order import command_of
from moeserve.cluster.rundir import RunDir
from moeserve.config import Config, ServerConfig
from moeserve.errors import ConfigError, EngineDied

log = logging.getLogger(__name__)

# Exit code of a front end after a bug (EX_SOFTWARE); it is replaced after that
CRASH_EXIT_CODE = 70
MAX_MISSED_HEARTBEATS = 10  # heartbeats that a front end may miss
MAX_TAKEOVERS = 5  # within TAKEOVER_WINDOW_S; one more ends the server
TAKEOVER_WINDOW_S = 300.0
# Default of `resume_window`: time for clients to resume their streams
DEFAULT_RESUME_WINDOW_S = 60.0
CONNECT_TIMEOUT_S = 600.0  # time for a front end to read the model's headers and connect
MAX_PAUSE_S = 60.0  # between two starts of a standby front end


class FrontEndOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order to start a front end. It serves once it receives a FleetSnapshot or null."""

    config: Config
    root: Root
    fds: list[int]  # the root's stdout, which a launcher may read, and the listening sockets


def keep_front_ends(config: Config, sockets: list[socket.socket]) -> int:
    """Serve until a signal arrives or a front end exits by itself. Return the exit code."""
    if not config.server.resume_window:
        config = replace(
            config, server=replace(config.server, resume_window=DEFAULT_RESUME_WINDOW_S)
        )
    return asyncio.run(_run_front_ends(config, sockets))


async def _run_front_ends(config: Config, sockets: list[socket.socket]) -> int:
    run_dir = RunDir()
    orphans = Orphans()
    host = LocalHost(run_dir.path)
    front_ends = FrontEnds(config, host, orphans, [os.dup(1), *(sock.fileno() for sock in sockets)])
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, front_ends.stop)
    if reloads_files(config.server):
        loop.add_signal_handler(signal.SIGHUP, front_ends.reload)
    try:
        return await front_ends.run()
    finally:
        await front_ends.close()
        await end_all(orphans)
        await host.close()
        run_dir.close()


def reloads_files(config: ServerConfig) -> bool:
    """Whether a front end reloads files on SIGHUP. Otherwise SIGHUP ends the process."""
    files = config.api_key_file, config.admin_key_file, config.ssl_certfile, config.access_log
    return any(files)


class FrontEndProcess:
    """A front end's process, and the agent that starts its engines once it serves."""

    def __init__(
        self,
        config: Config,
        host: LocalHost,
        orphans: Orphans,
        fds: list[int],
        *,
        number: int,
        follows: int,
        secret: str,
    ) -> None:
        """Start the process. Raise ConfigError.

        Args:
            number: The number of this front end, from 0.
            follows: The number of the front end whose journal it copies; -1: none.
            secret: The token of the journal's connections. The other arguments are those of
                `NodeAgent`.
        """
        address = f"ipc://{host.folder}/root-{number}.sock"
        token = secrets.token_hex(16)
        self.number = number
        self.agent = NodeAgent(
            config,
            host,
            lambda inbox: listen(address, token=token, receives=ToNode, inbox=inbox),
            orphans,
            connect_s=CONNECT_TIMEOUT_S,
        )
        self._agent_task: asyncio.Task[None] | None = None
        root = Root(
            number=number,
            made_at=int(time.time() * 10),
            folder=host.folder,
            address=address,
            token=token,
            follows=follows,
            secret=secret,
        )
        order = msgspec.json.encode(FrontEndOrder(config=config, root=root, fds=fds))
        command = command_of("moeserve.server.front_end_process")
        try:
            self.child = Child.start(f"front end {number}", command, order, pass_fds=fds)
        except ConfigError:
            self.agent.close()
            raise

    def serve(self, snapshot: FleetSnapshot | None) -> None:
        """Let the front end serve, with the engines of the previous one."""
        self.agent.continue_from(snapshot)
        self._agent_task = spawn(self.agent.run(), name="agent", on_error=self._agent_failed)
        self.child.hand_over(msgspec.json.encode(snapshot))

    def _agent_failed(self, name: str, error: Exception) -> None:
        """Kill a front end that cannot start engines any more, so that the next one takes over."""
        if isinstance(error, EngineDied) and self.agent.num_heartbeats:
            return  # the front end ends; if it does not, it is silent now and will be killed
        log_error(name, error)
        self.child.kill(f"lost its agent: {error}")

    async def close(self) -> None:
        """End the process. Its engines are kept if it was killed."""
        if self.child.alive:
            self.child.kill("was not needed any more")
        await self.child.death()
        if self._agent_task is None:
            self.agent.close()
            return
        if not self.agent.connected:
            self._agent_task.cancel()
        await asyncio.gather(self._agent_task, return_exceptions=True)


class FrontEnds:
    """The serving front end, and the standby."""

    def __init__(self, config: Config, host: LocalHost, orphans: Orphans, fds: list[int]) -> None:
        self._config = config
        self._host = host
        self._orphans = orphans
        self._fds = fds
        self._next_number = 0  # number of the next front end
        self._stopping = False
        self._num_failures = 0  # consecutive failures of standby front ends
        self._next_start_at_s = 0.0  # earliest start of the next standby
        self._secret = secrets.token_hex(16)
        self._serving = self._start_front_end(follows=-1)
        self._standby: FrontEndProcess | None = None

    def _start_front_end(self, *, follows: int) -> FrontEndProcess:
        """Start a process. follows: number of the front end whose journal it copies; -1: none."""
        number = self._next_number
        self._next_number += 1
        return FrontEndProcess(
            self._config,
            self._host,
            self._orphans,
            self._fds,
            number=number,
            follows=follows,
            secret=self._secret,
        )

    def stop(self) -> None:
        """Let running requests finish. A second call aborts them."""
        self._stopping = True
        self._serving.child.terminate()

    def reload(self) -> None:
        """Make the serving front end reload its files. The standby does so when its turn comes."""
        self._serving.child.send_signal(signal.SIGHUP)

    async def run(self) -> int:
        """Serve until a front end ends without a crash. Return its exit code."""
        takeovers: deque[float] = deque(maxlen=MAX_TAKEOVERS)
        snapshot: FleetSnapshot | None = None
        while True:
            self._serving.serve(snapshot)
            death = await self._until_death()
            await self._serving.close()
            snapshot = self._serving.agent.snapshot
            if self._stopping or (death.exit_code >= 0 and death.exit_code != CRASH_EXIT_CODE):
                if death.exit_code < 0:  # minus the signal's number
                    return 128 - death.exit_code  # as a shell reports it
                return death.exit_code
            now_s = time.monotonic()
            if len(takeovers) == MAX_TAKEOVERS and now_s - takeovers[0] < TAKEOVER_WINDOW_S:
                what = "%s; giving up: %d takeovers within %g s"
                log.critical(what, death.summary, MAX_TAKEOVERS, TAKEOVER_WINDOW_S)
                return 1
            takeovers.append(now_s)
            log.error("%s; the next one takes over", death.summary)
            successor = self._standby
            self._standby = None
            if successor is None or not successor.child.alive:
                successor = self._start_front_end(follows=-1)
            self._serving = successor

    async def _until_death(self) -> Death:
        """Wait until the serving front end is dead. Replace the standby when it dies."""
        serving = self._serving
        num_missed = 0
        num_beats = 0
        dying = asyncio.create_task(serving.child.death())
        while not dying.done():
            # The serving front end sends heartbeats once it has read its settings. The standby
            # starts after that, so that errors in the settings appear once.
            if num_beats and not self._stopping:
                await self._ensure_standby()
            await asyncio.wait([dying], timeout=HEARTBEAT_S)
            # Count iterations of this loop, not seconds: if the whole machine was suspended, no
            # process was silent.
            is_silent = num_beats > 0 and serving.agent.num_heartbeats == num_beats
            num_missed = num_missed + 1 if is_silent else 0
            num_beats = serving.agent.num_heartbeats
            if num_missed >= MAX_MISSED_HEARTBEATS:
                serving.child.kill(f"did not answer for {MAX_MISSED_HEARTBEATS * HEARTBEAT_S:g} s")
        return dying.result()

    async def _ensure_standby(self) -> None:
        """Replace a dead standby, or start one if there is none."""
        if self._standby is not None and not self._standby.child.alive:
            await self._standby.close()
            lived_s = (await self._standby.child.death()).lived_s
            self._standby = None
            self._num_failures = 0 if lived_s > MAX_PAUSE_S else self._num_failures + 1
            self._retry_later("the standby front end has died")
        if self._standby is None and time.monotonic() >= self._next_start_at_s:
            try:
                self._standby = self._start_front_end(follows=self._serving.number)
            except ConfigError as error:  # too many processes or files
                self._num_failures += 1
                self._retry_later(str(error))

    def _retry_later(self, why: str) -> None:
        """Delay the start of the next standby, longer after each failure."""
        pause_s = min(0.5 * 2.0**self._num_failures, MAX_PAUSE_S)
        self._next_start_at_s = time.monotonic() + pause_s
        log.warning("%s; another one starts in %g s", why, pause_s)

    async def close(self) -> None:
        """End both front ends."""
        for front_end in (self._serving, self._standby):
            if front_end is not None:
                await front_end.close()
