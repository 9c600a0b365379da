"""The inbox against a plain list, and what it reports to its sleepers and senders."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moeserve.actor.actor import Inbox
from moeserve.errors import ActorStopped, Overloaded

LIMIT = 4


async def test_a_sleeping_reader_wakes_for_one_message_and_gets_all_that_are_there() -> None:
    inbox: Inbox[int] = Inbox("reader")
    reading = asyncio.ensure_future(inbox.drain(wait=True))
    await asyncio.sleep(0)
    assert not reading.done()
    inbox.put(1)
    inbox.put(2)
    assert await reading == [1, 2]
    assert await inbox.drain(wait=False) == []


async def test_a_full_inbox_refuses_with_owner_and_count_but_takes_what_is_forced() -> None:
    inbox: Inbox[int] = Inbox("engine", limit=2)
    inbox.put(1)
    inbox.put(2)
    with pytest.raises(Overloaded, match=r"engine: the inbox is full, with 2 messages \(limit 2\)"):
        inbox.put(3)
    inbox.put(4, force=True)
    assert await inbox.drain(wait=True) == [1, 2, 4]


async def test_a_reader_that_is_woken_without_a_message_returns_none() -> None:
    inbox: Inbox[int] = Inbox("reader")
    reading = asyncio.ensure_future(inbox.drain(wait=True))
    await asyncio.sleep(0)
    inbox.wake()
    assert await reading == []


async def test_closing_wakes_the_reader_and_refuses_senders() -> None:
    inbox: Inbox[int] = Inbox("engine")
    reading = asyncio.ensure_future(inbox.drain(wait=True))
    await asyncio.sleep(0)
    inbox.close("the model is gone")
    with pytest.raises(ActorStopped, match="engine: the model is gone"):
        await reading
    with pytest.raises(ActorStopped, match="engine: the model is gone"):
        inbox.put(1)


async def test_a_cancelled_reader_loses_no_message() -> None:
    inbox: Inbox[int] = Inbox("reader")
    reading = asyncio.ensure_future(inbox.drain(wait=True))
    await asyncio.sleep(0)
    inbox.put(1)
    reading.cancel()
    await asyncio.wait([reading])
    assert await inbox.drain(wait=True) == [1]


async def test_two_readers_are_a_bug() -> None:
    inbox: Inbox[int] = Inbox("reader")
    first = asyncio.ensure_future(inbox.drain(wait=True))
    await asyncio.sleep(0)
    with pytest.raises(AssertionError, match="one reader"):
        await inbox.drain(wait=True)
    inbox.put(1)
    await first


async def test_a_sender_that_waits_for_room_gets_it_after_a_read() -> None:
    inbox: Inbox[int] = Inbox("reader", limit=2)
    inbox.put(1)
    inbox.put(2)
    room = asyncio.Event()
    inbox.when_room(room.set)
    assert not room.is_set()
    await inbox.drain(wait=True)
    assert room.is_set()
    inbox.put(3)


class InboxMachine(RuleBasedStateMachine):
    """Every order of puts, reads and closing, against a list."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.inbox: Inbox[int] = Inbox("machine", LIMIT)
        self.model: list[int] = []
        self.room_calls = self.room_asked = 0
        self.closed = False

    def teardown(self) -> None:
        self.loop.close()

    @rule(number=st.integers(), force=st.booleans())
    def put(self, number: int, force: bool) -> None:
        errors: list[BaseException] = []
        try:
            self.inbox.put(number, force=force)
        except (ActorStopped, Overloaded) as exc:
            errors.append(exc)
        if self.closed:
            expected: list[type] = [ActorStopped]
        elif len(self.model) >= LIMIT and not force:
            expected = [Overloaded]
        else:
            expected = []
            self.model.append(number)
        assert [type(error) for error in errors] == expected

    @precondition(lambda self: not self.closed)
    @rule()
    def drain(self) -> None:
        assert self.loop.run_until_complete(self.inbox.drain(wait=bool(self.model))) == self.model
        self.model = []

    @rule()
    def ask_for_room(self) -> None:
        self.room_asked += 1

        def called() -> None:
            self.room_calls += 1

        self.inbox.when_room(called)

    @rule()
    def close(self) -> None:
        self.inbox.close()
        self.model = []
        self.closed = True

    @invariant()
    def agrees(self) -> None:
        assert len(self.inbox) == len(self.model)
        assert self.inbox.full == (len(self.model) >= LIMIT)
        if not self.model or self.closed:  # then whoever waits for room must have been told
            assert self.room_calls == self.room_asked


TestInboxMachine = InboxMachine.TestCase
TestInboxMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
