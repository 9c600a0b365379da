"""Keeps background work out of the way of the steps: it may use a share of one core, and no more bytes than that."""

from __future__ import annotations

import threading
import time

SHARE = 0.1  # of one core's time
BYTES_PER_S = 256e6  # memory traffic that a step does not notice


class Cancelled(Exception):
    """The work is no longer wanted."""


class Pace:
    """Called after each small piece of work; sleeps until the thread is within its share again.

    The thread keeps its normal priority: one that the system holds back while it has the interpreter's lock would hold
    back the step too.
    """

    def __init__(self, cancelled: threading.Event, share: float = SHARE, bytes_per_s: float = BYTES_PER_S) -> None:
        self._cancelled = cancelled
        self._share = share
        self._bytes_per_s = bytes_per_s
        self._mark_s = time.thread_time()

    def __call__(self, num_bytes: int) -> None:
        """num_bytes: read or written since the last call. Raises Cancelled, at once when it happens."""
        used_s = time.thread_time() - self._mark_s
        if self._cancelled.wait(max(used_s / self._share - used_s, num_bytes / self._bytes_per_s)):
            raise Cancelled
        self._mark_s = time.thread_time()
