"""Ping-pong execution of micro-batches: strict turns, and no thread parked after a failure."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from moeserve.moe.ping_pong import PingPong, Unwound


def run(
    size: int, work: Callable[[int, PingPong], None]
) -> tuple[PingPong, list[BaseException | None]]:
    """`work` in one thread per micro-batch; what each of them raised. Fails when a thread stays
    parked.
    """
    ping_pong = PingPong(size)
    raised: list[BaseException | None] = [None] * size

    def ubatch(place: int) -> None:
        try:
            ping_pong.take(place)
            work(place, ping_pong)
            ping_pong.finish(place)
        except BaseException as exc:
            raised[place] = exc
            ping_pong.poison(exc)

    threads = [threading.Thread(target=ubatch, args=(place,), daemon=True) for place in range(size)]
    for thread in reversed(
        threads
    ):  # micro-batch 0 last: the order of arrival is not the order of turns
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads), "a micro-batch stayed parked"
    return ping_pong, raised


@pytest.mark.parametrize("size", [1, 2, 3])
def test_turns_go_round(size: int) -> None:
    log: list[int] = []

    def work(place: int, ping_pong: PingPong) -> None:
        for _ in range(50):
            log.append(place)
            ping_pong.pass_on(place)
        log.append(place)

    ping_pong, raised = run(size, work)
    assert log == list(range(size)) * 51
    assert raised == [None] * size
    assert ping_pong.error is None


@pytest.mark.parametrize(
    ("turns", "expected"), [((0, 3), "01111"), ((3, 0), "01000"), ((1, 2, 0), "012011")]
)
def test_a_ubatch_that_is_done_is_left_out(turns: tuple[int, ...], expected: str) -> None:
    log: list[int] = []

    def work(place: int, ping_pong: PingPong) -> None:
        for _ in range(turns[place]):
            log.append(place)
            ping_pong.pass_on(place)
        log.append(place)

    run(len(turns), work)
    assert "".join(map(str, log)) == expected


def test_only_one_works_at_a_time() -> None:
    """Turns of random length with the interpreter switching threads as often as it can."""
    inside = threading.Lock()
    rngs = [random.Random(seed) for seed in range(2)]

    def work(place: int, ping_pong: PingPong) -> None:
        for _ in range(400):
            assert inside.acquire(blocking=False), "two micro-batches at work"
            sum(range(rngs[place].randrange(300)))
            inside.release()
            ping_pong.pass_on(place)

    assert run(2, work)[1] == [None, None]


@pytest.mark.parametrize("size", [2, 3])
def test_an_error_anywhere_wakes_everybody(size: int) -> None:
    for guilty in range(size):
        for moment in range(4):

            def work(
                place: int, ping_pong: PingPong, guilty: int = guilty, moment: int = moment
            ) -> None:
                for turn in range(4):
                    if (place, turn) == (guilty, moment):
                        raise ValueError(f"micro-batch {place}, turn {turn}")
                    ping_pong.pass_on(place)

            ping_pong, raised = run(size, work)
            assert str(ping_pong.error) == f"micro-batch {guilty}, turn {moment}"
            assert raised[guilty] is ping_pong.error
            others = [exc for place, exc in enumerate(raised) if place != guilty]
            if moment < 3:
                assert all(isinstance(exc, Unwound) for exc in others)


def test_the_first_error_counts() -> None:
    """The sibling fails as well, while it unwinds."""

    def work(place: int, ping_pong: PingPong) -> None:
        if place == 0:
            ping_pong.pass_on(place)
            raise ValueError("first")
        try:
            ping_pong.pass_on(place)
        finally:
            raise KeyError("second")

    ping_pong, raised = run(2, work)
    assert str(ping_pong.error) == "first"
    assert isinstance(raised[1], KeyError)


def test_nobody_goes_on_after_an_error() -> None:
    """A micro-batch that swallows Unwound is stopped at its next turn."""
    swallowed: list[int] = []

    def work(place: int, ping_pong: PingPong) -> None:
        if place == 0:
            ping_pong.pass_on(place)
            raise ValueError("first")
        try:
            ping_pong.pass_on(place)
        except Unwound:
            swallowed.append(place)
        ping_pong.pass_on(place)
        raise AssertionError("went on")

    _, raised = run(2, work)
    assert swallowed == [1]
    assert isinstance(raised[1], Unwound)


def test_errors_from_outside_a_turn() -> None:
    """A parked micro-batch is interrupted, and the running one stops at the end of its turn."""
    for _ in range(200):
        ping_pong = PingPong(2)
        ping_pong.take(0)
        outside = threading.Thread(target=ping_pong.poison, args=(KeyboardInterrupt(),))
        outside.start()
        with pytest.raises(Unwound):
            ping_pong.pass_on(0)
        outside.join(10)
        with pytest.raises(Unwound):
            ping_pong.take(1)
