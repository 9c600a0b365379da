"""One lane: the order of things inside `overlap`, what counts as communication, and what a trace says."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from moeserve.moe.all2all.base import Done
from moeserve.moe.baton import Baton
from moeserve.moe.lane import Lane

MS = 1_000_000


class Transfer:
    """Takes `ms` from its start, in the background. tells: whether it knows when its last row was here."""

    def __init__(self, name: str, log: list[str], ms: float = 0, tells: bool = True, early: str = "") -> None:
        log.append(f"send {name}")
        self._name, self._log, self._tells, self._early = name, log, tells, early
        self._ends_ns = time.monotonic_ns() + int(ms * MS)
        self.arrived_ns = 0

    def arrive(self) -> None:
        self._log.append(f"receive {self._name}")
        if self._early:
            raise ValueError(self._early)

    def wait(self, deadline_s: float | None = None) -> str:
        time.sleep(max(0, self._ends_ns - time.monotonic_ns()) / 1e9)
        self.arrived_ns = self._ends_ns if self._tells else 0
        self._log.append(f"got {self._name}")
        return self._name


def two(log: list[str], *plans: list[str], early: str = "") -> Baton:
    """Two lanes that each make the transfers named in their plan."""
    baton, lanes = Baton(2), (Lane(0), Lane(1))
    lanes[0].couple(baton, lanes[1])
    lanes[1].couple(baton, lanes[0])

    def run(lane: Lane) -> None:
        try:
            lane.enter()
            for name in plans[lane.index]:
                lane.overlap(lambda name=name: Transfer(name, log, early=early), lambda: log.append("meanwhile"))  # type: ignore[misc]
            log.append(f"end {lane.index}")
            lane.leave()
        except BaseException as exc:
            lane.fail(exc)

    thread = threading.Thread(target=run, args=(lanes[1],), daemon=True)
    thread.start()
    run(lanes[0])
    thread.join(10)
    assert not thread.is_alive()
    assert not any(lane._inbox for lane in lanes)
    return baton


def test_two_lanes_receive_before_they_send() -> None:
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


def test_a_lane_goes_on_alone() -> None:
    log: list[str] = []
    two(log, ["a"], ["x", "y", "z"])
    tail = ["got x", "send y", "meanwhile", "got y", "send z", "meanwhile", "got z", "end 1"]
    assert log[-len(tail) :] == tail


def test_an_early_receive_that_fails_ends_both() -> None:
    log: list[str] = []
    baton = two(log, ["a"], ["x"], early="the peer is gone")
    assert str(baton.error) == "the peer is gone"
    assert not any(line.startswith(("end", "got")) for line in log)


def test_an_early_receive_that_waits_is_exposed() -> None:
    """It may wait for the rows, in the sibling's time; the wait that follows is short then."""
    baton, lanes, log = Baton(2), (Lane(0), Lane(1)), []  # type: tuple[Baton, tuple[Lane, Lane], list[str]]
    for lane in lanes:
        lane.couple(baton, lanes[1 - lane.index])

    class Landing(Transfer):
        def arrive(self) -> None:
            self.wait()

    def run(lane: Lane) -> None:
        lane.enter()
        lane.overlap(lambda: Landing("rows", log, 20))
        lane.leave()

    thread = threading.Thread(target=run, args=(lanes[1],), daemon=True)
    thread.start()
    run(lanes[0])
    thread.join(10)
    assert lanes[0].meter.exposed_ns + lanes[1].meter.exposed_ns > 35 * MS
    assert lanes[0].meter.comm_ns + lanes[1].meter.comm_ns >= 40 * MS


def test_exposed_is_what_meanwhile_does_not_hide() -> None:
    lane, log = Lane(), []  # type: tuple[Lane, list[str]]
    lane.meter.reset(trace=True)
    lane.note_load(np.array([1]))
    lane.meter.resume()
    time.sleep(0.005)
    lane.overlap(lambda: Transfer("rows", log, 200), lambda: time.sleep(0.05), name="dispatch")
    meter = lane.meter
    assert meter.comm_ns >= 200 * MS
    assert 50 * MS < meter.exposed_ns <= 150 * MS
    assert meter.events is not None
    assert [(event.track, event.name, event.layer) for event in meter.events] == [
        ("lane 0", "attention", 0),
        ("lane 0", "shared", 0),
        ("transfer 0", "dispatch", 0),
    ]
    attention, shared, dispatch = meter.events
    assert attention.end_ns <= dispatch.start_ns <= shared.start_ns < shared.end_ns < dispatch.end_ns
    assert dispatch.end_ns - dispatch.start_ns == meter.comm_ns


@pytest.mark.parametrize("tells", [True, False])
def test_a_transfer_that_was_over_is_not_exposed(tells: bool) -> None:
    lane, log = Lane(), []  # type: tuple[Lane, list[str]]
    lane.overlap(lambda: Transfer("rows", log, 5, tells), lambda: time.sleep(0.1))
    assert lane.meter.exposed_ns == 0 if tells else lane.meter.exposed_ns < 50 * MS
    assert lane.meter.comm_ns < 50 * MS if tells else lane.meter.comm_ns >= 100 * MS
    assert lane.meter.events is None


def test_what_does_not_travel_costs_nothing() -> None:
    lane = Lane()
    assert lane.overlap(lambda: Done("here"), lambda: time.sleep(0.002)) == "here"
    assert (lane.meter.comm_ns, lane.meter.exposed_ns) == (0, 0)


def test_meter_starts_anew() -> None:
    lane, log = Lane(), []  # type: tuple[Lane, list[str]]
    lane.overlap(lambda: Transfer("rows", log, 1))
    lane.meter.reset(trace=False)
    assert (lane.meter.comm_ns, lane.meter.exposed_ns) == (0, 0)
