"""What is known of a request when it is over, and the access log: one JSON line of it per request.

Nothing that a client wrote is in it but the request id, which has harmless characters only.
"""

import logging
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, BinaryIO, Protocol

import msgspec

from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from moeserve.server.call import HttpCall

log = logging.getLogger(__name__)


class Answered(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A request that is over. time: of its arrival. status 499: the client left first. ttft_ms: to
    the first token.
    """

    time: datetime
    request_id: str
    method: str
    route: str
    status: int
    duration_ms: float
    key: str = ""
    remote: str = ""
    error: str = ""  # the code of the error, if it was answered with one
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None


class Observer(Protocol):
    """What is told of every request that is over."""

    def __call__(self, record: Answered, call: "HttpCall") -> None:
        """Notes a request. Raises nothing."""

    def close(self) -> None:
        """Gives up what it holds."""


def answered(call: "HttpCall", route: str, status: int) -> Answered:
    """Returns what is known of a request that ends now."""
    took_s = time.monotonic() - call.began
    found = Answered(
        time=datetime.fromtimestamp(time.time() - took_s, UTC),
        request_id=call.id,
        method=call.request.method,
        route=route,
        status=status,
        duration_ms=round(1e3 * took_s, 2),
        key=call.caller.name,
        remote=call.request.remote or "",
        error=call.error,
    )
    if (counts := call.counts) is not None:
        found.prompt_tokens = counts.prompt_tokens
        found.completion_tokens = counts.completion_tokens
        found.cached_tokens = counts.cached_tokens
    if call.first_at is not None:
        found.ttft_ms = round(1e3 * (call.first_at - call.began), 2)
    return found


class AccessLog:
    """Appends lines to a file; "-" is standard output. Raises ConfigError if it cannot be opened."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._broken = False
        self._file: BinaryIO = sys.stdout.buffer
        self.reopen()

    def reopen(self) -> None:
        """Opens the file anew, after it was renamed. Raises ConfigError, and then the old one stays
        in use.
        """
        if self.path == "-":
            return
        with ConfigError.instead_of(OSError, f"access_log {self.path}"):
            file: BinaryIO = open(self.path, "ab", buffering=0)  # noqa: SIM115 (stays open)
        self.close()
        self._file = file

    def close(self) -> None:
        """Closes the file."""
        if self._file is not sys.stdout.buffer:
            self._file.close()

    def __call__(self, record: Answered, call: "HttpCall") -> None:
        """Writes one line. A full disk costs lines, never requests."""
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
            self._file.flush()
        except OSError as error:
            if not self._broken:
                log.error("access_log %s: %s; lines are lost", self.path, error.strerror)
            self._broken = True
        else:
            self._broken = False
