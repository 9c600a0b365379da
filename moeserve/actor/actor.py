"""The actor kit: start reading here. Every long-lived part of moeserve is an Actor.

An actor has one inbox, one closed union of messages that it understands, one owner, and one way to stop:

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

    async with running(Counter("counter")) as counter:
        counter.tell(Add(2))

Messages are handled one at a time, in the order in which they were sent. There is no way to ask: an answer is a message
to the asker's own inbox. Where an actor's process can die, a `Supervisor` (supervisor.py) starts it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from moeserve.actor.inbox import Inbox

M = TypeVar("M")
A = TypeVar("A", bound="Actor[Any]")


class Actor(Generic[M]):
    """Base class of everything that lives on an event loop and is talked to. Override `handle`.

    An actor that also works between messages overrides `turn`. inbox: where its messages arrive; a wire may fill it.
    An error in `handle` or `turn` ends the actor and comes out of `run`.
    """

    def __init__(self, name: str, inbox: Inbox[M] | None = None) -> None:
        self.name = name
        self.inbox: Inbox[M] = Inbox(name) if inbox is None else inbox
        self._stopping = False

    def tell(self, msg: M) -> None:
        """Sends a message to this actor. Raises Overloaded if its inbox is full, ActorStopped if it has ended."""
        self.inbox.put(msg)

    def stop(self) -> None:
        """Ends the actor after the turn in hand. Safe to repeat."""
        self._stopping = True
        self.inbox.wake()

    @property
    def over(self) -> bool:
        """Whether `run` shall return."""
        return self._stopping

    def handle(self, msg: M) -> None:
        """Acts on one message."""
        raise NotImplementedError

    async def turn(self) -> None:
        """Waits for messages and handles all that are there."""
        for msg in await self.inbox.drain(wait=True):
            self.handle(msg)

    async def on_start(self) -> None:
        """Runs before the first turn. An error here ends the actor without a call of `on_stop`."""

    async def on_stop(self) -> None:
        """Runs after the last turn, also after an error or a cancellation."""

    async def run(self) -> None:
        """The actor's whole life; belongs in a TaskGroup or in `running`. Closes the inbox at its end."""
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


@asynccontextmanager
async def running(actor: A, grace_s: float = 5.0) -> AsyncIterator[A]:
    """Runs the actor as long as the block. If the actor dies first, the block is cancelled and the error comes out.

    At the block's end the turn in hand may take `grace_s` seconds more; then it is cancelled.
    """
    async with asyncio.TaskGroup() as group:
        life = group.create_task(actor.run(), name=actor.name)
        try:
            yield actor
        finally:
            actor.stop()
            await asyncio.wait([life], timeout=grace_s)
            life.cancel()
