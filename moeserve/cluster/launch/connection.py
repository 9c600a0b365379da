"""The connection to a machine's part: its stdin and its stdout, whatever carries them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from moeserve.errors import ConfigError, MoeserveError

LAST_LINES_S = 1.0
MAX_LINE_BYTES = 1 << 20


class PartNotStarted(MoeserveError):
    """A machine's part did not start. The message is the last line that came."""


class Connection(Protocol):
    """What the launcher holds of a part."""

    def write(self, data: bytes) -> None:
        """Sends to the part, if it is there."""

    async def readline(self) -> bytes:
        """Returns the part's next line, b"" once it has ended or is lost."""

    def kill(self) -> None:
        """Ends the part at once; `readline` returns b"" then."""

    async def close(self) -> None:
        """Kills, and waits until nothing of the connection is left."""


class ProcessConnection:
    """A child process: the part itself, or the ssh or srun that leads to it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._end = asyncio.create_task(self._close_after_exit())

    @staticmethod
    async def open(command: Sequence[str]) -> ProcessConnection:
        """Starts the command. Raises ConfigError if there is no such program."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=asyncio.subprocess.STDOUT,
                limit=MAX_LINE_BYTES,
                start_new_session=True,  # the terminal's Ctrl-C is the launcher's to pass on
            )
        except OSError as error:
            raise ConfigError(f"cannot run {command[0]}: {error.strerror}; install it on this machine") from None
        return ProcessConnection(process)

    def write(self, data: bytes) -> None:
        """Sends to the part."""
        assert self._process.stdin is not None
        with suppress(OSError, RuntimeError):
            self._process.stdin.write(data)

    async def readline(self) -> bytes:
        """Returns the next line."""
        assert self._process.stdout is not None
        return await next_line(self._process.stdout)

    async def read(self) -> bytes:
        """Returns what has come, b"" at the end."""
        assert self._process.stdout is not None
        return await self._process.stdout.read(MAX_LINE_BYTES)

    def kill(self) -> None:
        """Kills the process and its children."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # srun is two processes

    async def close(self) -> None:
        """Kills, and waits until the pipes are closed."""
        self.kill()
        await self._process.wait()
        self._end.cancel()
        self._close_pipes()

    async def _close_after_exit(self) -> None:
        await self._process.wait()
        await asyncio.sleep(LAST_LINES_S)  # a grandchild may hold the pipe
        self._close_pipes()

    def _close_pipes(self) -> None:
        self._process._transport.close()  # type: ignore[attr-defined]


async def next_line(reader: asyncio.StreamReader) -> bytes:
    """Returns the next line that is no longer than the reader's limit, b"" at the end."""
    while True:
        with suppress(ValueError):  # too long: dropped
            return await reader.readline()
