"""The one way into an actor: a queue with a limit, an error when it is full, and an error once nobody reads it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from moeserve.errors import ActorStopped, Overloaded

M = TypeVar("M")


class Inbox(Generic[M]):
    """Messages for one owner, first in, first out, at most `limit` of them. All of it belongs to one event loop.

    The owner alone reads (`drain` or `async for`). A full inbox raises Overloaded, a closed one ActorStopped: a sender
    always learns at once that its message will not be read.
    """

    def __init__(self, owner: str, limit: int = 10_000) -> None:
        assert limit > 0, limit
        self.owner = owner
        self.limit = limit
        self._queue: deque[M] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._when_room: list[Callable[[], None]] = []
        self._cause: str | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether `put` would raise Overloaded."""
        return len(self._queue) >= self.limit

    @property
    def closed(self) -> bool:
        """Whether nobody reads any more."""
        return self._cause is not None

    def put(self, msg: M, *, force: bool = False) -> None:
        """Adds a message. `force` ignores the limit: for the few notices that must not be lost."""
        if self._cause is not None:
            raise ActorStopped(f"{self.owner}: {self._cause}")
        if self.full and not force:
            raise Overloaded(f"{self.owner}: {len(self)} messages are waiting already, the limit is {self.limit}")
        self._queue.append(msg)
        self.wake()

    def wake(self) -> None:
        """Makes a `drain` that waits return, without a message if there is none."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def drain(self, wait: bool) -> list[M]:
        """Returns all messages, oldest first. With `wait`, sleeps until there is one or `wake` is called.

        Raises ActorStopped once the inbox is closed, so that a reading loop ends.
        """
        if wait and not self._queue and self._cause is None:
            await self._something()
        if self._cause is not None:
            raise ActorStopped(f"{self.owner}: {self._cause}")
        messages = list(self._queue)
        self._queue.clear()
        self._tell_room()
        return messages

    def __aiter__(self) -> Inbox[M]:
        return self

    async def __anext__(self) -> M:
        """Returns the oldest message; the iteration ends when the inbox is closed."""
        while not self._queue and self._cause is None:
            await self._something()
        if self._cause is not None:
            raise StopAsyncIteration
        msg = self._queue.popleft()
        self._tell_room()
        return msg

    async def _something(self) -> None:
        assert self._waiter is None, f"{self.owner}: an inbox has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def when_room(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, on the loop, when half of a full inbox is free again (or it is closed)."""
        self._when_room.append(callback)
        self._tell_room()

    async def room(self) -> None:
        """Returns when the inbox can take a message, for senders that may wait."""
        while self.full and not self.closed:
            free = asyncio.Event()
            self.when_room(free.set)
            await free.wait()

    def _tell_room(self) -> None:
        # A sender that sleeps is woken for a batch, not for every message that is read.
        if self._when_room and (len(self._queue) <= self.limit // 2 or self.closed):
            waiting, self._when_room = self._when_room, []
            for callback in waiting:
                callback()

    def close(self, cause: str = "stopped") -> list[M]:
        """Refuses everything from now on and returns the messages that were not read. The first cause counts."""
        if self._cause is None:
            self._cause = cause
        rest = list(self._queue)
        self._queue.clear()
        self.wake()
        self._tell_room()
        return rest
