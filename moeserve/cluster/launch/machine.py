"""A machine in the launcher: the connection to its part, its state and its log."""

import asyncio
from collections.abc import Callable

import msgspec

from moeserve.actor.process import one_line, to_stderr
from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.cluster.launch.connection import PartConnection, PartNotStarted
from moeserve.cluster.launch.protocol import ENDED, MARK, PING, PING_S, PONG, Order, PartHello
from moeserve.cluster.launch.targets import LaunchTarget

HELLO_TIMEOUT_S = 30.0  # for a part to start; ssh has a shorter one
MAX_UNANSWERED = 6  # unanswered pings after which a machine counts as lost
MAX_UNANSWERED_BY_FIRST = 30  # the same for machine 0, with which all requests are lost


class Machine:
    """A machine and, while it is connected, its part."""

    def __init__(self, target: LaunchTarget, rank: int, num_machines: int) -> None:
        self.name = target.name
        self.remedy = target.remedy
        self.rank = rank
        self.state = ""
        self.has_joined = False  # at least once; for machine 0: it has been ready
        self.is_running = False  # its part runs an order
        self.last_line = ""  # of the log
        self._on_state: Callable[[str], None] = lambda state: None
        self._title = f"{target.name} (machine {rank} of {num_machines})"
        self._target = target
        self._connection: PartConnection | None = None
        self._exit_code: int | None = None  # of the part, once it has reported one
        self._num_unanswered = 0  # pings since the last line from the part

    def watch(self, on_state: Callable[[str], None]) -> None:
        """Call `on_state` with each new state."""
        self._on_state = on_state

    def set_state(self, state: str) -> None:
        """Set the state. If it is new, print it and call `on_state` of `watch`."""
        if state != self.state:
            self.state = state
            if state in ("joined", "ready"):
                self.has_joined = True
            to_stderr(f"moeserve launch: {self._title}: {state}")
            self._on_state(state)

    async def connect(self) -> PartHello:
        """Start the part, which then waits for its order.

        Raises PartNotStarted, or ConfigError if ssh or srun is not installed.
        """
        self.last_line = "no output"
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                self._connection = await self._target.connect()
                while (line := await self._line()) is not None:
                    if line.startswith(MARK):
                        return msgspec.json.decode(line[len(MARK) :], type=PartHello)
                    self.last_line = one_line(line)
            cause = self.last_line
        except TimeoutError:
            cause = f"no answer within {HELLO_TIMEOUT_S:g} s ({self.last_line})"
        await self.end()
        raise PartNotStarted(cause)

    async def run(self, order: Order) -> int | None:
        """Send the part its order, and wait for its end.

        Return the exit code, None if the part was lost.
        """
        self._exit_code = None
        self.is_running = True
        self.send(msgspec.json.encode(order) + b"\n")
        pinging = spawn(
            self._ping(), name=f"pings of {self.name}", on_error=self._on_pinging_failed
        )
        try:
            await self._read()
            return self._exit_code
        finally:
            self.is_running = False
            await cancel(pinging)
            await self.end()

    def _on_pinging_failed(self, name: str, error: Exception) -> None:
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
        """Send pings, and kill the part if it does not answer.

        The number of unanswered pings counts, not the time, because Ctrl-Z may stop this process.
        """
        max_unanswered = MAX_UNANSWERED if self.rank else MAX_UNANSWERED_BY_FIRST
        self._num_unanswered = 0
        while self._num_unanswered < max_unanswered:
            self._num_unanswered += 1
            self.send(PING)
            await asyncio.sleep(PING_S)
        self.last_line = f"no answer within {max_unanswered * PING_S:g} s"
        if self._connection is not None:
            self._connection.kill()

    async def _read(self) -> None:
        """Print the part's log and follow its state until its output ends."""
        while (line := await self._line()) is not None:
            self._num_unanswered = 0
            if line == MARK + PONG:
                continue
            if line.startswith(MARK + ENDED):
                self._exit_code = int(line.removeprefix(MARK + ENDED))
            elif line.startswith(MARK):
                self.set_state(line[len(MARK) :])
            else:
                to_stderr(f"{self.name} | {line}")
                self.last_line = one_line(line)

    async def _line(self) -> str | None:
        assert self._connection is not None
        line = await self._connection.readline()
        return line.decode(errors="replace").rstrip("\r\n") if line else None
