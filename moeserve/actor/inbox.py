"""The one way into an actor: a queue with a limit, an answer when it is full, and statistics."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from moeserve.errors import ActorStopped, Overloaded

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class InboxStats:
    """Counts of messages. `peak` is the most that ever waited, `refused` those that met a full inbox."""

    waiting: int
    limit: int
    peak: int
    received: int
    refused: int


class Inbox(Generic[M]):
    """Messages for one owner, first in, first out, at most `limit` of them.

    The owner alone reads (`drain` or `async for`), on its loop. `put` belongs to the loop's thread,
    `put_threadsafe` to every other one. A full inbox raises Overloaded, a closed one ActorStopped: a sender
    always learns at once that nobody will read its message.
    """

    def __init__(self, owner: str, limit: int = 10_000) -> None:
        assert limit > 0, limit
        self.owner = owner
        self.limit = limit
        self._queue: deque[M] = deque()
        self._lock = threading.Lock()  # guards _queue against put_threadsafe; never held across an await
        self._waiter: asyncio.Future[None] | None = None
        self._when_room: list[Callable[[], None]] = []
        self._cause: str | None = None
        self._peak = self._received = self._refused = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        return len(self._queue) >= self.limit

    @property
    def closed(self) -> bool:
        return self._cause is not None

    @property
    def stats(self) -> InboxStats:
        return InboxStats(len(self._queue), self.limit, self._peak, self._received, self._refused)

    def put(self, msg: M, *, force: bool = False) -> None:
        """Adds a message. `force` ignores the limit: for the few notices that must not be lost."""
        with self._lock:
            self._append(msg, force)
            waiter = self._waiter
        if waiter is not None:
            _wake(waiter)

    def put_threadsafe(self, msg: M) -> None:
        """As `put`, from any thread."""
        with self._lock:
            self._append(msg, False)
            waiter = self._waiter
        if waiter is not None:
            try:
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)
            except RuntimeError:  # the loop closed in the meantime, and the owner with it
                raise ActorStopped(f"{self.owner}: its event loop is closed") from None

    def _append(self, msg: M, force: bool) -> None:
        if self._cause is not None:
            raise ActorStopped(f"{self.owner}: {self._cause}")
        waiting = len(self._queue)
        if waiting >= self.limit and not force:
            self._refused += 1
            raise Overloaded(f"{self.owner}: {waiting} messages are waiting already, the limit is {self.limit}")
        self._queue.append(msg)
        self._received += 1
        self._peak = max(self._peak, waiting + 1)

    async def drain(self, wait: bool) -> list[M]:
        """All messages, oldest first. With `wait` at least one: sleeps until there is something to read.

        Raises ActorStopped once the inbox is closed, so that a reading loop ends.
        """
        while wait and not self._queue and self._cause is None:
            await self._something()
        if self._cause is not None:
            raise ActorStopped(f"{self.owner}: {self._cause}")
        return self._take()

    async def _something(self) -> None:
        assert self._waiter is None, f"{self.owner}: an inbox has one reader"
        waiter = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._queue:
                return
            self._waiter = waiter
        try:
            await waiter
        finally:
            self._waiter = None

    def _take(self) -> list[M]:
        with self._lock:
            messages = list(self._queue)
            self._queue.clear()
        self._tell_room()
        return messages

    def __aiter__(self) -> Inbox[M]:
        return self

    async def __anext__(self) -> M:
        """The oldest message; the iteration ends when the inbox is closed."""
        while not self._queue and self._cause is None:
            await self._something()
        if self._cause is not None:
            raise StopAsyncIteration
        with self._lock:
            msg = self._queue.popleft()
        self._tell_room()
        return msg

    def when_room(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, on the loop, when half of a full inbox is free again (or it is closed)."""
        self._when_room.append(callback)
        self._tell_room()

    async def room(self) -> None:
        """Returns when the inbox can take a message, for senders that may wait."""
        while self.full and not self.closed:
            free = asyncio.get_running_loop().create_future()
            self.when_room(lambda free=free: _wake(free))  # type: ignore[misc]
            await free

    def _tell_room(self) -> None:
        # A sender that sleeps is woken for a batch, not for every message that is read.
        if self._when_room and (len(self._queue) <= self.limit // 2 or self.closed):
            waiting, self._when_room = self._when_room, []
            for callback in waiting:
                callback()

    def close(self, cause: str = "stopped") -> list[M]:
        """Refuses everything from now on and returns what nobody will read, so that it can be answered."""
        with self._lock:
            if self._cause is None:
                self._cause = cause
            rest = list(self._queue)
            self._queue.clear()
        if self._waiter is not None:
            _wake(self._waiter)
        self._tell_room()
        return rest


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
