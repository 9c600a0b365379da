"""A machine in the launcher: the connection to its part, its state and its log."""

import asyncio
from collections.abc import Callable

import msgspec

from moeserve.actor.process import one_line, to_stderr
from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.cluster.launch.connection import PartConnection, PartNotStarted
from moeserve.cluster.launch.protocol import ENDED, MARK, PING, PING_S, PONG, Order, PartHello
from moeserve.cluster.launch.targets import LaunchTarget

HELLO_S = 30.0  # timeout of a part's start; ssh has a shorter one
UNANSWERED = 6  # unanswered pings after which a machine counts as lost
UNANSWERED_BY_FIRST = 30  # the same for machine 0, whose loss ends all requests


class Machine:
    """A machine and, while it is connected, its part."""

    def __init__(self, target: LaunchTarget, rank: int, num_machines: int) -> None:
        self.name = target.name
        self.remedy = target.remedy
        self.rank = rank
        self.state = ""
        self.joined = False  # it has joined at least once; for machine 0, it has been ready
        self.alive = False  # its part runs an order
        self._on_state: Callable[[str], None] = lambda state: None
        self._title = f"{target.name} (machine {rank} of {num_machines})"
        self._target = target
        self._connection: PartConnection | None = None
        self._code: int | None = None  # the part's exit code, once it has reported one
        self._unanswered = 0
        self.last_line = ""  # of the log

    def watch(self, on_state: Callable[[str], None]) -> None:
        """Call `on_state` with each new state."""
        self._on_state = on_state

    def enter(self, state: str) -> None:
        """Set the state, and print it if it is new."""
        if state != self.state:
            self.state = state
            self.joined |= state in ("joined", "ready")
            to_stderr(f"moeserve launch: {self._title}: {state}")
            self._on_state(state)

    async def connect(self) -> PartHello:
        """Start the part, which then waits for its order.

        Raises PartNotStarted, or ConfigError if ssh or srun is not installed.
        """
        self.last_line = "no output"
        try:
            async with asyncio.timeout(HELLO_S):
                self._connection = await self._target.connect()
                while (line := await self._line()) is not None:
                    if line.startswith(MARK):
                        return msgspec.json.decode(line[len(MARK) :], type=PartHello)
                    self.last_line = one_line(line)
            why = self.last_line
        except TimeoutError:
            why = f"no answer within {HELLO_S:g} s ({self.last_line})"
        await self.end()
        raise PartNotStarted(why)

    async def live(self, order: Order) -> int | None:
        """Send the part its order, and wait for its end.

        Return the exit code, None if the part was lost.
        """
        self._code = None
        self.alive = True
        self.send(msgspec.json.encode(order) + b"\n")
        pinging = spawn(self._ping(), name=f"pings of {self.name}", on_error=self._pinging_failed)
        try:
            await self._read()
            return self._code
        finally:
            self.alive = False
            await cancel(pinging)
            await self.end()

    def _pinging_failed(self, name: str, error: Exception) -> None:
        """Kill the part, because nobody would notice its loss any more."""
        log_error(name, error)
        if self._connection is not None:
            self._connection.kill()

    def send(self, data: bytes) -> None:
        """Write to the part, if it is connected."""
        if self._connection is not None:
            self._connection.write(data)

    async def end(self) -> None:
        """End the connection, and with it the part."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            await connection.close()

    async def _ping(self) -> None:
        """Kill the part if it does not answer.

        The number of unanswered pings counts, not the time, because Ctrl-Z may stop this process.
        """
        most = UNANSWERED if self.rank else UNANSWERED_BY_FIRST
        self._unanswered = 0
        while self._unanswered < most:
            self._unanswered += 1
            self.send(PING)
            await asyncio.sleep(PING_S)
        self.last_line = f"no answer within {most * PING_S:g} s"
        if self._connection is not None:
            self._connection.kill()

    async def _read(self) -> None:
        """Print the part's log and follow its state until its output ends."""
        while (line := await self._line()) is not None:
            self._unanswered = 0
            if line == MARK + PONG:
                continue
            if line.startswith(MARK + ENDED):
                self._code = int(line.removeprefix(MARK + ENDED))
            elif line.startswith(MARK):
                self.enter(line[len(MARK) :])
            else:
                to_stderr(f"{self.name} | {line}")
                self.last_line = one_line(line)

    async def _line(self) -> str | None:
        assert self._connection is not None
        line = await self._connection.readline()
        return line.decode(errors="replace").rstrip("\r\n") if line else None
