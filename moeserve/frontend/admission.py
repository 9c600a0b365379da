"""Who may come in: a bounded number of sequences, and an estimate for the others of when to come back."""

from __future__ import annotations

from moeserve.errors import InvalidRequest, Overloaded
from moeserve.messages import Ready

MAX_RETRY_AFTER_S = 60.0


class Admission:
    """max_queued: sequences that may wait beyond those that the engine runs at once; None for no limit."""

    def __init__(self, max_queued: int | None) -> None:
        self._max_queued = max_queued
        self._seconds_per_end = 0.1  # moving average
        self._last_end_s = 0.0

    def capacity(self, ready: Ready) -> int | None:
        return None if self._max_queued is None else ready.max_num_seqs + self._max_queued

    def check(self, num_live: int, num_more: int, ready: Ready) -> None:
        """Raises Overloaded unless so many more may come now, InvalidRequest if they never may."""
        if (capacity := self.capacity(ready)) is None:
            return
        if num_more > capacity:
            raise InvalidRequest(f"{num_more} sequences in one request; this server takes at most {capacity} at once")
        if (excess := num_live + num_more - capacity) > 0:
            raise Overloaded(
                f"{num_live} sequences run or wait; no more are taken now",
                retry_after_s=min(max(1.0, excess * self._seconds_per_end), MAX_RETRY_AFTER_S),
            )

    def ended(self, now_s: float, num_live: int) -> None:
        """One sequence ended; num_live are left."""
        if self._last_end_s:
            self._seconds_per_end += 0.05 * (now_s - self._last_end_s - self._seconds_per_end)
        self._last_end_s = now_s if num_live else 0.0  # idle time says nothing about speed
