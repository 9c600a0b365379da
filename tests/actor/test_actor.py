"""Actors: order, errors, stopping, and that no sender is left in doubt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from moeserve.actor.actor import Actor, Inbox
from moeserve.errors import ActorStopped, Overloaded


@dataclass
class Add:
    number: int


@dataclass
class Break:
    error: BaseException


class Counter(Actor[Add | Break]):
    def __init__(self, limit: int = 100) -> None:
        super().__init__("counter", Inbox("counter", limit))
        self.seen: list[int] = []
        self.arrived = asyncio.Event()
        self.ended = False

    def handle(self, msg: Add | Break) -> None:
        match msg:
            case Add(number):
                self.seen.append(number)
                self.arrived.set()
            case Break(error):
                raise error

    async def on_stop(self) -> None:
        self.ended = True


async def test_messages_are_handled_in_the_order_in_which_they_were_sent() -> None:
    counter = Counter()
    life = asyncio.ensure_future(counter.run())
    for number in range(10):
        counter.tell(Add(number))
    await counter.arrived.wait()
    counter.stop()
    await life
    assert counter.seen == list(range(10))
    assert counter.ended


async def test_an_error_in_handle_ends_the_actor_and_refuses_senders() -> None:
    counter = Counter()
    counter.tell(Break(ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        await counter.run()
    assert counter.ended
    with pytest.raises(ActorStopped, match="counter: ValueError: broken"):
        counter.tell(Add(1))


async def test_a_stopped_actor_wakes_ends_and_refuses() -> None:
    counter = Counter()
    life = asyncio.ensure_future(counter.run())
    await asyncio.sleep(0)
    counter.stop()
    await asyncio.wait_for(life, 15)
    with pytest.raises(ActorStopped, match="counter: stopped"):
        counter.tell(Add(1))


async def test_a_cancelled_actor_stops_in_order_and_names_the_cause() -> None:
    counter = Counter()
    life = asyncio.ensure_future(counter.run())
    await asyncio.sleep(0)
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    assert counter.ended
    with pytest.raises(ActorStopped, match="counter: CancelledError"):
        counter.tell(Add(1))


async def test_an_actor_that_fails_to_start_refuses_its_senders() -> None:
    class Unlucky(Counter):
        async def on_start(self) -> None:
            raise OSError("no disk")

    unlucky = Unlucky()
    with pytest.raises(OSError, match="no disk"):
        await unlucky.run()
    with pytest.raises(ActorStopped, match="OSError: no disk"):
        unlucky.tell(Add(1))
    assert not unlucky.ended


async def test_a_full_actor_refuses_at_once() -> None:
    counter = Counter(limit=2)
    counter.tell(Add(1))
    counter.tell(Add(1))
    with pytest.raises(Overloaded, match="counter: the inbox is full, with 2 messages"):
        counter.tell(Add(1))
