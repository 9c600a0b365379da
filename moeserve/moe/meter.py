"""What a micro-batch's transfers cost in one step, and, of a step that is traced, what the micro-batch did when."""

from __future__ import annotations

import time

from moeserve.comm.gloo import ON_DEVICE
from moeserve.messages import TraceEvent

SHORTEST_NS = 1000  # a shorter span of work is no work
WORK_BEFORE = {"dispatch": "attention", "combine": "experts"}


class UBatchMeter:
    """Times in ns on the monotonic clock.

    comm_ns: from the start of each transfer to the arrival of its last row, summed. exposed_ns: the part of it in which
    the micro-batch stood in `wait`, or in `arrive` for its sibling. It has the turn then, so no other micro-batch
    computes either:
    time in which a sibling works is spent before `wait`. What `wait` does once all rows are here is work. `events` is a
    list while a step is traced.

    Where the host only launches, its times say nothing of rows: transfers that arrive `ON_DEVICE` are not among them
    (moe/streams.py times those that it launches, by events), and a trace shows when work was launched.
    """

    __slots__ = ("_resumed_ns", "_track", "comm_ns", "events", "exposed_ns")

    def __init__(self, index: int) -> None:
        self._track = index
        self.comm_ns = 0
        self.exposed_ns = 0
        self.events: list[TraceEvent] | None = None
        self._resumed_ns = 0

    def reset(self, trace: bool) -> None:
        self.comm_ns = self.exposed_ns = 0
        self.events = [] if trace else None

    def resume(self) -> None:
        """The micro-batch's first work of a step begins."""
        if self.events is not None:
            self._resumed_ns = time.monotonic_ns()

    def work(self, name: str, layer: int) -> None:
        """What the micro-batch did since it last resumed was `name`; it does something else from here on."""
        if self.events is not None:
            now_ns = time.monotonic_ns()
            if now_ns - self._resumed_ns >= SHORTEST_NS:
                self.events.append(TraceEvent(name, f"micro-batch {self._track}", self._resumed_ns, now_ns, layer))
            self._resumed_ns = now_ns

    def transfer(self, name: str, layer: int, start_ns: int, wait_ns: int, end_ns: int, arrived_ns: int) -> None:
        """A transfer began at start_ns, was waited for from wait_ns to end_ns, and was here at arrived_ns."""
        if arrived_ns == ON_DEVICE:
            return
        arrived_ns = min(arrived_ns or end_ns, end_ns)  # a backend that cannot tell says 0
        self.comm_ns += max(0, arrived_ns - start_ns)
        self.exposed_ns += max(0, arrived_ns - wait_ns)
        if self.events is not None:
            track = f"transfer {self._track}"
            self.events.append(TraceEvent(name, track, start_ns, max(start_ns, arrived_ns), layer))
            self._resumed_ns = max(wait_ns, arrived_ns)
