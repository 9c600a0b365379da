"""The record of each finished request, and the access log, which writes it as a JSON line.

The only text of a client in a record is the request id, which has harmless characters only.
"""

import io
import logging
import os
import queue
import threading
from contextlib import suppress
from datetime import datetime
from typing import Protocol

import msgspec
from aiohttp import web

from moeserve.errors import ConfigError

log = logging.getLogger(__name__)

MAX_QUEUED_LINES = 10_000  # queued lines, if the disk or the reader is slow
CLOSE_TIMEOUT_S = 5.0  # time for the last lines to be written


class Answered(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A finished request."""

    time: datetime  # of its arrival
    request_id: str
    method: str
    route: str
    status: int  # 499: the client left first
    duration_ms: float
    key: str = ""
    remote: str = ""
    error: str = ""  # code of the error in the answer
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None  # from arrival to the first token


class Observer(Protocol):
    """Called with every finished request."""

    def __call__(self, record: Answered, request: web.BaseRequest) -> None:
        """Record a request. Must not raise or block."""

    def close(self) -> None:
        """Release all resources."""


class AccessLog:
    """Appends lines to a file; "-" is standard output.

    A thread writes, so a slow disk or pipe never delays a request. If the queue is full, lines are
    lost.
    """

    def __init__(self, path: str) -> None:
        """Raise ConfigError if the file cannot be opened."""
        self.path = path
        self._queue: queue.Queue[bytes | io.FileIO | None] = queue.Queue(MAX_QUEUED_LINES)
        self._is_broken = False
        self._file = self.read()
        self._thread = threading.Thread(target=self._write_all, name="access-log", daemon=True)
        self._thread.start()

    def read(self) -> io.FileIO:
        """Open the file again, after it was renamed. Raise ConfigError."""
        with ConfigError.instead_of(OSError, f"access_log {self.path}"):
            if self.path == "-":
                return open(os.dup(1), "wb", buffering=0)
            return open(self.path, "ab", buffering=0)

    def use(self, file: io.FileIO) -> None:
        """Write later lines to a file that `read` opened."""
        self._put(file)

    def __call__(self, record: Answered, request: web.BaseRequest) -> None:
        self._put(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        """Write the queued lines, and close the file. Waits CLOSE_TIMEOUT_S at most."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _put(self, item: bytes | io.FileIO) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._report_loss(f"{MAX_QUEUED_LINES} lines wait to be written")

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, bytes):
                self._write(item)
            else:
                self._file.close()
                self._file = item
        self._file.close()

    def _write(self, line: bytes) -> None:
        try:
            unwritten = memoryview(line)
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            self._report_loss(error.strerror or str(error))
        else:
            self._is_broken = False

    def _report_loss(self, why: str) -> None:
        if not self._is_broken:
            log.error("access_log %s: %s; lines are lost", self.path, why)
        self._is_broken = True
