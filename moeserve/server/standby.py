"""`moeserve serve --standby`: a root process that keeps the engines, and two front ends, of which
one serves.

    root process: no HTTP, no text        front end 0: serves
      the listening sockets               front end 1: stands by, with tokenizer and templates read
      the engines, by cluster/node.py

When the front end that serves dies, the other one takes over at once: connections wait in the
backlog meanwhile, and the engines keep their weights. All end with the root process, which does so
little that it has few reasons to end.
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
from queue import SimpleQueue

import msgspec

from moeserve.actor import guard
from moeserve.actor.process import Child, Death, to_stderr
from moeserve.actor.zmq_wire import listen
from moeserve.cluster.forks import LocalHost
from moeserve.cluster.host import HEARTBEAT_S, FleetSnapshot, Root, ToNode
from moeserve.cluster.logs import set_up_logging
from moeserve.cluster.node import NodeAgent, Orphans, end_all
from moeserve.cluster.order import command_of
from moeserve.cluster.rundir import RunDir
from moeserve.config import Config
from moeserve.errors import ConfigError, MoeserveError

log = logging.getLogger("moeserve.server.standby")

# exit code of a front end after an unexpected error (EX_SOFTWARE); other codes are for people
CRASHED = 70
MAX_SILENT = 10  # beats that a front end may miss
# more within this time end the server
MAX_TAKEOVERS = 5
WINDOW_S = 300.0
RESUME_S = 60.0  # for clients to come back for their streams, where the settings say nothing
CONNECT_S = 600.0  # for a front end to read the model's headers and connect
MAX_PAUSE_S = 60.0  # between two starts of a front end that stands by


class FrontEndOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order to start a front end. It serves once a further document comes: FleetSnapshot or null.

    fds: of our stdout, to which a launcher may listen, and of the listening sockets.
    """

    config: Config
    root: Root
    fds: list[int]


# ---- the root process
# ----------------------------------------------------------------------------------------------


def keep_front_ends(config: Config, sockets: list[socket.socket]) -> int:
    """Serves on these sockets until a signal comes or a front end ends on its own; returns the exit
    code.
    """
    if not config.server.resume_window:
        config = replace(config, server=replace(config.server, resume_window=RESUME_S))
    return asyncio.run(_keep(config, sockets))


async def _keep(config: Config, sockets: list[socket.socket]) -> int:
    run_dir = RunDir()
    kept = Orphans()
    host = LocalHost(run_dir.path)
    front_ends = FrontEnds(config, host, kept, [os.dup(1), *(sock.fileno() for sock in sockets)])
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, front_ends.stop)
    try:
        return await front_ends.run()
    finally:
        await front_ends.close()
        await end_all(kept)
        await host.close()
        run_dir.close()


class FrontEndProcess:
    """A front end, and the agent that starts its engines once it serves."""

    def __init__(
        self,
        config: Config,
        host: LocalHost,
        kept: Orphans,
        fds: list[int],
        number: int,
        follows: int,
        secret: str,
    ) -> None:
        address = f"ipc://{host.folder}/root-{number}.sock"
        token = secrets.token_hex(16)
        self.agent = NodeAgent(
            config,
            host,
            lambda inbox: listen(address, token=token, receives=ToNode, inbox=inbox),
            kept,
            connect_s=CONNECT_S,
        )
        self._obeying: asyncio.Task[None] | None = None
        root = Root(
            number=number,
            made_at=int(time.time() * 10),
            folder=host.folder,
            address=address,
            token=token,
            follows=follows,
            secret=secret,
        )
        self.number = number
        order = msgspec.json.encode(FrontEndOrder(config=config, root=root, fds=fds))
        self.child = Child.start(
            f"front end {number}", command_of("moeserve.server.standby"), order, pass_fds=fds
        )

    def serve(self, snapshot: FleetSnapshot | None) -> None:
        """Lets the front end serve, with the engines that the one before had in the end."""
        self.agent.continue_from(snapshot)
        self._obeying = asyncio.get_running_loop().create_task(self.agent.run(), name="agent")
        self.child.hand_over(msgspec.json.encode(snapshot))

    async def close(self) -> None:
        """Ends the process; its engines are kept if it was killed."""
        if self.child.alive:
            self.child.kill("was not needed any more")
        await self.child.death()
        if self._obeying is None:
            self.agent.close()
            return
        if not self.agent.connected:
            self._obeying.cancel()
        await asyncio.gather(self._obeying, return_exceptions=True)


class FrontEnds:
    """The front end that serves, and the one that stands by."""

    def __init__(self, config: Config, host: LocalHost, kept: Orphans, fds: list[int]) -> None:
        self._config = config
        self._host = host
        self._kept = kept
        self._fds = fds
        self._number = 0  # of the next one
        self._stopping = False
        self._failures = 0  # of front ends that stood by, in a row
        self._secret = secrets.token_hex(16)
        self._serving = self._new(-1)
        self._standby: FrontEndProcess | None = None

    def _new(self, follows: int) -> FrontEndProcess:
        number = self._number
        self._number = self._number + 1
        return FrontEndProcess(
            self._config, self._host, self._kept, self._fds, number, follows, self._secret
        )

    def stop(self) -> None:
        """Lets running requests finish; called again, it does not."""
        self._stopping = True
        self._serving.child.terminate()

    async def run(self) -> int:
        """Returns the exit code of the last front end."""
        takeovers: deque[float] = deque(maxlen=MAX_TAKEOVERS)
        snapshot: FleetSnapshot | None = None
        while True:
            self._serving.serve(snapshot)
            death = await self._until_death()
            await self._serving.close()
            snapshot = self._serving.agent.snapshot
            if self._stopping or (death.exit_code >= 0 and death.exit_code != CRASHED):
                return death.exit_code if death.exit_code >= 0 else 128 - death.exit_code
            now_s = time.monotonic()
            if len(takeovers) == MAX_TAKEOVERS and now_s - takeovers[0] < WINDOW_S:
                log.critical(
                    "%s; giving up: %d takeovers within %g s",
                    death.summary,
                    MAX_TAKEOVERS,
                    WINDOW_S,
                )
                return 1
            takeovers.append(now_s)
            log.error("%s; the next one takes over", death.summary)
            standby = self._standby
            self._standby = None
            self._serving = (
                standby if standby is not None and standby.child.alive else self._new(-1)
            )

    async def _until_death(self) -> Death:
        """Returns when the front end that serves is dead. Replaces the other one when it dies."""
        serving = self._serving
        silent = 0
        beats = 0
        dying = asyncio.ensure_future(serving.child.death())
        next_s = 0.0  # when to start another one
        while not dying.done():
            now_s = time.monotonic()
            # Once the other one has read its settings: what is wrong with them is told once then.
            if self._standby is None and not self._stopping and beats and now_s >= next_s:
                self._standby = self._new(serving.number)
            elif self._standby is not None and not self._standby.child.alive:
                await self._standby.close()
                lived_s = (await self._standby.child.death()).lived_s
                self._failures = 0 if lived_s > MAX_PAUSE_S else self._failures + 1
                pause_s = min(0.5 * 2.0**self._failures, MAX_PAUSE_S)
                next_s = now_s + pause_s
                self._standby = None
                log.warning(
                    "the front end that stood by is gone; another one starts in %g s", pause_s
                )
            await asyncio.wait([dying], timeout=HEARTBEAT_S)
            # Counted in turns of this loop, so that nobody is blamed after the whole machine stood
            # still.
            silent = silent + 1 if beats and beats == serving.agent.beats else 0
            beats = serving.agent.beats
            if silent >= MAX_SILENT:
                serving.child.kill(f"did not answer for {MAX_SILENT * HEARTBEAT_S:g} s")
        return dying.result()

    async def close(self) -> None:
        """Ends both."""
        for front_end in (self._serving, self._standby):
            if front_end is not None:
                await front_end.close()


# ---- a front end
# ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs a front end: prepares, waits for its turn, serves."""
    turn: SimpleQueue[bytes] = SimpleQueue()
    order = msgspec.json.decode(guard.adopt(turn.put), type=FrontEndOrder)
    stdout, *fds = order.fds
    os.dup2(stdout, 1)
    os.setsid()  # Ctrl-C reaches the whole terminal; the root process decides
    set_up_logging(order.config.server.log_level, order.config.server.log_format)
    from moeserve.server.run import serve_in_turn

    try:
        code = serve_in_turn(
            order.config, order.root, [socket.socket(fileno=fd) for fd in fds], turn
        )
    except ConfigError as error:
        to_stderr(f"moeserve serve: {error}")
        code = error.exit_code
    except MoeserveError as error:
        to_stderr(f"moeserve serve: {error}")
        code = 1
    except Exception:
        log.exception("the front end failed")
        code = CRASHED
    guard.end_process(code)


if __name__ == "__main__":
    main()
