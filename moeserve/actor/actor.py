"""The actor kit: start reading here.

The parts of moeserve that get messages from other processes are actors: `EngineCore`, `FrontEnd`,
`NodeAgent`. An actor has one inbox, one closed union of messages that it understands, one owner,
and one way to stop:

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

Messages are handled one at a time, in the order in which they were sent. `tell` returns nothing: an
answer is a message to the sender's own inbox. Other long-lived parts are plain objects whose
methods the loop calls, such as the fleet's state machine, and tasks with an owner (tasks.py). No
object writes the fields of another one. Where a process can die, a `Supervisor` (supervisor.py)
starts it again.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from moeserve.errors import ActorStopped, Overloaded

M = TypeVar("M")


class Inbox(Generic[M]):
    """Messages for one owner, first in, first out, at most `limit` of them. All of it belongs to
    one event loop.

    The owner alone reads. A full inbox raises Overloaded, a closed one ActorStopped: a sender
    always learns at once that its message will not be read.
    """

    def __init__(self, owner: str, limit: int = 10_000) -> None:
        assert limit > 0, limit
        self.owner = owner
        self.limit = limit
        self._queue: deque[M] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False  # since the last drain
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
        """Add a message. `force` ignores the limit: for the few notices that must not be lost."""
        self._raise_if_closed()
        if self.full and not force:
            raise Overloaded(
                f"{self.owner}: {len(self)} messages are waiting already, the limit is {self.limit}"
            )
        self._queue.append(msg)
        self.wake()

    def wake(self) -> None:
        """Make a `drain` that waits return, without a message if there is none; if no drain waits,
        the next one.
        """
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def drain(self, wait: bool) -> list[M]:
        """Return all messages, oldest first. With `wait`, sleeps until there is one or `wake` is
        called.

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
        self._tell_room()
        return messages

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, on the loop, when half of a full inbox is free again (or it is
        closed).
        """
        self._when_room.append(callback)
        self._tell_room()

    def _tell_room(self) -> None:
        # A sender that sleeps is woken for a batch, not for every message that is read.
        if self._when_room and (len(self._queue) <= self.limit // 2 or self.closed):
            waiting = self._when_room
            self._when_room = []
            for callback in waiting:
                callback()

    def close(self, cause: str = "stopped") -> None:
        """Refuse all further messages, and drop those that were not read.

        The first cause counts.
        """
        self._cause = self._cause or cause
        self._queue.clear()
        self.wake()
        self._tell_room()

    def _raise_if_closed(self) -> None:
        if self._cause is not None:
            raise ActorStopped(f"{self.owner}: {self._cause}")


class Actor(Generic[M]):
    """Base class of everything that lives on an event loop and is talked to. Override `handle`.

    An actor that also works between messages overrides `turn`. inbox: where its messages arrive; a
    wire may fill it. An error in `handle` or `turn` ends the actor and comes out of `run`.
    """

    def __init__(self, name: str, inbox: Inbox[M] | None = None) -> None:
        self.name = name
        self.inbox: Inbox[M] = Inbox(name) if inbox is None else inbox
        self._stopping = False

    def tell(self, msg: M) -> None:
        """Send a message to this actor. Raises Overloaded if its inbox is full, ActorStopped if it
        has ended.
        """
        self.inbox.put(msg)

    def stop(self) -> None:
        """End the actor after the turn in hand. Safe to repeat."""
        self._stopping = True
        self.inbox.wake()

    @property
    def over(self) -> bool:
        """Whether `run` shall return."""
        return self._stopping

    def handle(self, msg: M) -> None:
        """Act on one message."""
        raise NotImplementedError

    async def turn(self) -> None:
        """Wait for messages and handles all that are there."""
        for msg in await self.inbox.drain(wait=True):
            self.handle(msg)

    async def on_start(self) -> None:
        """Run before the first turn. An error here ends the actor without a call of `on_stop`."""

    async def on_stop(self) -> None:
        """Run after the last turn, also after an error or a cancellation."""

    async def run(self) -> None:
        """The actor's whole life; belongs in a task. Closes the inbox at its end."""
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
