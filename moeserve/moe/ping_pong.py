"""Turns of micro-batches: each has its own thread, and exactly one runs at a time.

They run in a strict order: micro-batch 0 first, then 1, and so on. A request that is split over two
micro-batches relies on this, because its end reads the keys that its beginning wrote.

A hand-off releases one lock and acquires another. That takes half as long as a pair of events.
"""

import contextlib
import threading


# A BaseException, so that no `except Exception` between here and the caller of the step catches it.
class Unwound(BaseException):
    """Raised in a micro-batch if another one has failed, because the step is lost."""


class PingPong:
    """The turns of one step's micro-batches. Micro-batch 0 has the first turn.

    Each micro-batch calls `take` first, then `pass_on` wherever another one may run, and finally
    either `finish` or `poison`. If all do so, none waits for ever.
    """

    def __init__(self, size: int) -> None:
        self.error: BaseException | None = None  # the first one of any micro-batch
        # Lock i is held while micro-batch i must wait.
        self._turn_locks = [threading.Lock() for _ in range(size)]
        for lock in self._turn_locks[1:]:
            lock.acquire()
        self._working = list(range(size))

    def take(self, index: int) -> None:
        """Wait for this micro-batch's turn. Raises Unwound."""
        self._turn_locks[index].acquire()
        self._raise_if_failed()

    def pass_on(self, index: int) -> None:
        """Let the others run, and wait for this micro-batch's next turn. Raises Unwound.

        Returns immediately if all others have finished.
        """
        self._raise_if_failed()
        if (next_index := self._next_index(index)) != index:
            self._wake(next_index)
            self.take(index)

    def finish(self, index: int) -> None:
        """End this micro-batch's turns, and wake the next one."""
        next_index = self._next_index(index)
        self._working.remove(index)
        if next_index != index:
            self._wake(next_index)

    def poison(self, error: BaseException) -> None:
        """Fail the step: all micro-batches wake and raise Unwound. Only the first call counts."""
        if self.error is None:
            self.error = error
            for index in self._working:
                self._wake(index)

    def _next_index(self, index: int) -> int:
        ring = self._working
        return ring[(ring.index(index) + 1) % len(ring)]

    def _wake(self, index: int) -> None:
        with contextlib.suppress(RuntimeError):  # not locked: it was woken before the poison
            self._turn_locks[index].release()

    def _raise_if_failed(self) -> None:
        if self.error is not None:
            raise Unwound
