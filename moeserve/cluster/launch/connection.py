"""The connection from the launcher to a machine's part: the part's stdin and stdout."""

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from moeserve.actor.tasks import log_error, spawn
from moeserve.errors import ConfigError, MoeserveError

LAST_LINES_S = 1.0  # time to read the last lines of a process that has exited
MAX_LINE_BYTES = 1 << 20


class PartNotStarted(MoeserveError):
    """Raised if a machine's part did not start. The message is the last line of its output."""


class PartConnection(ABC):
    """The launcher's connection to a part."""

    def __init__(self, out: asyncio.StreamReader) -> None:
        self.out = out  # the part's stdout, which ends when the part ends or is lost

    async def readline(self) -> bytes:
        """Return the next line, b"" at the end. Lines longer than MAX_LINE_BYTES are dropped."""
        while True:
            with suppress(ValueError):  # raised for a line that is too long
                return await self.out.readline()

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Write to the part's stdin. Drop the data if the part is gone."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the part, which also ends its output."""

    @abstractmethod
    async def close(self) -> None:
        """Kill the part, and wait until the connection's resources are released."""


class ProcessConnection(PartConnection):
    """A child process: the part itself, or the ssh or srun process that runs it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        super().__init__(process.stdout)
        self._process = process
        self._closing = spawn(
            self._close_after_exit(), name="end of a part", on_error=self._on_closing_failed
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
                start_new_session=True,  # so that Ctrl-C reaches only the launcher
            )
        return ProcessConnection(process)

    def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, RuntimeError):
            self._process.stdin.write(data)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # a group, because srun forks

    async def close(self) -> None:
        self.kill()
        self._closing.cancel()
        await self._process.wait()
        self._close_pipes()

    def _on_closing_failed(self, name: str, error: Exception) -> None:
        log_error(name, error)
        self._close_pipes()  # so that the reader sees the end

    async def _close_after_exit(self) -> None:
        await self._process.wait()
        await asyncio.sleep(LAST_LINES_S)  # a grandchild may still write to the pipe
        self._close_pipes()

    def _close_pipes(self) -> None:
        self._process._transport.close()  # type: ignore[attr-defined]
