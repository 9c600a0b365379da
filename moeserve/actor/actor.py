"""Actors: objects that own their state and receive messages. Start reading here.

The parts of moeserve that receive messages from other processes are actors: `EngineCore`,
`FrontEnd`, `NodeAgent`. An actor has one inbox, one closed union of message types, one owner, and
one way to stop:

    class Counter(Actor[Add | Reset]):
        total = 0

        def handle(self, msg: Add | Reset) -> None:
            match msg:
                case Add(number):
                    self.total += number
                case Reset():
                    self.total = 0
                case _:
                    assert_never(msg)

    counter = Counter("counter")
    life = spawn(counter.run(), name="counter", on_error=on_counter_failed)
    counter.tell(Add(2))

Messages are handled one at a time, in the order in which they were sent. `tell` returns nothing; a
reply is a message to the sender's inbox. Other long-lived parts are plain objects whose methods the
loop calls, such as the fleet's state machine, and tasks with an owner (tasks.py). No object writes
the fields of another one. If a process can die, a `Supervisor` (supervisor.py) restarts it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from moeserve.errors import ActorStopped, Overloaded

M = TypeVar("M")


class Inbox(Generic[M]):
    """A queue of at most `limit` messages for one owner, first in, first out.

    An inbox belongs to one event loop, and only the owner reads it. `put` raises Overloaded if the
    inbox is full, and ActorStopped if it is closed. So a sender always knows at once that its
    message will not be read.
    """

    def __init__(self, owner: str, limit: int = 10_000) -> None:
        assert limit > 0, limit
        self.owner = owner
        self.limit = limit
        self._queue: deque[M] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False  # whether `wake` was called since the last drain
        self._when_room: list[Callable[[], None]] = []
        self._cause: str | None = None  # why the inbox was closed; None: it is open

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether `put` would raise Overloaded."""
        return len(self._queue) >= self.limit

    @property
    def closed(self) -> bool:
        """Whether the owner has stopped reading."""
        return self._cause is not None

    def put(self, msg: M, *, force: bool = False) -> None:
        """Add a message. `force` ignores the limit, for the few messages that must not be lost."""
        self._raise_if_closed()
        if self.full and not force:
            raise Overloaded(
                f"{self.owner}: the inbox is full, with {len(self)} messages (limit {self.limit})"
            )
        self._queue.append(msg)
        self.wake()

    def wake(self) -> None:
        """Make the waiting `drain` (or else the next one) return, even without messages."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def drain(self, wait: bool) -> list[M]:
        """Remove and return all messages, oldest first.

        wait: sleep until there is a message or `wake` is called.

        Raises ActorStopped once the inbox is closed, so that a reading loop ends.
        """
        if wait and not self._woken and self._cause is None:
            assert self._waiter is None, f"{self.owner}: an inbox has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._raise_if_closed()
        self._woken = False
        messages = list(self._queue)
        self._queue.clear()
        self._notify_room()
        return messages

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, on the loop, when at least half of the inbox is free, or when the
        inbox is closed.
        """
        self._when_room.append(callback)
        self._notify_room()

    def _notify_room(self) -> None:
        # Wait until half is free, so that a sleeping sender is woken once per batch of messages.
        if self._when_room and (len(self._queue) <= self.limit // 2 or self.closed):
            waiting = self._when_room
            self._when_room = []
            for callback in waiting:
                callback()

    def close(self, cause: str = "stopped") -> None:
        """Refuse all further messages, and drop the unread ones. The first cause is kept."""
        self._cause = self._cause or cause
        self._queue.clear()
        self.wake()
        self._notify_room()

    def _raise_if_closed(self) -> None:
        if self._cause is not None:
            raise ActorStopped(f"{self.owner}: {self._cause}")


class Actor(Generic[M]):
    """The base class of actors. Override `handle`, and `turn` if the actor also works between
    messages.

    An error in `handle` or `turn` ends the actor, and `run` raises it.

    inbox: where the actor's messages arrive, for example from a connection to another process.
    """

    def __init__(self, name: str, inbox: Inbox[M] | None = None) -> None:
        self.name = name
        self.inbox: Inbox[M] = Inbox(name) if inbox is None else inbox
        self._stopping = False

    def tell(self, msg: M) -> None:
        """Send a message to this actor. Raises Overloaded if its inbox is full, ActorStopped if the
        actor has ended.
        """
        self.inbox.put(msg)

    def stop(self) -> None:
        """End the actor after the current turn. Idempotent."""
        self._stopping = True
        self.inbox.wake()

    @property
    def over(self) -> bool:
        """Whether `run` should return."""
        return self._stopping

    def handle(self, msg: M) -> None:
        """Act on one message."""
        raise NotImplementedError

    async def turn(self) -> None:
        """Wait for messages, and handle all of them."""
        for msg in await self.inbox.drain(wait=True):
            self.handle(msg)

    async def on_start(self) -> None:
        """Prepare for the first turn. After an error here, `on_stop` is not called."""

    async def on_stop(self) -> None:
        """Clean up after the last turn. Called after an error or a cancellation, too."""

    async def run(self) -> None:
        """Run the actor until `over`, then close its inbox. To be run as a task."""
        cause = "stopped"
        try:
            await self.on_start()
            try:
                while not self.over:
                    await self.turn()
            finally:
                await self.on_stop()
        except BaseException as error:
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise
        finally:
            self.inbox.close(cause)
