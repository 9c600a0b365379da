"""Measures a micro-batch's transfers in one step; in a traced step, records what the micro-batch did when."""

from __future__ import annotations

import time

from moeserve.comm.gloo import ON_DEVICE
from moeserve.messages import TraceEvent

SHORTEST_NS = 1000  # a shorter span of work is no work
WORK_BEFORE = {"dispatch": "attention", "combine": "experts"}


class UBatchMeter:
    """Times in ns on the monotonic clock.

    comm_ns: from the start of each transfer to the arrival of its last row, summed. exposed_ns: the part of comm_ns in
    which the micro-batch stood in `wait`, or in `arrive` for its sibling. No other micro-batch computes then, because
    this one has the turn; work that `wait` does once all rows are here does not count. events: a list in a traced step.

    Transfers that arrive `ON_DEVICE` are left out: the host only launches them (moe/streams.py times those by events),
    and a trace shows when they were launched.
    """

    __slots__ = ("_resumed_ns", "_track", "comm_ns", "events", "exposed_ns")

    def __init__(self, index: int) -> None:
        self._track = index
        self.comm_ns = 0
        self.exposed_ns = 0
        self.events: list[TraceEvent] | None = None
        self._resumed_ns = 0

    def reset(self, trace: bool) -> None:
        """Begins a step."""
        self.comm_ns = self.exposed_ns = 0
        self.events = [] if trace else None

    def resume(self) -> None:
        """Marks the beginning of work."""
        if self.events is not None:
            self._resumed_ns = time.monotonic_ns()

    def work(self, name: str, layer: int) -> None:
        """Names the work since the last mark, and marks the beginning of other work."""
        if self.events is not None:
            now_ns = time.monotonic_ns()
            if now_ns - self._resumed_ns >= SHORTEST_NS:
                self.events.append(TraceEvent(name, f"micro-batch {self._track}", self._resumed_ns, now_ns, layer))
            self._resumed_ns = now_ns

    def transfer(self, name: str, layer: int, start_ns: int, wait_ns: int, end_ns: int, arrived_ns: int) -> None:
        """Counts a transfer from start_ns to arrived_ns, for which the micro-batch waited from wait_ns to end_ns."""
        if arrived_ns == ON_DEVICE:
            return
        arrived_ns = min(arrived_ns or end_ns, end_ns)  # a backend that cannot tell says 0
        self.comm_ns += max(0, arrived_ns - start_ns)
        self.exposed_ns += max(0, arrived_ns - wait_ns)
        if self.events is not None:
            track = f"transfer {self._track}"
            self.events.append(TraceEvent(name, track, start_ns, max(start_ns, arrived_ns), layer))
            self._resumed_ns = max(wait_ns, arrived_ns)
