"""Progress as seen from outside, on a clock that the test moves."""

from __future__ import annotations

from moeserve.cluster.heartbeat import ProgressMonitor
from moeserve.messages import Ping, Pong


def test_idle_answers_and_counted_steps_are_progress() -> None:
    heart = ProgressMonitor(100.0)
    assert heart.ping(101.0) == Ping(1)
    heart.pong(Pong(1, steps=0, busy=False), 101.1)
    assert heart.stalled_s(101.5) == 101.5 - 101.1
    heart.ping(102.0)
    heart.pong(Pong(2, steps=5, busy=True), 102.1)
    assert heart.stalled_s(102.1) == 0


def test_busy_without_steps_and_silence_are_not() -> None:
    heart = ProgressMonitor(0.0)
    heart.ping(1.0)
    heart.pong(Pong(1, steps=5, busy=True), 1.0)
    for second in range(2, 6):
        heart.ping(float(second))
        heart.pong(Pong(second, steps=5, busy=True), float(second))
    assert heart.stalled_s(5.0) == 4.0
    for second in range(6, 10):
        assert heart.ping(float(second)) == Ping(second)
    assert heart.stalled_s(9.0) == 8.0


def test_work_that_has_just_begun_does_not_inherit_an_idle_past() -> None:
    heart = ProgressMonitor(0.0)
    for second in range(1, 100):
        heart.ping(float(second))
        heart.pong(Pong(second, steps=7, busy=False), float(second))
    heart.ping(100.0)
    heart.pong(Pong(100, steps=7, busy=True), 100.0)
    assert heart.stalled_s(100.0) == 1.0


def test_our_own_standstill_is_not_blamed_on_the_engine() -> None:
    heart = ProgressMonitor(0.0)
    heart.ping(1.0)
    heart.pong(Pong(1, steps=0, busy=False), 1.0)
    heart.ping(3600.0)  # a laptop that slept, a stopped process
    assert heart.stalled_s(3600.0) < 3.0


def test_long_steps_earn_patience() -> None:
    quick = ProgressMonitor(0.0)
    slow = ProgressMonitor(0.0, step_s=40.0)
    assert (quick.healthy(5.0), quick.healthy(5.1)) == (True, False)
    assert [quick.fault(at_s)[:20] for at_s in (60.0, 60.1)] == ["", "has made no progress"]
    assert (slow.healthy(80.0), slow.healthy(80.1)) == (True, False)
    assert [slow.fault(at_s)[:20] for at_s in (400.0, 400.1)] == ["", "has made no progress"]
    assert ProgressMonitor(0.0, step_s=0.001).healthy(5.0)


def test_who_rests_has_to_answer() -> None:
    heart = ProgressMonitor(0.0)
    for second in range(1, 100):
        heart.ping(float(second))
        heart.fault(float(second), held=True)
        if second <= 30:
            heart.pong(Pong(second, steps=7, busy=True), float(second))
    assert heart.stalled_s(99.0) == 0.0
    assert [heart.fault(at_s, held=True) for at_s in (90.0, 90.1)] == [
        "",
        "has not answered for 60 s",
    ]
    slow = ProgressMonitor(0.0, step_s=40.0)
    assert [slow.fault(at_s, held=True) for at_s in (120.0, 120.1)] == [
        "",
        "has not answered for 120 s",
    ]
