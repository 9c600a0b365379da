"""Limits background work, so that it does not slow steps: to a share of one core, and to a memory bandwidth."""

from __future__ import annotations

import threading
import time

SHARE = 0.1  # of one core's time
BYTES_PER_S = 256e6  # memory traffic that a step does not notice


class Cancelled(Exception):
    """Raised in background work that is no longer wanted."""


class Pace:
    """Called after each small piece of work; sleeps until the thread is within its share again.

    The thread keeps its normal priority: with a low one it could be suspended while it holds the interpreter's lock,
    which would delay steps, too.
    """

    def __init__(self, cancelled: threading.Event, share: float = SHARE, bytes_per_s: float = BYTES_PER_S) -> None:
        self._cancelled = cancelled
        self._share = share
        self._bytes_per_s = bytes_per_s
        self._mark_s = time.thread_time()

    def __call__(self, num_bytes: int) -> None:
        """Sleeps as needed. num_bytes: read or written since the last call. Raises Cancelled as soon as it is set."""
        used_s = time.thread_time() - self._mark_s
        if self._cancelled.wait(max(used_s / self._share - used_s, num_bytes / self._bytes_per_s)):
            raise Cancelled
        self._mark_s = time.thread_time()
