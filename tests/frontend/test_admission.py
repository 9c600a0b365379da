"""Admission by predicted waiting time, from measured rates."""

from __future__ import annotations

import msgspec
import pytest

from moeserve.errors import DeadlineExceeded, InvalidRequest, Overloaded
from moeserve.frontend.admission import Admission
from moeserve.frontend.stats import FrontStats
from moeserve.messages import Ready, StepRecord

READY = Ready(
    pid=1,
    architecture="",
    dtype="",
    device="cpu",
    vocab_size=9,
    max_model_len=9,
    max_num_seqs=4,
    num_blocks=101,
    block_size=16,
    eos_token_ids=(),
    num_params=1,
    num_active_params=1,
    weight_bytes=1,
    startup_s=0.0,
)
STEP = StepRecord(
    step=0,
    num_tokens=100,
    num_requests=1,
    num_running=1,
    num_waiting=0,
    num_free_blocks=90,
    num_blocks=101,
    device_us=500_000,
)


def admission(max_wait_s: float = 1.0) -> Admission:
    """Return an Admission with measured rates.

    It prefills about 200 tokens a second, and a full batch ends a sequence each 0.25 s.
    """
    found = Admission(FrontStats(), 100, max_wait_s)
    for step in range(200):
        found.record_step(STEP)
        found.record_step(
            msgspec.structs.replace(STEP, num_tokens=1)
        )  # decoding tells nothing about reading
        found.record_end(0.25 * step, 4, READY)
    return found


NOW_S = 1000.0


def come(found: Admission, per_end: float, seconds: float, begun_s: float = NOW_S) -> float:
    """Lets `per_end` sequences come for each that ends; returns when the last one came."""
    gap_s = 0.25 / per_end
    for number in range(1, round(seconds / gap_s) + 1):
        found.count_arrivals(1, begun_s + number * gap_s)
    return begun_s + seconds


def longest_queue(found: Admission, now_s: float) -> int:
    """Return how many requests may queue now, with four running."""
    for waiting in range(50):
        try:
            found.check(4 + waiting, 1, READY, now_s)
        except Overloaded:
            return waiting
    return 50


@pytest.mark.parametrize(
    ("per_end", "longest"), [(0.5, 50), (0.9, 50), (2.0, 5), (4.0, 2), (10.0, 1), (100.0, 0)]
)
def test_the_more_come_the_fewer_wait(per_end: float, longest: int) -> None:
    found = admission(max_wait_s=100.0)
    now_s = come(found, per_end, 200)
    assert longest_queue(found, now_s) == longest
    found.check(3, 1, READY, now_s)  # a place is free
    calm_s = come(found, 0.5, 200, now_s)
    assert longest_queue(found, calm_s) == 50


def test_a_burst_is_no_overload() -> None:
    found = admission(
        max_wait_s=100.0
    )  # so what comes is counted over 25 s, in which 100 sequences end
    found.count_arrivals(90, NOW_S)
    assert longest_queue(found, NOW_S) >= 40
    found.count_arrivals(1000, NOW_S)
    assert longest_queue(found, NOW_S) == 1
    never = admission(max_wait_s=0.0)
    never.count_arrivals(1000, NOW_S)
    assert longest_queue(never, NOW_S) == 50
    unmeasured = Admission(FrontStats(), 100, 1.0)
    unmeasured.count_arrivals(1000, NOW_S)
    assert longest_queue(unmeasured, NOW_S) == 50


def test_what_came_too_much_comes_back_when_it_could_have_been_served() -> None:
    found = admission()  # counts over 2 s: eight ends of 0.25 s
    now_s = come(found, 10.0, 60)
    with pytest.raises(Overloaded, match=r"10\.\d times as many") as caught:
        found.check(5, 1, READY, now_s)
    assert caught.value.retry_after_s == pytest.approx(9 * 2.0, rel=0.1)


def test_the_wait_is_for_prompts_and_for_places() -> None:
    found = admission()
    assert found.predict_wait_s(3, READY) == 0
    found.num_waiting_tokens = 100
    assert found.predict_wait_s(3, READY) == pytest.approx(0.5, rel=0.02)
    assert found.predict_wait_s(6, READY) == pytest.approx(0.5 + 2 * 0.25, rel=0.02)


def test_what_would_wait_too_long_is_refused_with_the_time_until_it_would_not() -> None:
    found = admission()
    found.check(7, 1, READY, NOW_S)
    with pytest.raises(Overloaded) as caught:
        found.check(9, 1, READY, NOW_S)
    assert caught.value.retry_after_s == pytest.approx(6 * 0.25 - 1, rel=0.02)
    found.num_waiting_tokens = 1000  # takes 5 s, but a place is free
    found.check(3, 1, READY, NOW_S)
    with pytest.raises(Overloaded, match=r"may wait 0\.1 s"):
        found.check(3, 1, READY, NOW_S, within_s=0.1)
    with pytest.raises(DeadlineExceeded):
        found.check(0, 1, READY, NOW_S, within_s=-0.1)
    admission(max_wait_s=0).check(90, 1, READY, NOW_S)


def test_sequences_that_let_it_pass_are_no_reason_to_wait() -> None:
    found = admission()
    with pytest.raises(Overloaded):
        found.check(12, 1, READY, NOW_S)
    found.check(12, 1, READY, NOW_S, num_behind=9)


def test_an_idle_server_takes_whatever_fits() -> None:
    found = admission(max_wait_s=0.01)
    found.num_waiting_tokens = 0
    found.check(0, 50, READY, NOW_S)
    with pytest.raises(InvalidRequest):
        found.check(0, 105, READY, NOW_S)


def test_full_blocks_limit_the_places() -> None:
    found = admission()
    found._stats.engines[0].last = msgspec.structs.replace(
        STEP, num_running=2, num_waiting=1, num_free_blocks=5
    )
    assert found.predict_wait_s(4, READY) == pytest.approx(2 * 0.25, rel=0.02)


def test_ends_with_free_places_are_no_measure() -> None:
    found = admission()
    for second in range(1000, 1100, 10):
        found.record_end(second, 1, READY)
    assert found.predict_wait_s(5, READY) == pytest.approx(0.25, rel=0.02)
