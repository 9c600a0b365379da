"""The inbox against a plain list, and what its sleepers and senders are told."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moeserve.actor.inbox import Inbox
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


async def test_messages_from_threads_wake_the_reader_and_none_is_lost() -> None:
    inbox: Inbox[tuple[int, int]] = Inbox("reader", limit=100_000)

    def send(sender: int) -> None:
        for number in range(2000):
            inbox.put_threadsafe((sender, number))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    got: list[tuple[int, int]] = []
    while len(got) < 8000:
        got += await inbox.drain(wait=True)
    for sender in range(4):
        assert [number for who, number in got if who == sender] == list(range(2000))
    for thread in threads:
        thread.join()


async def test_a_full_inbox_refuses_with_owner_and_count_but_takes_what_is_forced() -> None:
    inbox: Inbox[int] = Inbox("engine", limit=2)
    inbox.put(1)
    inbox.put(2)
    with pytest.raises(Overloaded, match="engine: 2 messages are waiting already, the limit is 2"):
        inbox.put(3)
    with pytest.raises(Overloaded):
        inbox.put_threadsafe(3)
    inbox.put(4, force=True)
    assert inbox.stats.refused == 2
    assert inbox.stats.peak == 3
    assert await inbox.drain(wait=True) == [1, 2, 4]


async def test_closing_returns_the_rest_wakes_the_reader_and_refuses_senders() -> None:
    inbox: Inbox[int] = Inbox("engine")
    reading = asyncio.ensure_future(inbox.drain(wait=True))
    iterating = Inbox[int]("other")
    listing = asyncio.ensure_future(_list(iterating))
    await asyncio.sleep(0)
    assert inbox.close("the model is gone") == []
    iterating.close()
    with pytest.raises(ActorStopped, match="engine: the model is gone"):
        await reading
    assert await listing == []
    with pytest.raises(ActorStopped, match="engine: the model is gone"):
        inbox.put(1)
    with pytest.raises(ActorStopped):
        inbox.put_threadsafe(1)


async def _list(inbox: Inbox[int]) -> list[int]:
    return [msg async for msg in inbox]


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
    waiting = asyncio.ensure_future(inbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    await inbox.drain(wait=True)
    await asyncio.wait_for(waiting, 1)
    inbox.put(3)


def test_a_thread_whose_reader_lost_its_loop_is_told() -> None:
    inbox: Inbox[int] = Inbox("reader")
    loop = asyncio.new_event_loop()
    reading = loop.create_task(inbox.drain(wait=True))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    with pytest.raises(ActorStopped, match="loop is closed"):
        inbox.put_threadsafe(1)
    reading._log_destroy_pending = False  # type: ignore[attr-defined]
    reading.get_coro().close()


class InboxMachine(RuleBasedStateMachine):
    """Every order of puts, reads and closing, against a list."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.inbox: Inbox[int] = Inbox("machine", LIMIT)
        self.model: list[int] = []
        self.received = self.refused = self.room_calls = self.room_asked = 0
        self.closed = False

    def teardown(self) -> None:
        self.loop.close()

    @rule(number=st.integers(), force=st.booleans(), thread=st.booleans())
    def put(self, number: int, force: bool, thread: bool) -> None:
        errors: list[BaseException] = []

        def send() -> None:
            try:
                self.inbox.put_threadsafe(number) if thread else self.inbox.put(number, force=force)
            except (ActorStopped, Overloaded) as exc:
                errors.append(exc)

        if thread:
            sender = threading.Thread(target=send)
            sender.start()
            sender.join()
        else:
            send()
        if self.closed:
            expected: list[type] = [ActorStopped]
        elif len(self.model) >= LIMIT and (thread or not force):
            expected = [Overloaded]
            self.refused += 1
        else:
            expected = []
            self.model.append(number)
            self.received += 1
        assert [type(error) for error in errors] == expected

    @precondition(lambda self: not self.closed)
    @rule()
    def drain(self) -> None:
        assert self.loop.run_until_complete(self.inbox.drain(wait=bool(self.model))) == self.model
        self.model = []

    @precondition(lambda self: self.model and not self.closed)
    @rule()
    def next_one(self) -> None:
        assert self.loop.run_until_complete(anext(self.inbox)) == self.model.pop(0)

    @rule()
    def ask_for_room(self) -> None:
        self.room_asked += 1

        def called() -> None:
            self.room_calls += 1

        self.inbox.when_room(called)

    @rule()
    def close(self) -> None:
        assert self.inbox.close() == self.model
        self.model, self.closed = [], True

    @invariant()
    def agrees(self) -> None:
        stats = self.inbox.stats
        assert len(self.inbox) == stats.waiting == len(self.model)
        assert self.inbox.full == (len(self.model) >= LIMIT)
        assert (stats.received, stats.refused) == (self.received, self.refused)
        if not self.model or self.closed:  # then whoever waits for room must have been told
            assert self.room_calls == self.room_asked


TestInboxMachine = InboxMachine.TestCase
TestInboxMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
