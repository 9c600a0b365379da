"""A micro-batch: one part of the batch, with its transfers, times and expert loads.

Dual-batch overlap (DBO) splits a step into two micro-batches that take turns. `overlap` starts a
transfer of this micro-batch, lets the other one compute in the meantime, and then waits for the
transfer. Only the MoE layer calls it, so model code is the same with and without DBO. With a single
micro-batch, only the work passed as `meanwhile` overlaps.
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
from moeserve.moe.pending import ARRIVAL_UNKNOWN, Completed, Pending
from moeserve.moe.ping_pong import PingPong

T = TypeVar("T")
Load = NDArray[np.int64] | Tensor  # rows per expert; a tensor if they were counted on a device
SHORTEST_NS = 1000  # shorter spans of work are omitted from traces
# Names of spans of work in traces
ATTENTION = "attention"
EXPERTS = "experts"
SHARED_EXPERTS = "shared"
WORK_BEFORE = {"dispatch": ATTENTION, "combine": EXPERTS}  # transfer -> work before it


@dataclass(slots=True)
class UBatchMeter:
    """The times of a micro-batch's transfers in one step, in ns of the monotonic clock.

    Transfers whose `arrived_ns` is `ON_DEVICE` are omitted, because the host only launches them.
    moe/streams.py times such transfers with CUDA events.
    """

    index: int  # the micro-batch's number
    comm_ns: int = 0  # the sum over transfers, from the start to the arrival of the last row
    # The part of comm_ns in which no micro-batch computes: this one has the turn, and waits for its
    # rows (`Pending.wait`) or launches a receive of its sibling (`Pending.launch_receive`). What
    # `wait` does after the last row has arrived is not in it.
    exposed_ns: int = 0
    events: list[TraceEvent] | None = None  # None if the step is not traced
    _work_began_ns: int = 0  # when the current span of work began

    def reset(self, trace: bool) -> None:
        """Begin a step."""
        self.comm_ns = 0
        self.exposed_ns = 0
        self.events = [] if trace else None

    def begin_work(self) -> None:
        """Begin a span of work, which the next `record_work` ends."""
        if self.events is not None:
            self._work_began_ns = time.monotonic_ns()

    def record_work(self, name: str, layer: int) -> None:
        """End the current span of work and record it as `name`. Begin another one."""
        if self.events is not None:
            now_ns = time.monotonic_ns()
            if now_ns - self._work_began_ns >= SHORTEST_NS:
                track = f"micro-batch {self.index}"
                self.events.append(TraceEvent(name, track, self._work_began_ns, now_ns, layer))
            self._work_began_ns = now_ns

    def record_transfer(
        self,
        name: str,
        layer: int,
        *,
        started_ns: int,
        wait_began_ns: int,
        wait_ended_ns: int,
        arrived_ns: int,
    ) -> None:
        """Record a transfer, and begin a span of work.

        The transfer took from started_ns to arrived_ns (see `Pending.arrived_ns`). The micro-batch
        waited for it from wait_began_ns to wait_ended_ns.
        """
        if arrived_ns == ON_DEVICE:
            return
        if arrived_ns == ARRIVAL_UNKNOWN or arrived_ns > wait_ended_ns:
            arrived_ns = wait_ended_ns
        self.comm_ns += max(0, arrived_ns - started_ns)
        self.exposed_ns += max(0, arrived_ns - wait_began_ns)
        if self.events is not None:
            track = f"transfer {self.index}"
            self.events.append(
                TraceEvent(name, track, started_ns, max(started_ns, arrived_ns), layer)
            )
            # What `wait` did after the last row had arrived counts as work.
            self._work_began_ns = max(wait_began_ns, arrived_ns)


class UBatch:
    """One micro-batch of a step. The object is reused for every step."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        # The tokens of this micro-batch on the rank that has the most, in the current step. All
        # ranks dispatch as many rounds as that rank needs.
        self.most_tokens = 0
        self.meter = UBatchMeter(index)
        self._loads: list[Load] = []
        self._ping_pong: PingPong | None = None
        self._sibling: UBatch | None = None
        # Receives of the sibling's transfers. This micro-batch launches them before its own send.
        self._sibling_receives: list[Callable[[], None]] = []
        self._sent_early_ns = 0  # when the first part of the next transfer was sent; 0: not yet

    def couple(self, ping_pong: PingPong, sibling: "UBatch") -> None:
        """Share the next step with `sibling`. Call this for both before either one runs."""
        self._ping_pong = ping_pong
        self._sibling = sibling
        self._sibling_receives.clear()
        self._sent_early_ns = 0

    @property
    def has_sibling(self) -> bool:
        """Whether this step has two micro-batches, even if the other one has finished.

        The same on every rank.
        """
        return self._ping_pong is not None

    def run_in_turns(self, work: Callable[[], T]) -> T | None:
        """Wait for the first turn, and run this micro-batch's part of the step.

        An error fails the step of both micro-batches. It is kept as the error of the `PingPong`,
        and this returns None.
        """
        ping_pong = self._ping_pong
        assert ping_pong is not None
        try:
            ping_pong.take(self.index)
            result = work()
            self._launch_sibling_receives()
            if self._sibling is not None:
                # The sibling goes on alone, and launches its remaining receives by itself.
                self._sibling._sibling = None
            ping_pong.finish(self.index)
            return result
        except BaseException as error:
            ping_pong.poison(error)
            self._sibling_receives.clear()
            return None
        finally:
            self._ping_pong = None
            self._sibling = None

    def overlap(
        self,
        start: Callable[[], Pending[T]],
        meanwhile: Callable[[], None] | None = None,
        name: str = "transfer",
    ) -> T:
        """Start a transfer, run `meanwhile`, let the sibling run, and return the transfer's result.

        meanwhile: computes the shared experts.
        name: "dispatch" or "combine", for traces.
        """
        meter = self.meter
        layer = len(self._loads) - 1  # the load of this layer was recorded before its dispatch
        meter.record_work(WORK_BEFORE.get(name, "work"), layer)
        self._launch_sibling_receives()
        started_ns = self._sent_early_ns or time.monotonic_ns()
        self._sent_early_ns = 0
        pending = start()
        meter.begin_work()
        if meanwhile is not None:
            meanwhile()
            meter.record_work(SHARED_EXPERTS, layer)
        if self._sibling is not None and self._ping_pong is not None:
            if not isinstance(pending, Completed):
                self._sibling._sibling_receives.append(pending.launch_receive)
            self._ping_pong.pass_on(self.index)
            meter.begin_work()
        wait_began_ns = time.monotonic_ns()
        value = pending.wait()
        if not isinstance(pending, Completed):
            meter.record_transfer(
                name,
                layer,
                started_ns=started_ns,
                wait_began_ns=wait_began_ns,
                wait_ended_ns=time.monotonic_ns(),
                arrived_ns=pending.arrived_ns,
            )
        return value

    def run_fused(self, compute: Callable[[], tuple[Tensor, Load]]) -> Tensor:
        """Run a layer without transfers. `compute` returns the output and the rows per expert."""
        layer = len(self._loads)  # the load of this layer is recorded below, once it is counted
        self.meter.record_work(ATTENTION, layer)
        out_TD, counts_E = compute()
        self.record_layer_load(counts_E)
        self.meter.record_work(EXPERTS, layer)
        return out_TD

    def send_early(self, send: Callable[[], None]) -> None:
        """Send part of this micro-batch's next transfer. The transfer's time starts now."""
        self._sent_early_ns = time.monotonic_ns()
        send()

    def _launch_sibling_receives(self) -> None:
        """Launch the receives for which the sibling will wait.

        Called right before this micro-batch's own send, and no earlier, because a receive may block
        the device until its rows arrive.
        """
        if self._sibling_receives:
            began_ns = time.monotonic_ns()
            for launch_receive in self._sibling_receives:
                launch_receive()
            self._sibling_receives.clear()
            self.meter.exposed_ns += time.monotonic_ns() - began_ns

    def record_layer_load(self, counts_E: Load) -> None:
        """Record how many rows a layer sends to each logical expert, without padding.

        Called once per MoE layer, in the order of layers.
        """
        self._loads.append(counts_E)

    def take_load(self) -> Load:
        """Return the recorded rows per layer and expert, [layers, E], and forget them.

        The result is empty if nothing was routed. It is a tensor if the rows were counted on the
        device.
        """
        loads = self._loads
        self._loads = []
        if not loads:
            return np.zeros((0, 0), np.int64)
        if isinstance(loads[0], Tensor):
            return torch.stack([load for load in loads if isinstance(load, Tensor)])
        return np.concatenate(loads).reshape(len(loads), -1)
