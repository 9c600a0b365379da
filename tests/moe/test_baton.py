"""The baton: strict turns, and nobody parked when something fails."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from moeserve.moe.baton import Baton, Unwound


def run(size: int, work: Callable[[int, Baton], None]) -> tuple[Baton, list[BaseException | None]]:
    """`work` in one thread per lane; what each of them raised. Fails when a thread stays parked."""
    baton = Baton(size)
    raised: list[BaseException | None] = [None] * size

    def lane(place: int) -> None:
        try:
            baton.take(place)
            work(place, baton)
            baton.give_up(place)
        except BaseException as exc:
            raised[place] = exc
            baton.poison(exc)

    threads = [threading.Thread(target=lane, args=(place,), daemon=True) for place in range(size)]
    for thread in reversed(threads):  # lane 0 last: the order of arrival is not the order of turns
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads), "a lane stayed parked"
    return baton, raised


@pytest.mark.parametrize("size", [1, 2, 3])
def test_turns_go_round(size: int) -> None:
    log: list[int] = []

    def work(place: int, baton: Baton) -> None:
        for _ in range(50):
            log.append(place)
            baton.pass_on(place)
        log.append(place)

    baton, raised = run(size, work)
    assert log == list(range(size)) * 51
    assert raised == [None] * size
    assert baton.error is None


@pytest.mark.parametrize(("turns", "expected"), [((0, 3), "01111"), ((3, 0), "01000"), ((1, 2, 0), "012011")])
def test_a_lane_that_is_done_is_left_out(turns: tuple[int, ...], expected: str) -> None:
    log: list[int] = []

    def work(place: int, baton: Baton) -> None:
        for _ in range(turns[place]):
            log.append(place)
            baton.pass_on(place)
        log.append(place)

    run(len(turns), work)
    assert "".join(map(str, log)) == expected


def test_only_one_works_at_a_time() -> None:
    """Turns of random length with the interpreter switching threads as often as it can."""
    inside = threading.Lock()
    rngs = [random.Random(seed) for seed in range(2)]

    def work(place: int, baton: Baton) -> None:
        for _ in range(400):
            assert inside.acquire(blocking=False), "two lanes at work"
            sum(range(rngs[place].randrange(300)))
            inside.release()
            baton.pass_on(place)

    assert run(2, work)[1] == [None, None]


@pytest.mark.parametrize("size", [2, 3])
def test_an_error_anywhere_wakes_everybody(size: int) -> None:
    for guilty in range(size):
        for moment in range(4):

            def work(place: int, baton: Baton, guilty: int = guilty, moment: int = moment) -> None:
                for turn in range(4):
                    if (place, turn) == (guilty, moment):
                        raise ValueError(f"lane {place}, turn {turn}")
                    baton.pass_on(place)

            baton, raised = run(size, work)
            assert str(baton.error) == f"lane {guilty}, turn {moment}"
            assert raised[guilty] is baton.error
            others = [exc for place, exc in enumerate(raised) if place != guilty]
            if moment < 3:
                assert all(isinstance(exc, Unwound) for exc in others)


def test_the_first_error_counts() -> None:
    """The sibling fails as well, while it unwinds."""

    def work(place: int, baton: Baton) -> None:
        if place == 0:
            baton.pass_on(place)
            raise ValueError("first")
        try:
            baton.pass_on(place)
        finally:
            raise KeyError("second")

    baton, raised = run(2, work)
    assert str(baton.error) == "first"
    assert isinstance(raised[1], KeyError)


def test_nobody_goes_on_after_an_error() -> None:
    """A lane that swallows Unwound is stopped at its next turn."""
    swallowed: list[int] = []

    def work(place: int, baton: Baton) -> None:
        if place == 0:
            baton.pass_on(place)
            raise ValueError("first")
        try:
            baton.pass_on(place)
        except Unwound:
            swallowed.append(place)
        baton.pass_on(place)
        raise AssertionError("went on")

    _, raised = run(2, work)
    assert swallowed == [1]
    assert isinstance(raised[1], Unwound)


def test_errors_from_outside_a_turn() -> None:
    """A parked lane may be interrupted too; whoever works is stopped at the end of its turn."""
    for _ in range(200):
        baton = Baton(2)
        baton.take(0)
        outside = threading.Thread(target=baton.poison, args=(KeyboardInterrupt(),))
        outside.start()
        with pytest.raises(Unwound):
            baton.pass_on(0)
        outside.join(10)
        with pytest.raises(Unwound):
            baton.take(1)
