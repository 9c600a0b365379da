"""The connection to a machine's part: its stdin and its stdout, whatever carries them."""

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from moeserve.actor.tasks import log_error, spawn
from moeserve.errors import ConfigError, MoeserveError

LAST_LINES_S = 1.0
MAX_LINE_BYTES = 1 << 20


class PartNotStarted(MoeserveError):
    """A machine's part did not start. The message is the last line that came."""


class PartConnection(ABC):
    """What the launcher holds of a part. out: what the part says, until it has ended or is lost."""

    def __init__(self, out: asyncio.StreamReader) -> None:
        self.out = out

    async def readline(self) -> bytes:
        """Return the next line that is no longer than MAX_LINE_BYTES, b"" at the end."""
        while True:
            with suppress(ValueError):  # too long: dropped
                return await self.out.readline()

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send to the part, if it is there."""

    @abstractmethod
    def kill(self) -> None:
        """End the part at once, and so what it says."""

    @abstractmethod
    async def close(self) -> None:
        """Kill, and waits until nothing of the connection is left here."""


class ProcessConnection(PartConnection):
    """A child process: the part itself, or the ssh or srun that leads to it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        super().__init__(process.stdout)
        self._process = process
        self._end = spawn(
            self._close_after_exit(), name="end of a part", on_error=self._waiting_failed
        )

    @staticmethod
    async def open(command: Sequence[str]) -> "ProcessConnection":
        """Start the command. Raises ConfigError if there is no such program."""
        pipe = asyncio.subprocess.PIPE
        with ConfigError.instead_of(
            OSError, f"cannot run {command[0]}", "; install it on this machine"
        ):
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=asyncio.subprocess.STDOUT,
                limit=MAX_LINE_BYTES,
                start_new_session=True,  # the terminal's Ctrl-C is the launcher's to pass on
            )
        return ProcessConnection(process)

    def write(self, data: bytes) -> None:
        """Send to the process."""
        assert self._process.stdin is not None
        with suppress(OSError, RuntimeError):
            self._process.stdin.write(data)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # srun is two processes

    async def close(self) -> None:
        """Kill, and waits until the pipes are closed."""
        self.kill()
        self._end.cancel()
        await self._process.wait()
        self._close_pipes()

    def _waiting_failed(self, name: str, error: Exception) -> None:
        log_error(name, error)
        self._close_pipes()  # its reader sees the end, as after an exit

    async def _close_after_exit(self) -> None:
        await self._process.wait()
        await asyncio.sleep(LAST_LINES_S)  # a grandchild may hold the pipe
        self._close_pipes()

    def _close_pipes(self) -> None:
        self._process._transport.close()  # type: ignore[attr-defined]
