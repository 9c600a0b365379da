"""Actors: one inbox, one closed union of messages, one owner, and a lifetime that leaves no caller without an answer.

class Counter(Actor[Add | Read]):
    total = 0

    async def handle(self, msg: Add | Read) -> int | None:
        match msg:
            case Add(number): self.total += number
            case Read(): return self.total

async with running(Counter("counter")) as counter:
    counter.tell(Add(2))
    assert await counter.ask(Read(), deadline_s=1) == 2
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from moeserve.actor.inbox import Inbox
from moeserve.errors import ActorStopped

M = TypeVar("M")


class Envelope(Generic[M]):
    """A message on its way. `reply` is there when the sender waits for the answer."""

    __slots__ = ("msg", "reply")

    def __init__(self, msg: M, reply: asyncio.Future[Any] | None = None) -> None:
        self.msg = msg
        self.reply = reply

    def answer(self, value: Any) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_result(value)

    def fail(self, cause: BaseException) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(cause)


class Ref(Generic[M]):
    """What others hold of an actor: they can talk to it and nothing else."""

    __slots__ = ("_inbox", "name")

    def __init__(self, name: str, inbox: Inbox[Envelope[M]]) -> None:
        self.name = name
        self._inbox = inbox

    def tell(self, msg: M) -> None:
        """Sends and forgets. Raises Overloaded if the inbox is full, ActorStopped if nobody reads it any more."""
        self._inbox.put(Envelope(msg))

    async def ask(self, msg: M, deadline_s: float) -> Any:
        """Sends and returns what the actor's `handle` returned, or raises what it raised.

        TimeoutError after `deadline_s` seconds; the actor may still act on the message then.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.put(Envelope(msg, reply))
        try:
            async with asyncio.timeout(deadline_s):
                return await reply
        except TimeoutError:
            if reply.done() and not reply.cancelled():  # the actor itself raised TimeoutError
                raise
            raise TimeoutError(f"{self.name} did not answer {type(msg).__name__} within {deadline_s:g} s") from None


class Actor(Generic[M]):
    """Subclass and override `handle`. Messages are handled one at a time, in the order they came.

    An error while handling an ask goes to the asker and the actor lives on: the request was at fault or the
    asker will know what to do. An error while handling a tell has no one to go to, so it ends the actor.
    """

    def __init__(self, name: str, limit: int = 10_000) -> None:
        self.name = name
        self._inbox: Inbox[Envelope[M]] = Inbox(name, limit)

    @property
    def ref(self) -> Ref[M]:
        return Ref(self.name, self._inbox)

    async def handle(self, msg: M) -> Any:
        """Acts on one message; the value answers an ask."""
        raise NotImplementedError

    async def on_start(self) -> None:
        """Runs before the first message. An error here ends the actor; `on_stop` is not called then."""

    async def on_stop(self) -> None:
        """Runs after the last message, also after an error in `handle` or a cancellation."""

    def stop(self) -> None:
        """Ends the actor after the message that it handles now; what waits behind it gets ActorStopped."""
        self._refuse_rest("stopped")

    async def run(self) -> None:
        """The actor's whole life. Belongs into a TaskGroup; `running` does that."""
        cause = "stopped"
        try:
            await self.on_start()
            try:
                async for envelope in self._inbox:
                    await self._serve(envelope)
            finally:
                await self.on_stop()
        except BaseException as exc:
            cause = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
            raise
        finally:
            self._refuse_rest(cause)

    async def _serve(self, envelope: Envelope[M]) -> None:
        try:
            envelope.answer(await self.handle(envelope.msg))
        except Exception as exc:
            if envelope.reply is None:
                raise
            envelope.fail(exc)
        except BaseException as exc:  # cancelled: the asker must not wait for ever
            envelope.fail(ActorStopped(f"{self.name}: {type(exc).__name__}"))
            raise

    def _refuse_rest(self, cause: str) -> None:
        for envelope in self._inbox.close(cause):
            envelope.fail(ActorStopped(f"{self.name}: {cause}"))


@asynccontextmanager
async def running(actor: Actor[M], grace_s: float = 5.0) -> AsyncIterator[Ref[M]]:
    """The actor lives as long as the block. If it dies first, the block is cancelled and its error comes out.

    At the block's end the message in hand may take `grace_s` seconds more; then it is cancelled.
    """
    async with asyncio.TaskGroup() as group:
        life = group.create_task(actor.run(), name=actor.name)
        try:
            yield actor.ref
        finally:
            actor.stop()
            await asyncio.wait([life], timeout=grace_s)
            life.cancel()
