"""Who may wait: the predicted wait, from rates that were measured."""

from __future__ import annotations

import msgspec
import pytest

from moeserve.errors import DeadlineExceeded, InvalidRequest, Overloaded
from moeserve.frontend.admission import Admission
from moeserve.frontend.stats import FrontStats
from moeserve.messages import Ready, StepRecord

READY = Ready(
    pid=1, architecture="", dtype="", device="cpu", vocab_size=9, max_model_len=9, max_num_seqs=4, num_blocks=101,
    block_size=16, eos_token_ids=(), num_params=1, num_active_params=1, weight_bytes=1, startup_s=0.0,
)  # fmt: skip
STEP = StepRecord(
    step=0, num_tokens=100, num_requests=1, num_running=1, num_waiting=0, num_free_blocks=90, num_blocks=101,
    device_us=500_000,
)  # fmt: skip


def admission(max_wait_s: float = 1.0) -> Admission:
    """Reads about 200 prompt tokens a second, and ends a sequence each 0.25 s when it is full."""
    found = Admission(FrontStats(), 100, max_wait_s)
    for step in range(200):
        found.step(STEP)
        found.step(msgspec.structs.replace(STEP, num_tokens=1))  # decoding tells nothing about reading
        found.ended(0.25 * step, 4, READY)
    return found


def test_the_wait_is_for_prompts_and_for_places() -> None:
    found = admission()
    assert found.wait_s(3, READY) == 0
    found.unread_tokens = 100
    assert found.wait_s(3, READY) == pytest.approx(0.5, rel=0.02)
    assert found.wait_s(6, READY) == pytest.approx(0.5 + 2 * 0.25, rel=0.02)


def test_what_would_wait_too_long_is_refused_with_the_time_until_it_would_not() -> None:
    found = admission()
    found.check(7, 1, READY)
    with pytest.raises(Overloaded) as caught:
        found.check(9, 1, READY)
    assert caught.value.retry_after_s == pytest.approx(6 * 0.25 - 1, rel=0.02)
    found.unread_tokens = 1000  # takes 5 s, but a place is free
    found.check(3, 1, READY)
    with pytest.raises(Overloaded, match=r"may wait 0\.1 s"):
        found.check(3, 1, READY, within_s=0.1)
    with pytest.raises(DeadlineExceeded):
        found.check(0, 1, READY, within_s=-0.1)
    admission(max_wait_s=0).check(90, 1, READY)


def test_sequences_that_let_it_pass_are_no_reason_to_wait() -> None:
    found = admission()
    with pytest.raises(Overloaded):
        found.check(12, 1, READY)
    found.check(12, 1, READY, num_behind=9)


def test_an_idle_server_takes_whatever_fits() -> None:
    found = admission(max_wait_s=0.01)
    found.unread_tokens = 0
    found.check(0, 50, READY)
    with pytest.raises(InvalidRequest):
        found.check(0, 105, READY)


def test_full_blocks_limit_the_places() -> None:
    found = admission()
    found._stats.engines[0].last = msgspec.structs.replace(STEP, num_running=2, num_waiting=1, num_free_blocks=5)
    assert found.wait_s(4, READY) == pytest.approx(2 * 0.25, rel=0.02)


def test_ends_with_free_places_are_no_measure() -> None:
    found = admission()
    for second in range(1000, 1100, 10):
        found.ended(second, 1, READY)
    assert found.wait_s(5, READY) == pytest.approx(0.25, rel=0.02)
