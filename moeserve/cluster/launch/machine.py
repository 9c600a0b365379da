"""One machine as the launcher sees it: the connection to its part, its state, and its log."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress

import msgspec

from moeserve.actor.process import one_line, to_stderr
from moeserve.cluster.launch.protocol import ENDED, MARK, PING, PING_S, PONG, Order, PartHello
from moeserve.cluster.launch.targets import LaunchTarget
from moeserve.errors import ConfigError, MoeserveError

HELLO_S = 30.0  # ssh itself gives up earlier
LAST_LINES_S = 1.0
UNANSWERED = 6  # pings, until a silent machine is lost
UNANSWERED_BY_FIRST = 30  # all ends with machine 0
MAX_LINE_BYTES = 1 << 20


class PartNotStarted(MoeserveError):
    """A machine's part did not start. The message is the last line that came."""


class Machine:
    """A machine and, while it is connected, its part. on_state: hears each new state."""

    def __init__(self, place: LaunchTarget, rank: int, num_machines: int) -> None:
        self.name, self.remedy, self.rank = place.name, place.remedy, rank
        self.state = ""
        self.joined = False  # once at least
        self.on_state: Callable[[str], None] = lambda state: None
        self._title = f"{place.name} (machine {rank} of {num_machines})"
        self._command = place.command
        self._process: asyncio.subprocess.Process | None = None
        self._out: asyncio.StreamReader | None = None
        self._code: int | None = None  # of the part, once it has said so
        self._unanswered = 0
        self.last_line = ""  # of its log

    def enter(self, state: str) -> None:
        """Notes and prints a new state."""
        if state != self.state:
            self.state = state
            self.joined |= state == "joined"
            to_stderr(f"moeserve launch: {self._title}: {state}")
            self.on_state(state)

    async def connect(self) -> PartHello:
        """Starts the part, which waits for its order then. Raises PartNotStarted; ConfigError without ssh or srun."""
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=pipe,
                stdout=pipe,
                stderr=asyncio.subprocess.STDOUT,
                limit=MAX_LINE_BYTES,
                start_new_session=True,  # the terminal's Ctrl-C is the launcher's to pass on
            )
        except OSError as error:
            raise ConfigError(f"cannot run {self._command[0]}: {error.strerror}; install it on this machine") from None
        self._out = self._process.stdout
        self.last_line = "it said nothing"
        try:
            async with asyncio.timeout(HELLO_S):
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
        """Gives the part its order, and returns the exit code once it has ended; None if it was lost before that."""
        assert self._process is not None
        self._code = None
        self.send(msgspec.json.encode(order) + b"\n")
        pinging = asyncio.create_task(self._ping())
        reading = asyncio.create_task(self._read())
        try:
            exited = asyncio.create_task(self._process.wait())
            await asyncio.wait((reading, exited), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((reading,), timeout=LAST_LINES_S)  # a grandchild may hold the pipe
            return self._code
        finally:
            pinging.cancel()
            reading.cancel()
            await self.end()

    def send(self, data: bytes) -> None:
        """Writes to the part, if there is one."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, RuntimeError):
                self._process.stdin.write(data)

    async def end(self) -> None:
        """Ends the connection, and with it the part."""
        self._kill()
        process, self._process = self._process, None
        if process is not None:
            await process.wait()
            process._transport.close()  # type: ignore[attr-defined]  # pipes that a grandchild holds, too

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # srun is two processes

    async def _ping(self) -> None:
        """Ends the connection if the part is silent. It counts pings, not seconds: Ctrl-Z may stop this process."""
        most = UNANSWERED if self.rank else UNANSWERED_BY_FIRST
        self._unanswered = 0
        while self._unanswered < most:
            self._unanswered += 1
            self.send(PING)
            await asyncio.sleep(PING_S)
        self.last_line = f"no answer within {most * PING_S:g} s"
        self._kill()

    async def _read(self) -> None:
        """Prints the log and notes states, until the end."""
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
        assert self._out is not None
        while True:
            with suppress(ValueError):  # longer than MAX_LINE_BYTES: dropped
                line = await self._out.readline()
                return line.decode(errors="replace").rstrip("\r\n") if line else None
