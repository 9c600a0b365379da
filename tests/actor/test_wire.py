"""Wires over Unix sockets: what every use relies on, then strangers, garbage and deaths."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq

from moeserve.actor import zmq_wire
from moeserve.actor.actor import Inbox
from moeserve.actor.handshake import Hello
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, connect, listen
from moeserve.errors import ActorStopped, ConfigError, Overloaded
from moeserve.messages import PROTOCOL_VERSION

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Word(msgspec.Struct, frozen=True, tag=True):
    number: int
    data: bytes = b""


class Bye(msgspec.Struct, frozen=True, tag=True):
    pass


Msg = Word | Bye


@dataclass
class Ends:
    """Both ends of one wire, and their inboxes."""

    a: ZmqWire[Msg, Any]
    b: ZmqWire[Msg, Any]
    at_a: Inbox[Any]
    at_b: Inbox[Any]


@asynccontextmanager
async def ends(address: str, limit: int = 1000) -> AsyncIterator[Ends]:
    at_a: Inbox[Any] = Inbox("a", limit)
    at_b: Inbox[Any] = Inbox("b", limit)
    a: ZmqWire[Msg, Any] = listen(address, token="t", receives=Msg, inbox=at_a)
    b: ZmqWire[Msg, Any] = connect(address, token="t", receives=Msg, inbox=at_b)
    try:
        await a.connected(5)
        await b.connected(5)
        yield Ends(a, b, at_a, at_b)
    finally:
        a.close()
        b.close()


async def take(inbox: Inbox[Any], count: int) -> list[Any]:
    got: list[Any] = []
    async with asyncio.timeout(10):
        while len(got) < count:
            got += await inbox.drain(wait=True)
    assert len(got) == count
    return got


# Both ends in one process


def test_messages_arrive_in_order_in_both_directions(run: Run, address: str) -> None:
    async def main() -> None:
        async with ends(address) as e:
            sent = [Word(i) for i in range(500)]
            for word in sent:
                e.a.send(word)
                e.b.send(word)
            assert await take(e.at_a, 500) == sent
            assert await take(e.at_b, 500) == sent
            assert (e.a.num_dropped, e.b.num_dropped) == (0, 0)

    run(main())


def test_answers_come_back_while_nothing_else_moves(run: Run, address: str) -> None:
    async def main() -> None:
        async with ends(address) as e:

            async def echo() -> None:
                while True:
                    for msg in await e.at_b.drain(wait=True):
                        e.b.send(msg)

            echoing = asyncio.ensure_future(echo())
            for i in range(
                300
            ):  # one at a time: an edge of the descriptor that is missed hangs here
                e.a.send(Word(i))
                assert await asyncio.wait_for(e.at_a.drain(wait=True), 5) == [Word(i)]
            echoing.cancel()

    run(main())


def test_large_messages_pass_whole(run: Run, address: str) -> None:
    async def main() -> None:
        data = Random(1).randbytes(1 << 20) * 24
        async with ends(address) as e:
            e.a.send(Word(1, data))
            e.a.send(Bye())
            assert await take(e.at_b, 2) == [Word(1, data), Bye()]

    run(main())


def test_the_loss_of_the_peer_is_told_at_once_behind_its_last_message(
    run: Run, address: str
) -> None:
    async def main() -> None:
        async with ends(address) as e:
            for i in range(100):
                e.b.send(Word(i))
            e.b.close(linger_s=1)
            *words, notice = await take(e.at_a, 101)
            assert words == [Word(i) for i in range(100)]
            assert isinstance(notice, PeerGone)
            assert not e.a.send(Bye())

    run(main())


@pytest.mark.parametrize("leaver", ["listener", "connector"])
def test_last_words_reach_a_peer_that_is_busy_when_they_come(
    run: Run, address: str, leaver: str
) -> None:
    async def main() -> None:
        async with ends(address) as e:
            gone, stays, inbox = (e.a, e.b, e.at_b) if leaver == "listener" else (e.b, e.a, e.at_a)
            for i in range(3):
                stays.send(Word(i))  # the leaver will not read them
                gone.send(Word(i))
            gone.close(linger_s=1)
            time.sleep(0.02)  # noqa: ASYNC251  # ZeroMQ's thread sees the end of the connection before the loop turns
            *words, notice = await take(inbox, 4)
            assert words == [Word(i) for i in range(3)]
            assert isinstance(notice, PeerGone)
            closing_s = time.monotonic()
            stays.close(linger_s=60)
            assert time.monotonic() - closing_s < 15  # nobody is left to wait for

    run(main())


def test_a_peer_that_does_not_read_means_overloaded_and_not_memory(
    run: Run, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_wire, "MAX_QUEUED_FRAMES", 50)

    async def main() -> None:
        async with ends(address, limit=50) as e:
            sent = 0
            with suppress(Overloaded):
                while sent < 5000:
                    e.a.send(Word(sent, bytes(10_000)))
                    sent += 1
                    if sent % 50 == 0:
                        await asyncio.sleep(0.001)
            assert 40 <= sent < 5000
            assert len(e.at_b) <= 50
            words = await take(e.at_b, sent)  # and then all of it arrives after all
            assert [word.number for word in words] == list(range(sent))

    run(main())


def test_closing_twice_is_harmless(run: Run, address: str) -> None:
    async def main() -> None:
        async with ends(address) as e:
            e.a.close()
            e.a.close()
            assert not e.a.send(Bye())

    run(main())


# Between processes

PEER = """
import asyncio, sys
from moeserve.actor.actor import Inbox
from moeserve.actor.zmq_wire import connect
async def main():
    inbox = Inbox("peer")
    wire = connect(sys.argv[1], token="t", receives=int, inbox=inbox)
    while True:
        for number in await inbox.drain(wait=True):
            wire.send(number)
asyncio.run(main())
"""


@asynccontextmanager
async def peer_process(
    address: str,
) -> AsyncIterator[tuple[ZmqWire[Any, Any], Inbox[Any], subprocess.Popen[bytes]]]:
    """A listener here and a process at the other end that sends each integer back."""
    inbox: Inbox[Any] = Inbox("here")
    wire = listen(address, token="t", receives=int, inbox=inbox)
    process = subprocess.Popen([sys.executable, "-c", PEER, address])  # noqa: ASYNC220
    try:
        await wire.connected(10)
        yield wire, inbox, process
    finally:
        process.kill()
        process.wait()
        wire.close()


def test_a_killed_process_is_noticed_at_once(run: Run, address: str) -> None:
    async def main() -> None:
        async with peer_process(address) as (wire, inbox, process):
            wire.send(1)
            assert await take(inbox, 1) == [1]
            killed_s = time.monotonic()
            process.kill()
            assert isinstance((await take(inbox, 1))[0], PeerGone)
            assert time.monotonic() - killed_s < 15

    run(main())


def test_an_idle_wire_costs_nothing_and_a_busy_one_answers_fast(run: Run, address: str) -> None:
    async def main() -> None:
        async with peer_process(address) as (wire, inbox, _):
            trips = []
            for i in range(500):
                start_s = time.perf_counter()
                wire.send(i)
                assert await inbox.drain(wait=True) == [i]
                trips.append(time.perf_counter() - start_s)
            assert sorted(trips)[10] < 0.005  # about 0.1 ms; a poll of any kind would take longer
            used_s = time.process_time()
            await asyncio.sleep(0.5)
            assert time.process_time() - used_s < 0.1

    run(main())


def raw_peer(address: str) -> tuple[zmq.Context[Any], zmq.Socket[Any]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 1000
    socket.connect(address)
    return context, socket


async def until_dropped(wire: ZmqWire[Any, Any], frames: int) -> None:
    async with asyncio.timeout(5):
        while wire.num_dropped < frames:  # noqa: ASYNC110  (no event tells of a dropped frame)
            await asyncio.sleep(0.002)
    assert wire.num_dropped == frames


def test_strangers_are_dropped_and_counted_and_the_peer_is_served(run: Run, address: str) -> None:
    async def main() -> None:
        inbox: Inbox[Any] = Inbox("here")
        wire = listen(address, token="t", receives=Msg, inbox=inbox)
        context, stranger = raw_peer(address)
        encode = msgspec.msgpack.encode
        frames = [b"", b"\xc1", Random(3).randbytes(1000), b"\x91" * 100_000, encode(Word(1))]
        frames += [
            encode(Hello(PROTOCOL_VERSION, "guess")),
            encode({"type": "Hello", "version": "x", "token": 3}),
        ]
        for frame in frames:
            stranger.send(frame)
        await until_dropped(wire, len(frames))  # before the peer is there

        at_peer: Inbox[Any] = Inbox("peer")
        peer = connect(address, token="t", receives=Msg, inbox=at_peer)
        await peer.connected(5)
        for frame in frames:
            stranger.send(frame)
        await until_dropped(wire, 2 * len(frames))  # and after
        peer.send(Word(7))
        assert await take(inbox, 1) == [Word(7)]
        stranger.close()
        context.term()
        wire.send(Word(8))
        assert await take(at_peer, 1) == [Word(8)]
        assert len(inbox) == 0  # the stranger's leaving was not taken for the peer's
        peer.close()
        wire.close()

    run(main())


def test_bytes_that_are_not_even_zeromq_hurt_nobody(run: Run, address: str) -> None:
    async def main() -> None:
        inbox: Inbox[Any] = Inbox("here")
        wire = listen(address, token="t", receives=Msg, inbox=inbox)
        strangers = []
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 65, Random(2).randbytes(1 << 20)):
            strangers.append(await asyncio.open_unix_connection(address.removeprefix("ipc://")))
            strangers[-1][1].write(data)
        at_peer: Inbox[Any] = Inbox("peer")
        peer = connect(address, token="t", receives=Msg, inbox=at_peer)
        await peer.connected(5)
        peer.send(Word(1))
        assert await take(inbox, 1) == [Word(1)]
        for _, writer in strangers:
            writer.transport.abort()
        wire.send(Word(2))
        assert await take(at_peer, 1) == [Word(2)]
        assert len(inbox) == 0
        peer.close()
        wire.close()
        # uvloop once waited for ever when it was closed right behind connections that were aborted.
        await asyncio.gather(
            *(writer.wait_closed() for _, writer in strangers), return_exceptions=True
        )

    run(main())


LATE_PEER = "input()" + PEER


def test_a_peer_over_the_number_of_a_lost_strangers_connection_stays(
    run: Run, address: str, monkeypatch: Any
) -> None:
    async def main() -> None:
        inbox: Inbox[Any] = Inbox("here")
        wire = listen(address, token="t", receives=int, inbox=inbox)
        command = [sys.executable, "-c", LATE_PEER, address]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: ASYNC220
        assert process.stdin is not None
        say = process.stdin
        read_rest = wire._read_rest

        def peer_comes_first() -> (
            None
        ):  # between the news of the stranger's end and what is read behind it
            if not wire.greeted:
                say.write(b"\n")
                say.flush()
                time.sleep(1)
            read_rest()

        monkeypatch.setattr(wire, "_read_rest", peer_comes_first)
        taken = [os.dup(1) for _ in range(64)]  # so that the lowest free number is the stranger's
        _, stranger = await asyncio.open_unix_connection(address.removeprefix("ipc://"))
        stranger.write(b"\xff" * 65)  # ZeroMQ closes its end; ours stays open
        await wire.connected(5)
        wire.send(3)
        assert await take(inbox, 1) == [3]
        stranger.close()
        say.close()
        process.kill()
        process.wait()
        for fd in taken:
            os.close(fd)
        wire.close()

    run(main())


def test_a_peer_that_ends_right_after_its_hello_has_still_said_what_it_said(
    run: Run, address: str
) -> None:
    async def main() -> None:
        inbox: Inbox[Any] = Inbox("here")
        wire = listen(address, token="t", receives=Msg, inbox=inbox)
        context, peer = raw_peer(address)
        for msg in (Hello(PROTOCOL_VERSION, "t"), Word(1), Word(2)):
            peer.send(msgspec.msgpack.encode(msg))
        peer.close()
        context.term()  # the peer is gone before the listener's loop has looked once
        *words, notice = await take(inbox, 3)
        assert words == [Word(1), Word(2)]
        assert isinstance(notice, PeerGone)
        wire.close()

    run(main())


def test_garbage_from_the_peer_is_dropped_and_counted(run: Run, address: str) -> None:
    async def main() -> None:
        inbox: Inbox[Any] = Inbox("here")
        wire = listen(address, token="t", receives=Msg, inbox=inbox)
        context, peer = raw_peer(address)
        peer.send(msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, "t")))
        random = Random(5)
        good = msgspec.msgpack.encode(Word(3, b"abc"))
        cut = [good[:i] for i in range(len(good))]
        flipped = [bytes([*good[:i], good[i] ^ 0x80, *good[i + 1 :]]) for i in range(12)]
        noise = [random.randbytes(random.randrange(64)) for _ in range(300)]
        deep = [
            b"\x91" * 200_000,
            b"\x81" * 200_000,
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xffx",
        ]
        for frame in [*cut, *noise, *deep]:
            peer.send(frame)
        peer.send_multipart([b"one", b"two"])
        for frame in flipped:
            peer.send(frame)
        peer.send(good)
        assert await take(inbox, 1) == [Word(3, b"abc")]
        assert wire.num_dropped == len(cut) + len(noise) + len(deep) + 1 + len(flipped)
        peer.close()
        context.term()
        wire.close()

    run(main())


def test_a_frame_beyond_the_limit_cuts_the_peer_off_without_reading_it(
    run: Run, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_wire, "MAX_FRAME_BYTES", 1 << 16)

    async def main() -> None:
        inbox: Inbox[Any] = Inbox("here")
        wire = listen(address, token="t", receives=Msg, inbox=inbox)
        context, peer = raw_peer(address)
        peer.linger = 0
        peer.send(msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, "t")))
        await wire.connected(5)
        with pytest.raises(ValueError, match=r"a Word of 7.... bytes exceeds the wire's 65536"):
            wire.send(Word(1, bytes(70_000)))
        peer.send(bytes(1 << 20))
        assert isinstance((await take(inbox, 1))[0], PeerGone)
        peer.close()
        context.term()
        wire.close()

    run(main())


def test_another_protocol_version_is_refused_on_both_sides_with_the_remedy(
    run: Run, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        here: Inbox[Any] = Inbox("here")
        there: Inbox[Any] = Inbox("there")
        wire = listen(address, token="t", receives=Msg, inbox=here)
        monkeypatch.setattr(zmq_wire, "PROTOCOL_VERSION", 99)
        peer = connect(address, token="t", receives=Msg, inbox=there)
        for inbox in (here, there):
            notice = (await take(inbox, 1))[0]
            assert isinstance(notice, PeerGone)
            assert f"protocol 99, the listening one {PROTOCOL_VERSION}" in notice.cause
            assert "restart it" in notice.cause
        with pytest.raises(ActorStopped, match="protocol 99"):
            await peer.connected(1)
        assert not wire.greeted
        peer.close()
        wire.close()

    run(main())


def test_nobody_listening_and_nobody_connecting_are_told_apart_quickly(
    run: Run, address: str
) -> None:
    async def main() -> None:
        inbox: Inbox[Any] = Inbox("here")
        lonely = connect(address, token="t", receives=Msg, inbox=inbox)
        with pytest.raises(ActorStopped):
            await lonely.connected(5)
        lonely.close()
        wire = listen(address, token="t", receives=Msg, inbox=inbox)
        with pytest.raises(TimeoutError, match=r"no peer has connected within 0\.05 s"):
            await wire.connected(0.05)
        assert not wire.send(Bye())
        wire.close()

    run(main())


def test_the_socket_is_private_and_does_not_stay_behind(run: Run, address: str) -> None:
    path = address.removeprefix("ipc://")

    async def main() -> None:
        inbox: Inbox[Any] = Inbox("here")
        wire = listen(address, token="t", receives=Msg, inbox=inbox)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        wire.close()

    run(main())
    assert not os.path.exists(path)


def test_addresses_that_would_be_unsafe_or_cannot_work_are_refused(
    run: Run, tmp_path: Path
) -> None:
    open_dir = tmp_path / "open"
    open_dir.mkdir(mode=0o755)
    os.chmod(open_dir, 0o755)

    async def main(address: str) -> None:
        listen(address, token="t", receives=Msg, inbox=Inbox("here"))

    for address, why in (
        (f"ipc://{open_dir}/s", "can be entered by others .mode 755."),
        (f"ipc://{tmp_path}/{'x' * 120}", "longer than the 107 bytes"),
        ("tcp://127.0.0.1:5555", "need CURVE keys"),
        ("udp://127.0.0.1:5555", "ipc:// or tcp://"),
        (f"ipc://{tmp_path}/missing/s", "missing"),
    ):
        with pytest.raises(ConfigError, match=why):
            run(main(address))
