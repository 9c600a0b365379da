"""The request log: one JSON line for each finished request, for `moeserve replay`."""

import asyncio
import logging
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

from moeserve.errors import ConfigError

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 * 2**20  # the most memory of lines that are not written yet


class RequestLog:
    """Appends lines to a file that only its owner can read, in a separate thread.

    If the disk is full or too slow, lines are lost, but requests are not affected. Raises
    ConfigError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        with ConfigError.instead_of(OSError, f"request_log {path} cannot be written"):
            self._file = open(  # noqa: SIM115 (the thread closes it)
                path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)
            )
        self._path = path
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        # Each counter is changed by one thread only. The difference is waiting to be written.
        self._added_bytes = 0
        self._written_bytes = 0
        self._num_lost = 0
        self._has_failed = False  # the last write
        self._closed: Future[None] = Future()
        threading.Thread(target=self._run, name="request log", daemon=True).start()

    def add(self, line: bytes) -> None:
        """Append a line, or drop it if too many wait."""
        if self._added_bytes - self._written_bytes > MAX_WAITING_BYTES:
            if not self._num_lost:
                log.error("request_log %s: the disk is too slow; lines are lost", self._path)
            self._num_lost += 1
            return
        if self._num_lost:
            log.error("request_log %s: %d lines were lost", self._path, self._num_lost)
            self._num_lost = 0
        self._added_bytes += len(line)
        self._lines.put(line)

    async def close(self) -> None:
        """Write the remaining lines, and end the thread."""
        self._lines.put(None)
        await asyncio.wrap_future(self._closed)

    def _run(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                self._write(line)
                self._written_bytes += len(line)
            self._file.close()
        except BaseException as error:
            self._closed.set_exception(error)
        else:
            self._closed.set_result(None)

    def _write(self, line: bytes) -> None:
        unwritten = memoryview(line + b"\n")
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            if not self._has_failed:
                log.error("request_log %s: %s; lines are lost", self._path, error)
            self._has_failed = True
        else:
            self._has_failed = False
