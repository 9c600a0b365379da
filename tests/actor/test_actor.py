"""Actors: order, answers, and that no asker is ever left waiting."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from moeserve.actor.actor import Actor, running
from moeserve.errors import ActorStopped, Overloaded


@dataclass
class Add:
    number: int


@dataclass
class Read:
    pass


@dataclass
class Break:
    error: BaseException


@dataclass
class Wait:
    until: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)


Msg = Add | Read | Break | Wait


class Counter(Actor[Msg]):
    def __init__(self, limit: int = 100) -> None:
        super().__init__("counter", limit)
        self.total = 0
        self.ended = False

    async def handle(self, msg: Msg) -> Any:
        match msg:
            case Add(number):
                self.total += number
            case Read():
                return self.total
            case Break(error):
                raise error
            case Wait(until, begun):
                begun.set()
                await until.wait()
        return None

    async def on_stop(self) -> None:
        self.ended = True


async def test_tell_then_ask_sees_what_was_told() -> None:
    async with running(Counter()) as counter:
        for number in range(10):
            counter.tell(Add(number))
        assert await counter.ask(Read(), deadline_s=1) == 45


async def test_an_error_in_an_ask_goes_to_the_asker_and_the_actor_lives_on() -> None:
    async with running(Counter()) as counter:
        with pytest.raises(KeyError, match="who"):
            await counter.ask(Break(KeyError("who")), deadline_s=1)
        assert await counter.ask(Read(), deadline_s=1) == 0


async def test_an_ask_past_its_deadline_says_who_did_not_answer_what() -> None:
    wait = Wait()
    async with running(Counter()) as counter:
        with pytest.raises(TimeoutError, match=r"counter did not answer Wait within 0\.01 s"):
            await counter.ask(wait, deadline_s=0.01)
        wait.until.set()
        assert await counter.ask(Read(), deadline_s=1) == 0


async def test_a_timeout_inside_the_actor_is_passed_on_as_it_is() -> None:
    async with running(Counter()) as counter:
        with pytest.raises(TimeoutError, match="its own"):
            await counter.ask(Break(TimeoutError("its own")), deadline_s=5)


async def test_an_error_in_a_tell_ends_the_actor_and_all_askers_get_the_cause() -> None:
    actor = Counter()
    asks: list[asyncio.Future[Any]] = []

    async def live() -> None:
        async with running(actor) as counter:
            wait = Wait()
            asks.append(asyncio.ensure_future(counter.ask(wait, deadline_s=5)))
            await wait.begun.wait()
            counter.tell(Break(ValueError("broken")))
            asks.extend(asyncio.ensure_future(counter.ask(Read(), deadline_s=5)) for _ in range(3))
            await asyncio.sleep(0)
            wait.until.set()
            await asyncio.sleep(5)

    with pytest.raises(ExceptionGroup) as caught:
        await live()
    assert caught.group_contains(ValueError, match="broken")
    first, *rest = await asyncio.gather(*asks, return_exceptions=True)
    assert first is None
    for error in rest:
        assert isinstance(error, ActorStopped)
        assert str(error) == "counter: ValueError: broken"
    assert actor.ended
    with pytest.raises(ActorStopped, match="ValueError: broken"):
        actor.ref.tell(Read())


async def test_cancelling_an_actor_answers_the_message_in_hand_and_those_behind_it() -> None:
    actor = Counter()
    life = asyncio.ensure_future(actor.run())
    wait = Wait()
    in_hand = asyncio.ensure_future(actor.ref.ask(wait, deadline_s=5))
    behind = asyncio.ensure_future(actor.ref.ask(Read(), deadline_s=5))
    await wait.begun.wait()
    life.cancel()
    answers = await asyncio.gather(life, in_hand, behind, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert isinstance(answers[1], ActorStopped)
    assert isinstance(answers[2], ActorStopped)
    assert actor.ended


async def test_leaving_the_block_finishes_the_message_in_hand_and_refuses_the_rest() -> None:
    actor = Counter()
    wait = Wait()
    async with running(actor) as counter:
        in_hand = asyncio.ensure_future(counter.ask(wait, deadline_s=5))
        behind = asyncio.ensure_future(counter.ask(Read(), deadline_s=5))
        await wait.begun.wait()
        asyncio.get_running_loop().call_later(0.02, wait.until.set)
    assert await in_hand is None
    with pytest.raises(ActorStopped, match="counter: stopped"):
        await behind
    assert actor.ended
    with pytest.raises(ActorStopped, match="counter: stopped"):
        await counter.ask(Read(), deadline_s=1)


async def test_leaving_the_block_does_not_wait_for_ever_for_the_message_in_hand() -> None:
    async with running(Counter(), grace_s=0.01) as counter:
        wait = Wait()
        in_hand = asyncio.ensure_future(counter.ask(wait, deadline_s=5))
        await wait.begun.wait()
    with pytest.raises(ActorStopped, match="counter: CancelledError"):
        await in_hand


async def test_an_actor_that_fails_to_start_refuses_its_callers() -> None:
    class Unlucky(Counter):
        async def on_start(self) -> None:
            raise OSError("no disk")

    actor = Unlucky()
    ask = asyncio.ensure_future(actor.ref.ask(Read(), deadline_s=5))
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="no disk"):
        await actor.run()
    with pytest.raises(ActorStopped, match="OSError: no disk"):
        await ask
    assert not actor.ended


async def test_a_full_actor_refuses_at_once() -> None:
    actor = Counter(limit=2)
    actor.ref.tell(Add(1))
    actor.ref.tell(Add(1))
    with pytest.raises(Overloaded, match="counter: 2 messages"):
        actor.ref.tell(Add(1))
