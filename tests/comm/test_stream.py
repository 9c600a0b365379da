"""Streams: messages in whatever pieces they come, hostile bytes, and who is let in."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.comm import stream
from moeserve.comm.cipher import Cipher
from moeserve.comm.stream import (
    HEADER,
    MAX_FRAME_BYTES,
    AsyncStream,
    BlockingStream,
    FrameSplitter,
    KeyedSocket,
    Peer,
    StreamListener,
    connect,
    frame,
)


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


@given(data=st.data())
def test_messages_come_back_in_any_pieces(data: st.DataObject) -> None:
    sent = data.draw(st.lists(st.builds(Text, st.text(max_size=40)), max_size=5))
    wire = b"".join(map(frame, sent))
    splits = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=5)))
    frames: FrameSplitter[Text] = FrameSplitter(Text)
    got: list[Text] = []
    for start, end in zip([0, *splits], [*splits, len(wire)], strict=True):
        frames.feed(wire[start:end])
        while (msg := frames.take()) is not None:
            got.append(msg)
    assert got == sent


@pytest.mark.parametrize(
    "wire",
    [
        HEADER.pack(MAX_FRAME_BYTES + 1),
        HEADER.pack(0),
        HEADER.pack(4) + b"\xff" * 4,
        HEADER.pack(200_000) + b"\x91" * 200_000,
    ],
)
def test_nonsense_is_refused(wire: bytes) -> None:
    frames: FrameSplitter[Text] = FrameSplitter(Text)
    frames.feed(wire)
    with pytest.raises(ValueError, match=r"no message|longest"):
        frames.take()


def test_a_message_that_no_peer_would_accept_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ValueError, match=r"a Text of \d+ bytes; the longest message has 10"):
        frame(Text("x" * 20))


async def test_each_expected_peer_is_let_in_once_and_nobody_else(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with closing(StreamListener(path, "token", 3, [Peer(1), Peer(2, 1)])) as listener:
        assert os.stat(path).st_mode & 0o777 == 0o600
        first = await connect(path, "token", 3, Peer(1))
        wrong = [
            ("other", 3, Peer(2, 1)),
            ("token", 4, Peer(2, 1)),
            ("token", 3, Peer(1)),
            ("token", 3, Peer(2)),
        ]
        for token, epoch, peer in wrong:
            with pytest.raises(ConnectionError, match=rf"epoch {epoch} .*another token or epoch"):
                await connect(path, token, epoch, peer)
        assert not listener.complete.is_set()
        second = await connect(path, "token", 3, Peer(2, 1))
        await asyncio.wait_for(listener.complete.wait(), 15)
        assert set(listener.accepted) == {Peer(1), Peer(2, 1)}
    with pytest.raises(FileNotFoundError):
        os.stat(path)
    for link in (first, second, *listener.accepted.values()):
        link.sock.close()


async def test_a_listener_that_does_not_know_the_token_is_found_out(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(os.urandom(48))
        assert len(await reader.read(1000)) == 40  # the hello; no proof follows
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    async with await asyncio.start_unix_server(pretend, path):
        with pytest.raises(ConnectionError, match="does not know this group's token"):
            await connect(path, "token", 1, Peer(1))
        await asyncio.wait_for(ended.wait(), 15)


async def test_a_stranger_that_says_nothing_is_dropped_when_the_listener_closes(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "s")
    with (
        closing(StreamListener(path, "token", 1, [Peer(1)])),
        socket.socket(socket.AF_UNIX) as stranger,
    ):
        stranger.connect(path)
        await asyncio.sleep(0.02)
    with (
        socket.socket(socket.AF_UNIX) as stranger,
        pytest.raises(OSError, match=r"No such file|refused"),
    ):
        stranger.connect(path)


async def test_every_flipped_bit_is_noticed_at_once() -> None:
    """Between machines this holds for the length too: nothing waits for bytes that never come."""
    keys = (bytes(range(32)), bytes(32))
    loop = asyncio.get_running_loop()
    original = Cipher(keys[1]).seal(frame(Text("a vote"))[HEADER.size :])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for bit in range(-1, 8 * len(original)):
            outcome: asyncio.Future[object] = loop.create_future()
            altered = bytearray(original)
            if bit >= 0:
                altered[bit // 8] ^= 1 << bit % 8
            with socket.create_connection(listener.getsockname()) as raw:
                ours = listener.accept()[0]
                ours.setblocking(False)
                link = AsyncStream[Text](
                    KeyedSocket(ours, keys), Text, outcome.set_result, outcome.set_result
                )
                raw.sendall(altered)
                said = await asyncio.wait_for(outcome, 15)
                link.close()
            assert said == (
                Text("a vote")
                if bit < 0
                else "sent invalid data (a message that was altered on the way, or is not its own)"
            ), bit


def pair() -> tuple[BlockingStream[Text], BlockingStream[Text], socket.socket]:
    ours, theirs = socket.socketpair()
    return BlockingStream(ours, Text), BlockingStream(theirs, Text), theirs


def test_threads_send_whole_messages_and_the_end_is_noticed() -> None:
    a, b, _ = pair()
    long = "x" * 300_000
    threads = [
        threading.Thread(target=lambda: [a.send(Text(long)) for _ in range(5)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert [b.receive() for _ in range(15)] == [Text(long)] * 15
    for thread in threads:
        thread.join()
    a.close()
    assert b.receive() is None
    b.send(Text("nobody reads this"))
    b.close()


def test_close_wakes_the_thread_that_receives() -> None:
    a, b, _ = pair()
    threading.Timer(0.05, b.close).start()
    assert b.receive() is None
    a.close()


def test_nonsense_ends_a_stream() -> None:
    a, b, raw = pair()
    raw.sendall(HEADER.pack(3) + b"abc")
    assert a.receive() is None
    a.close()
    b.close()


# ---- a peer that is slow, a machine without descriptors, strangers, and errors of ours


class AsyncPair:
    """Two ends of an AsyncStream in this loop."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        for sock in (ours, self.theirs):
            sock.setblocking(False)
        self.lost: list[str] = []
        self.got: list[str] = []
        self.reader: AsyncStream[Text] | None = None
        keys = bytes(32), bytes(32)
        self.writer = AsyncStream[Text](KeyedSocket(ours, keys), Text, print, self.lost.append)

    def read(self) -> None:
        """Begin to read the other end."""
        keys = bytes(32), bytes(32)
        link = KeyedSocket(self.theirs, keys)
        self.reader = AsyncStream[Text](
            link, Text, lambda msg: self.got.append(msg.text), self.lost.append
        )

    async def until_got(self, texts: list[str]) -> None:
        async with asyncio.timeout(15):
            while self.got != texts:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_a_peer_that_reads_late_gets_everything_in_order() -> None:
    pair = AsyncPair()
    texts = [str(number) * 100_000 for number in range(1, 60)]  # beyond any socket's buffer
    for text in texts:
        pair.writer.send(frame(Text(text)))
    await asyncio.sleep(0.05)
    pair.read()
    await pair.until_got(texts)
    pair.writer.send(frame(Text("the last one")))
    await pair.until_got([*texts, "the last one"])
    assert not pair.lost
    pair.writer.close()
    await pair.writer.wait_closed()


async def test_a_stream_that_is_closed_sends_its_backlog_first() -> None:
    pair = AsyncPair()
    texts = ["x" * 1_000_000, "its last words"]
    for text in texts:
        pair.writer.send(frame(Text(text)))
    pair.writer.close()
    pair.read()
    await pair.until_got(texts)
    await asyncio.wait_for(pair.writer.wait_closed(), 15)
    while not pair.lost:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert pair.lost == ["closed its connection"]


async def test_a_peer_that_never_reads_is_lost_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_BACKLOG_BYTES", 2_000_000)
    monkeypatch.setattr(stream, "CLOSE_TIMEOUT_S", 0.01)
    pair = AsyncPair()
    for _ in range(30):
        pair.writer.send(frame(Text("x" * 100_000)))
    assert pair.lost == ["does not read what it is sent"]
    closed = AsyncPair()
    for _ in range(10):
        closed.writer.send(frame(Text("x" * 100_000)))
    closed.writer.close()
    await asyncio.wait_for(closed.writer.wait_closed(), 15)
    pair.theirs.close()
    closed.theirs.close()


async def test_a_message_that_cannot_be_handled_ends_the_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = AsyncPair()

    def fail(msg: Text) -> None:
        raise ZeroDivisionError(msg.text)

    lost: list[str] = []
    AsyncStream[Text](KeyedSocket(pair.theirs, (b"", b"")), Text, fail, lost.append)
    pair.writer.send(frame(Text("a vote")))
    async with asyncio.timeout(15):
        while not lost:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert lost == ["sent a message that could not be handled (ZeroDivisionError('a vote'))"]
    assert "Traceback" in caplog.text
    pair.writer.close()


async def test_without_a_free_descriptor_the_listener_pauses_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream, "_ACCEPT_PAUSE_S", 0.05)
    path = str(tmp_path / "s")
    with closing(StreamListener(path, "token", 1, [Peer(1)])) as listener:
        tries: list[float] = []
        accept = listener._socket.accept

        class Full:
            """The listening socket of a process with too many open files."""

            def __getattr__(self, name: str) -> object:
                return getattr(real, name)

            def fileno(self) -> int:
                return real.fileno()

            def accept(self) -> object:
                tries.append(asyncio.get_running_loop().time())
                if len(tries) < 3:
                    raise OSError(errno.EMFILE, "Too many open files")
                return accept()

        real = listener._socket
        listener._socket = Full()  # type: ignore[assignment]
        link = await asyncio.wait_for(connect(path, "token", 1, Peer(1)), 15)
        assert len(tries) == 3, "a busy loop"
        assert tries[2] - tries[0] >= 0.08
        assert caplog.text.count("Too many open files") == 2
        assert listener.complete.is_set()
    link.sock.close()
    for accepted in listener.accepted.values():
        accepted.sock.close()


async def test_strangers_are_limited_and_keep_no_member_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_NUM_SPARE_HANDSHAKES", 3)
    path = str(tmp_path / "s")
    with closing(StreamListener(path, "token", 1, [Peer(1)])) as listener:
        strangers = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for stranger in strangers:
            stranger.connect(path)
        await asyncio.sleep(0.05)
        assert len(listener._handshakes) <= 4
        link = await asyncio.wait_for(connect(path, "token", 1, Peer(1)), 15)
        assert listener.complete.is_set()
        strangers[0].settimeout(15)
        assert await asyncio.to_thread(strangers[0].recv, 1) == b""  # the oldest was closed
    for sock in (*strangers, link.sock, *(it.sock for it in listener.accepted.values())):
        sock.close()


async def test_an_error_in_a_greeting_closes_the_connection_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "s")
    with closing(StreamListener(path, "token", 1, [Peer(1)])) as listener:
        with monkeypatch.context() as broken:
            broken.setattr(stream, "_keys", lambda *args: 1 / 0)
            with pytest.raises((ConnectionError, ZeroDivisionError)):
                await asyncio.wait_for(connect(path, "token", 1, Peer(1)), 15)
        assert "'greeting of a rank' failed: ZeroDivisionError" in caplog.text
        link = await asyncio.wait_for(connect(path, "token", 1, Peer(1)), 15)
        assert listener.complete.is_set()
    for sock in (link.sock, *(it.sock for it in listener.accepted.values())):
        sock.close()
