"""A micro-batch: one part of the batch on its way through the model, with its communication, times
and loads.

With a single micro-batch nothing overlaps but the work given as `meanwhile`. Dual-batch overlap is
two micro-batches that take turns: `overlap` sends this micro-batch's rows, lets the other one
compute while they travel, and then waits for them. Only the MoE layer calls `overlap`, so model
code stays the same.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.comm.gloo import ON_DEVICE
from moeserve.messages import TraceEvent
from moeserve.moe.pending import Completed, Pending
from moeserve.moe.ping_pong import PingPong

T = TypeVar("T")
Load = NDArray[np.int64] | Tensor  # rows per expert; a tensor where they were counted on a device
SHORTEST_NS = 1000  # a shorter span of work is no work
WORK_BEFORE = {"dispatch": "attention", "combine": "experts"}


@dataclass(slots=True)
class UBatchMeter:
    """Times of a micro-batch's transfers in one step, in ns on the monotonic clock.

    comm_ns: from the start of each transfer to the arrival of its last row, summed. exposed_ns: the
    part of comm_ns in which the micro-batch stood in `wait`, or in `arrive` for its sibling. No
    other micro-batch computes then, because this one has the turn; work that `wait` does once all
    rows are here does not count. events: a list in a traced step.

    Transfers that arrive `ON_DEVICE` are left out: the host only launches them (moe/streams.py
    times those by events), and a trace shows when they were launched.
    """

    index: int
    comm_ns: int = 0
    exposed_ns: int = 0
    events: list[TraceEvent] | None = None
    _resumed_ns: int = 0

    def reset(self, trace: bool) -> None:
        """Begin a step."""
        self.comm_ns = self.exposed_ns = 0
        self.events = [] if trace else None

    def resume(self) -> None:
        """Mark the beginning of work."""
        if self.events is not None:
            self._resumed_ns = time.monotonic_ns()

    def work(self, name: str, layer: int) -> None:
        """Name the work since the last mark, and marks the beginning of other work."""
        if self.events is not None:
            now_ns = time.monotonic_ns()
            if now_ns - self._resumed_ns >= SHORTEST_NS:
                self.events.append(
                    TraceEvent(name, f"micro-batch {self.index}", self._resumed_ns, now_ns, layer)
                )
            self._resumed_ns = now_ns

    def transfer(
        self, name: str, layer: int, start_ns: int, wait_ns: int, end_ns: int, arrived_ns: int
    ) -> None:
        """Count a transfer from start_ns to arrived_ns, for which the micro-batch waited from
        wait_ns to end_ns.
        """
        if arrived_ns == ON_DEVICE:
            return
        arrived_ns = min(arrived_ns or end_ns, end_ns)  # a backend that cannot tell says 0
        self.comm_ns += max(0, arrived_ns - start_ns)
        self.exposed_ns += max(0, arrived_ns - wait_ns)
        if self.events is not None:
            track = f"transfer {self.index}"
            self.events.append(TraceEvent(name, track, start_ns, max(start_ns, arrived_ns), layer))
            self._resumed_ns = max(wait_ns, arrived_ns)


class UBatch:
    """One of the step's micro-batches, the one numbered `index`.

    most_tokens: those of the rank that has most in this micro-batch and step; all ranks make as
    many rounds as that rank needs.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.most_tokens = 0
        self.meter = UBatchMeter(index)
        self._loads: list[Load] = []
        self._ping_pong: PingPong | None = None
        self._sibling: UBatch | None = None
        self._inbox: list[Callable[[], None]] = []  # receives that the sibling wants launched
        self._early_ns = 0  # when the first part of the next transfer was sent

    def couple(self, ping_pong: PingPong, sibling: "UBatch") -> None:
        """Share the next step with `sibling`. To be called for both before either enters."""
        self._ping_pong = ping_pong
        self._sibling = sibling
        self._inbox.clear()
        self._early_ns = 0

    @property
    def in_turns(self) -> bool:
        """Whether this step has two micro-batches, on every rank."""
        return self._ping_pong is not None

    def run_in_turns(self, work: Callable[[], T]) -> T | None:
        """Run this micro-batch's part of the step from its first turn on; then the sibling goes on
        alone. An error ends the step of both and becomes the `PingPong`'s."""
        ping_pong = self._ping_pong
        assert ping_pong is not None
        try:
            ping_pong.take(self.index)
            result = work()
            self._receive()
            if self._sibling is not None:
                self._sibling._sibling = None
            ping_pong.give_up(self.index)
            return result
        except BaseException as error:
            ping_pong.poison(error)
            self._inbox.clear()
            return None
        finally:
            self._ping_pong = self._sibling = None

    def overlap(
        self,
        start: Callable[[], Pending[T]],
        meanwhile: Callable[[], None] | None = None,
        name: str = "transfer",
    ) -> T:
        """Start a transfer, runs `meanwhile`, lets the sibling work, and returns the transfer's
        result.

        name: "dispatch" or "combine", for traces.
        """
        meter = self.meter
        layer = len(self._loads) - 1
        meter.work(WORK_BEFORE.get(name, "work"), layer)
        self._receive()
        start_ns = self._early_ns or time.monotonic_ns()
        self._early_ns = 0
        pending = start()
        meter.resume()
        if meanwhile is not None:
            meanwhile()
            meter.work("shared", layer)
        if self._sibling is not None and self._ping_pong is not None:
            if not isinstance(pending, Completed):
                self._sibling._inbox.append(pending.arrive)
            self._ping_pong.pass_on(self.index)
            meter.resume()
        wait_ns = time.monotonic_ns()
        value = pending.wait()
        if not isinstance(pending, Completed):
            meter.transfer(name, layer, start_ns, wait_ns, time.monotonic_ns(), pending.arrived_ns)
        return value

    def run_fused(self, compute: Callable[[], tuple[Tensor, Load]]) -> Tensor:
        """Run a layer whose rows stay on this rank; `compute` returns the output and the rows per
        expert.
        """
        layer = len(self._loads)
        self.meter.work(WORK_BEFORE["dispatch"], layer)
        out_TD, counts_E = compute()
        self.note_load(counts_E)
        self.meter.work(WORK_BEFORE["combine"], layer)
        return out_TD

    def send_early(self, send: Callable[[], None]) -> None:
        """Send part of this micro-batch's next transfer, which counts as begun from here on."""
        self._early_ns = time.monotonic_ns()
        send()

    def _receive(self) -> None:
        """Launch what the sibling will wait for. This happens right before the own send: a
        receive may occupy the device or wait for its rows, so it must come behind this
        micro-batch's work."""
        if self._inbox:
            began_ns = time.monotonic_ns()
            for arrive in self._inbox:
                arrive()
            self._inbox.clear()
            self.meter.exposed_ns += time.monotonic_ns() - began_ns

    def note_load(self, counts_E: Load) -> None:
        """Record how many rows of this micro-batch one layer sent to each logical expert, without
        padding.
        """
        self._loads.append(counts_E)

    def take_load(self) -> Load:
        """Return the rows per layer and expert [layers, E] since the last call; an empty array
        when nothing was routed, a tensor if the device counted them."""
        loads = self._loads
        self._loads = []
        if loads and isinstance(loads[0], Tensor):
            return torch.stack([load for load in loads if isinstance(load, Tensor)])
        return (
            np.concatenate(loads).reshape(len(loads), -1) if loads else np.zeros((0, 0), np.int64)
        )
