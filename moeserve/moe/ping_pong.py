"""Turns: of several micro-batches, each in a thread of its own, exactly one works; the others are parked.

The order is a strict ring 0, 1, ..., 0: what micro-batch 0 does between two hand-offs always comes before what
micro-batch 1 does
between the same two. A cut request relies on that, since its end reads the keys that its beginning has just written.
A hand-off is one lock released and another one acquired: about half the time of a pair of events.
"""

from __future__ import annotations

import contextlib
import threading


class Unwound(BaseException):  # not an Exception: no handler on the way out may take it for its own
    """Raised in a micro-batch whose sibling failed: leave, the step is lost."""


class PingPong:
    """For one step of `size` micro-batches; micro-batch 0 has the first turn. `error`: the first one that any
    micro-batch met.

    Each micro-batch calls `take` first, `pass_on` where another may go on, and at last either `give_up` or `poison`:
    as long
    as it does, nobody stays parked.
    """

    def __init__(self, size: int) -> None:
        self.error: BaseException | None = None
        self._turns = [threading.Lock() for _ in range(size)]
        for turn in self._turns[1:]:
            turn.acquire()
        self._at_work = list(range(size))

    def take(self, place: int) -> None:
        """Waits for the first turn of the micro-batch in `place`."""
        self._park(place)

    def pass_on(self, place: int) -> None:
        """Lets the others work and returns when it is this micro-batch's turn again, at once if nobody else is left."""
        self._check()
        heir = self._heir(place)
        if heir != place:
            self._wake(heir)
            self._park(place)

    def give_up(self, place: int) -> None:
        """This micro-batch is done: the turn is the next one's, and never comes back."""
        heir = self._heir(place)
        self._at_work.remove(place)
        if heir != place:
            self._wake(heir)

    def poison(self, error: BaseException) -> None:
        """The step has failed: everyone wakes and gets Unwound. Only the first call does anything."""
        if self.error is None:
            self.error = error
            for place in self._at_work:
                self._wake(place)

    def _heir(self, place: int) -> int:
        ring = self._at_work
        return ring[(ring.index(place) + 1) % len(ring)]

    def _wake(self, place: int) -> None:
        with contextlib.suppress(RuntimeError):  # awake already: poisoned a moment ago
            self._turns[place].release()

    def _park(self, place: int) -> None:
        self._turns[place].acquire()
        self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise Unwound
