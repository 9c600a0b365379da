"""One micro-batch: the order of events in `overlap`, communication times, and traces."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from moeserve.moe.pending import Completed
from moeserve.moe.ping_pong import PingPong
from moeserve.moe.ubatch import UBatch

MS = 1_000_000


class Transfer:
    """A transfer that takes `ms` from its start, in the background.

    `tells` is whether it knows when its last row arrived.
    """

    def __init__(
        self, name: str, log: list[str], ms: float = 0, tells: bool = True, early: str = ""
    ) -> None:
        log.append(f"send {name}")
        self._name = name
        self._log = log
        self._tells = tells
        self._early = early
        self._ends_ns = time.monotonic_ns() + int(ms * MS)
        self.arrived_ns = 0

    def launch_receive(self) -> None:
        self._log.append(f"receive {self._name}")
        if self._early:
            raise ValueError(self._early)

    def wait(self) -> str:
        time.sleep(max(0, self._ends_ns - time.monotonic_ns()) / 1e9)
        self.arrived_ns = self._ends_ns if self._tells else 0
        self._log.append(f"got {self._name}")
        return self._name


def two(log: list[str], *plans: list[str], early: str = "") -> PingPong:
    """Two micro-batches that each make the transfers named in their plan."""
    ping_pong = PingPong(2)
    ubatches = (UBatch(0), UBatch(1))
    ubatches[0].couple(ping_pong, ubatches[1])
    ubatches[1].couple(ping_pong, ubatches[0])

    def run(ubatch: UBatch) -> None:
        def transfers() -> None:
            for name in plans[ubatch.index]:
                ubatch.overlap(
                    lambda name=name: Transfer(name, log, early=early),
                    lambda: log.append("meanwhile"),
                )  # type: ignore[misc]
            log.append(f"end {ubatch.index}")

        ubatch.run_in_turns(transfers)

    thread = threading.Thread(target=run, args=(ubatches[1],), daemon=True)
    thread.start()
    run(ubatches[0])
    thread.join(10)
    assert not thread.is_alive()
    assert not any(ubatch._sibling_receives for ubatch in ubatches)
    return ping_pong


def test_two_ubatches_receive_before_they_send() -> None:
    log: list[str] = []
    assert two(log, ["a", "b"], ["x", "y"]).error is None
    assert log == [
        *("send a", "meanwhile"),
        *("receive a", "send x", "meanwhile"),
        *("got a", "receive x", "send b", "meanwhile"),
        *("got x", "receive b", "send y", "meanwhile"),
        *("got b", "end 0", "receive y"),
        *("got y", "end 1"),
    ]


def test_a_ubatch_goes_on_alone() -> None:
    log: list[str] = []
    two(log, ["a"], ["x", "y", "z"])
    tail = ["got x", "send y", "meanwhile", "got y", "send z", "meanwhile", "got z", "end 1"]
    assert log[-len(tail) :] == tail


def test_an_early_receive_that_fails_ends_both() -> None:
    log: list[str] = []
    ping_pong = two(log, ["a"], ["x"], early="the peer is gone")
    assert str(ping_pong.error) == "the peer is gone"
    assert not any(line.startswith(("end", "got")) for line in log)


def test_an_early_receive_that_waits_is_exposed() -> None:
    """It may wait for the rows in the sibling's time; the later wait is then short."""
    ping_pong = PingPong(2)
    ubatches = (UBatch(0), UBatch(1))
    log: list[str] = []
    for ubatch in ubatches:
        ubatch.couple(ping_pong, ubatches[1 - ubatch.index])

    class Landing(Transfer):
        def launch_receive(self) -> None:
            self.wait()

    def run(ubatch: UBatch) -> None:
        ubatch.run_in_turns(lambda: ubatch.overlap(lambda: Landing("rows", log, 100)))

    thread = threading.Thread(target=run, args=(ubatches[1],), daemon=True)
    thread.start()
    run(ubatches[0])
    thread.join(10)
    assert ubatches[0].meter.exposed_ns + ubatches[1].meter.exposed_ns > 150 * MS
    assert ubatches[0].meter.comm_ns + ubatches[1].meter.comm_ns >= 200 * MS


def test_exposed_is_what_meanwhile_does_not_hide() -> None:
    ubatch = UBatch()
    log: list[str] = []
    ubatch.meter.reset(trace=True)
    ubatch.record_layer_load(np.array([1]))
    ubatch.meter.begin_work()
    time.sleep(0.005)
    ubatch.overlap(lambda: Transfer("rows", log, 200), lambda: time.sleep(0.05), name="dispatch")
    meter = ubatch.meter
    assert meter.comm_ns >= 200 * MS
    assert 50 * MS < meter.exposed_ns <= 150 * MS
    assert meter.events is not None
    assert [(event.track, event.name, event.layer) for event in meter.events] == [
        ("micro-batch 0", "attention", 0),
        ("micro-batch 0", "shared", 0),
        ("transfer 0", "dispatch", 0),
    ]
    attention, shared, dispatch = meter.events
    assert (
        attention.end_ns <= dispatch.start_ns <= shared.start_ns < shared.end_ns < dispatch.end_ns
    )
    assert dispatch.end_ns - dispatch.start_ns == meter.comm_ns


@pytest.mark.parametrize("tells", [True, False])
def test_a_transfer_that_was_over_is_not_exposed(tells: bool) -> None:
    ubatch = UBatch()
    log: list[str] = []
    ubatch.overlap(lambda: Transfer("rows", log, 5, tells), lambda: time.sleep(0.1))
    assert ubatch.meter.exposed_ns == 0 if tells else ubatch.meter.exposed_ns < 50 * MS
    assert ubatch.meter.comm_ns < 50 * MS if tells else ubatch.meter.comm_ns >= 100 * MS
    assert ubatch.meter.events is None


def test_what_does_not_travel_costs_nothing() -> None:
    ubatch = UBatch()
    assert ubatch.overlap(lambda: Completed("here"), lambda: time.sleep(0.002)) == "here"
    assert (ubatch.meter.comm_ns, ubatch.meter.exposed_ns) == (0, 0)


def test_meter_starts_anew() -> None:
    ubatch = UBatch()
    log: list[str] = []
    ubatch.overlap(lambda: Transfer("rows", log, 1))
    ubatch.meter.reset(trace=False)
    assert (ubatch.meter.comm_ns, ubatch.meter.exposed_ns) == (0, 0)
