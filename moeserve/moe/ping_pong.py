"""Micro-batches that take turns: each has a thread of its own, and exactly one works at a time.

The order is a strict ring: what micro-batch 0 does between two hand-offs comes before what
micro-batch 1 does between the same two. A request that is cut in two relies on that: its end reads
the keys that its beginning wrote. A hand-off releases one lock and acquires another, which takes
half as long as a pair of events.
"""

import contextlib
import threading


class Unwound(BaseException):  # not an Exception: no handler on the way out may catch it
    """Raised in a micro-batch whose sibling failed: the step is lost."""


class PingPong:
    """The turns of one step's micro-batches; micro-batch 0 has the first one. error: the first that
    any of them met.

    Each micro-batch calls `take` first, `pass_on` where another may go on, and at last either
    `give_up` or `poison`; then none of them waits for ever.
    """

    def __init__(self, size: int) -> None:
        self.error: BaseException | None = None
        self._turns = [threading.Lock() for _ in range(size)]
        for turn in self._turns[1:]:
            turn.acquire()
        self._working = list(range(size))

    def take(self, index: int) -> None:
        """Wait for this micro-batch's turn."""
        self._turns[index].acquire()
        self._check()

    def pass_on(self, index: int) -> None:
        """Let the others work; returns on this micro-batch's next turn, at once if no other one is
        left.
        """
        self._check()
        if (following := self._following(index)) != index:
            self._wake(following)
            self.take(index)

    def give_up(self, index: int) -> None:
        """End this micro-batch's turns; the next one goes on."""
        following = self._following(index)
        self._working.remove(index)
        if following != index:
            self._wake(following)

    def poison(self, error: BaseException) -> None:
        """End the step: all micro-batches wake and raise Unwound. Later calls do nothing."""
        if self.error is None:
            self.error = error
            for index in self._working:
                self._wake(index)

    def _following(self, index: int) -> int:
        ring = self._working
        return ring[(ring.index(index) + 1) % len(ring)]

    def _wake(self, index: int) -> None:
        with contextlib.suppress(RuntimeError):  # awake already: poisoned a moment ago
            self._turns[index].release()

    def _check(self) -> None:
        if self.error is not None:
            raise Unwound
