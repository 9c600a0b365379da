"""Authenticated streams of messages between two processes of a group.

Both sides prove that they know the group's token:

    connector                  listener
    hello with a nonce    ->
                          <-   a nonce, proof of the token over both
    proof of the token    ->
                          <-   accepted

The hello contains the group's epoch and the sender's `Peer`. Messages are msgspec structs in
msgpack, each preceded by its length.

`connect` and `StreamListener` run on an event loop. The resulting sockets are used on an event loop
(`AsyncStream`), by threads (`BlockingStream`), or directly (shm.py). An `AsyncStream` over TCP is
encrypted (cipher.py), with keys that are derived from the token and both nonces.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from moeserve.actor.tasks import log_error, spawn

if TYPE_CHECKING:
    from moeserve.comm.cipher import Cipher

In = TypeVar("In")
Address = str | tuple[str, int]  # the path of a Unix socket, or host and port

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 128 << 20
HEADER = struct.Struct("<I")  # the length of the message that follows
_HELLO = struct.Struct("<8sQII16s")  # magic, epoch, number and channel of the peer, nonce
_MAGIC = b"moerank1"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_ACCEPTED = b"\x01"
_RETRY_INTERVAL_S = 0.005  # of `connect`
_HANDSHAKE_TIMEOUT_S = 5.0
_NUM_SPARE_HANDSHAKES = 64  # handshakes at the same time beyond one per expected peer
_ACCEPT_PAUSE_S = 0.5  # after an error such as too many open files
MAX_BACKLOG_BYTES = 128 << 20  # a peer that leaves more bytes of a stream unread counts as lost
CLOSE_TIMEOUT_S = 2.0  # how long a closed stream may still send its backlog
_READ_BYTES = 1 << 16
_encode = msgspec.msgpack.Encoder().encode


class Peer(NamedTuple):
    """The connecting end of a stream."""

    number: int  # of the rank; in the step vote, of the engine
    channel: int = 0  # different for each stream from this peer to the same listener


class KeyedSocket(NamedTuple):
    """A connection to another rank, after the handshake."""

    sock: socket.socket  # non-blocking
    keys: tuple[bytes, bytes]  # encryption keys of this end and of the other end


class StreamListener:
    """Accepts one connection of each expected peer on the running loop, until `close`.

    Each handshake runs in its own task, so that a slow stranger delays no peer. If there are too
    many handshakes at a time, the oldest is cancelled. `complete` is set when all peers are in
    `accepted`. Raises OSError if the address cannot be used.
    """

    def __init__(self, address: Address, token: str, epoch: int, expected: Iterable[Peer]) -> None:
        self.accepted: dict[Peer, KeyedSocket] = {}
        self.missing_peers = set(expected)
        self.complete = asyncio.Event()
        self._token = token
        self._epoch = epoch
        self._handshakes: dict[asyncio.Task[bool], None] = {}  # oldest first
        self._max_handshakes = len(self.missing_peers) + _NUM_SPARE_HANDSHAKES
        self._resume_timer: asyncio.TimerHandle | None = None  # runs after an error of `accept`
        self._loop = asyncio.get_running_loop()
        self._path = address if isinstance(address, str) else None
        self._socket = socket.socket(_family(address))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(address)
            if self._path is not None:
                os.chmod(self._path, 0o600)
            self._socket.listen(1024)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._begin_accepting()
        self._check_complete()

    def _begin_accepting(self) -> None:
        self._resume_timer = None
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Stop listening. Accepted connections stay open."""
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if self._path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        for task in self._handshakes:
            task.cancel()

    def _check_complete(self) -> None:
        if not self.missing_peers:
            self.complete.set()

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the connection is closed already
            return
        except OSError as error:
            # The connection stays in the queue, so an immediate retry would fail again.
            log.warning("cannot accept a connection to this rank: %s", error)
            self._loop.remove_reader(self._socket)
            self._resume_timer = self._loop.call_later(_ACCEPT_PAUSE_S, self._begin_accepting)
            return
        sock.setblocking(False)
        if len(self._handshakes) >= self._max_handshakes:
            oldest = next(iter(self._handshakes))
            oldest.cancel()
            del self._handshakes[oldest]
        task = spawn(self._admit(sock), name="greeting of a rank", on_error=log_error)
        self._handshakes[task] = None
        task.add_done_callback(partial(self._on_handshake_done, sock))

    def _on_handshake_done(self, sock: socket.socket, task: asyncio.Task[bool]) -> None:
        self._handshakes.pop(task, None)
        was_accepted = not task.cancelled() and task.exception() is None and task.result()
        if not was_accepted:
            sock.close()

    async def _admit(self, sock: socket.socket) -> bool:
        """Add an expected peer to `accepted`. Return whether it was one."""
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                peer, keys = await self._run_handshake(sock)
            if peer not in self.missing_peers:
                raise ValueError(
                    f"rank {peer.number} (channel {peer.channel}) is connected already or does not"
                    " exist"
                )
            sock.send(_ACCEPTED)
        except TimeoutError:
            log.warning(
                "a connection to this rank was closed: it did not introduce itself in %g s",
                _HANDSHAKE_TIMEOUT_S,
            )
        except ValueError as error:
            log.warning("a connection to this rank was closed: %s", error)
        except (OSError, EOFError) as error:
            log.info("a connection to this rank broke before it was accepted: %s", error)
        else:
            self.missing_peers.remove(peer)
            self.accepted[peer] = KeyedSocket(sock, keys)
            self._check_complete()
            return True
        return False

    async def _run_handshake(self, sock: socket.socket) -> tuple[Peer, tuple[bytes, bytes]]:
        """Run the handshake, and return the peer and the keys. Raises ValueError for a stranger."""
        hello = await _receive(sock, _HELLO.size)
        magic, epoch, number, channel, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise ValueError("it speaks another protocol")
        if epoch != self._epoch:
            raise ValueError(f"it is of epoch {epoch}, not {self._epoch}")
        nonce = os.urandom(_NONCE_BYTES)
        await self._loop.sock_sendall(sock, nonce + _proof(self._token, b"listener", hello, nonce))
        proof = await _receive(sock, _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(self._token, b"connector", hello, nonce)):
            raise ValueError("it does not know the token")
        _set_options(sock)
        connector_key, listener_key = _keys(self._token, hello, nonce)
        own_and_peer_keys = (listener_key, connector_key)
        return Peer(number, channel), own_and_peer_keys


async def connect(address: Address, token: str, epoch: int, me: Peer) -> KeyedSocket:
    """Connect to the listener at `address`, and wait until it accepts this rank.

    Retries until something listens there, so the caller must set a deadline. Raises ConnectionError
    if the listener is not a member of the group, or rejects this rank.
    """
    loop = asyncio.get_running_loop()
    while True:
        with ExitStack() as stack:
            sock = stack.enter_context(socket.socket(_family(address)))
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, address)
            except OSError:  # nothing listens there yet, or the network is down
                sock.close()
                await asyncio.sleep(_RETRY_INTERVAL_S)
                continue
            try:
                keys = await _introduce(sock, token, epoch, me)
            except (OSError, EOFError) as error:
                reason = f"connection refused in epoch {epoch} ({error}): another token or epoch?"
                raise ConnectionError(reason) from None
            stack.pop_all()
            return KeyedSocket(sock, keys)


async def _introduce(sock: socket.socket, token: str, epoch: int, me: Peer) -> tuple[bytes, bytes]:
    loop = asyncio.get_running_loop()
    hello = _HELLO.pack(_MAGIC, epoch, *me, os.urandom(_NONCE_BYTES))
    await loop.sock_sendall(sock, hello)
    answer = await _receive(sock, _NONCE_BYTES + _PROOF_BYTES)
    nonce = answer[:_NONCE_BYTES]
    proof = answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"listener", hello, nonce)):
        raise ConnectionError("the listener does not know this group's token")
    await loop.sock_sendall(sock, _proof(token, b"connector", hello, nonce))
    await _receive(sock, len(_ACCEPTED))
    _set_options(sock)
    return _keys(token, hello, nonce)


def to_address(text: str) -> Address:
    """Parse "host:port", "[host]:port", or the path of a Unix socket."""
    if "/" in text:
        return text
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _family(address: Address) -> socket.AddressFamily:
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _proof(token: str, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), side + hello + nonce, hashlib.sha256)


def _keys(token: str, hello: bytes, nonce: bytes) -> tuple[bytes, bytes]:
    """Return the connector's and the listener's encryption keys for this connection."""
    connector_key = _proof(token, b"from connector", hello, nonce)
    listener_key = _proof(token, b"from listener", hello, nonce)
    return connector_key, listener_key


def _set_options(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)


async def _receive(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        more = await loop.sock_recv(sock, count - len(data))
        if not more:
            raise EOFError("the other end closed it")
        data += more
    return data


def frame(msg: msgspec.Struct) -> bytes:
    """Encode a message with its header. Raises ValueError if it is too long."""
    body = _encode(msg)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a {type(msg).__name__} of {len(body)} bytes; the longest message has"
            f" {MAX_FRAME_BYTES}"
        )
    return HEADER.pack(len(body)) + body


class FrameSplitter(Generic[In]):
    """Splits received bytes into messages.

    receives: the union of message types.
    max_bytes: the limit of a message.
    cipher: decrypts the messages; None if they are not encrypted.
    """

    def __init__(
        self, receives: Any, max_bytes: int = MAX_FRAME_BYTES, cipher: Cipher | None = None
    ) -> None:
        self._buffer = bytearray()
        self._cipher = cipher
        self._header_bytes = HEADER.size if cipher is None else cipher.header_bytes
        self._num_bytes: int | None = None  # the next message's length, after its header
        self._max_bytes = max_bytes
        self._decode: Callable[[bytes], In] = msgspec.msgpack.Decoder(receives).decode

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def take(self) -> In | None:
        """Remove the first message and return it; None if it is not complete yet.

        Raises ValueError for invalid data.
        """
        buffer = self._buffer
        begin = self._header_bytes
        num_bytes = self._num_bytes
        if num_bytes is None:
            if len(buffer) < begin:
                return None
            if self._cipher is None:
                (num_bytes,) = HEADER.unpack_from(buffer)
            else:
                num_bytes = self._cipher.length(buffer)
            if num_bytes > self._max_bytes:
                raise ValueError(
                    f"a message of {num_bytes} bytes; the longest has {self._max_bytes}"
                )
            self._num_bytes = num_bytes
        end = begin + num_bytes
        if len(buffer) < end:
            return None
        body = bytes(buffer[begin:end])
        del buffer[:end]
        self._num_bytes = None
        if self._cipher is not None:
            body = self._cipher.open(body)
        try:
            return self._decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"{num_bytes} bytes that are no message: {error}") from None


class AsyncStream(Generic[In]):
    """A stream on the running event loop. Over TCP, it is encrypted.

    receives: the union of message types.
    on_message: called with each received message. If it raises ValueError, the peer has sent
        invalid data and counts as lost.
    on_lost: called with the cause when the peer is lost and the stream is closed.
    """

    def __init__(
        self,
        link: KeyedSocket,
        receives: Any,
        on_message: Callable[[In], None],
        on_lost: Callable[[str], None],
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._sock = link.sock
        self._cipher: Cipher | None = None
        peer_cipher: Cipher | None = None
        if self._sock.family != socket.AF_UNIX:
            # Imported here, because it takes 40 ms and a single machine does not need it.
            from moeserve.comm.cipher import Cipher

            own_key, peer_key = link.keys
            self._cipher = Cipher(own_key)
            peer_cipher = Cipher(peer_key)
        self._frames: FrameSplitter[In] = FrameSplitter(receives, max_bytes, peer_cipher)
        self._on_message = on_message
        self._on_lost = on_lost
        self._is_open = True
        self._backlog: deque[bytes] = deque()  # frames that the socket has not accepted yet
        self._backlog_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()
        self._loop.add_reader(self._sock, self._read)

    def send(self, data: bytes) -> None:
        """Send a frame without waiting. data: from `frame`.

        Up to MAX_BACKLOG_BYTES are queued for a slow peer. A peer that never reads is detected by
        the deadlines of the callers.
        """
        if not self._is_open:
            return
        if self._cipher is not None:  # an encrypted message has another header
            data = self._cipher.seal(data[HEADER.size :])
        if not self._backlog:
            num_sent = self._send_some(data)
            if num_sent < 0 or num_sent == len(data):
                return
            data = data[num_sent:]
            self._loop.add_writer(self._sock, self._write)
        self._backlog.append(data)
        self._backlog_bytes += len(data)
        if self._backlog_bytes > MAX_BACKLOG_BYTES:
            self._break("does not read what it is sent")

    def _send_some(self, data: bytes) -> int:
        """Send as much as the socket accepts. Return the number of bytes, or -1 if the peer is
        lost.
        """
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            if self._is_open:
                self._read()  # the peer's last message, if any, has the cause
            if self._is_open:
                self._break("closed its connection")
            return -1

    def _write(self) -> None:
        """Send as much of the backlog as the socket accepts."""
        while self._backlog:
            data = self._backlog[0]
            num_sent = self._send_some(data)
            if num_sent < 0:
                # `_break` has closed the socket, unless `close` was called before.
                if not self._closed.is_set():
                    self._close_socket()
                return
            self._backlog_bytes -= num_sent
            if num_sent < len(data):
                self._backlog[0] = data[num_sent:]
                return
            self._backlog.popleft()
        self._loop.remove_writer(self._sock)
        if not self._is_open:
            self._close_socket()

    def close(self) -> None:
        """Close the stream. Queued frames are still sent, for up to CLOSE_TIMEOUT_S."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._sock)
        if self._backlog:
            self._loop.call_later(CLOSE_TIMEOUT_S, self._close_socket)
        else:
            self._close_socket()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed. Call `close` first."""
        await self._closed.wait()

    def _close_socket(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        if self._backlog:
            self._backlog.clear()
            self._loop.remove_writer(self._sock)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            # Read the rest. With unread bytes, `close` would send a reset, and the peer could lose
            # the last messages.
            while self._sock.recv(_READ_BYTES):
                pass
        self._sock.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(f"lost its connection ({error.strerror})")
            return
        if not data:
            self._break("closed its connection")
            return
        self._frames.feed(data)
        try:
            while self._is_open and (msg := self._frames.take()) is not None:
                self._on_message(msg)
        except ValueError as error:
            self._break(f"sent invalid data ({error})")
        except Exception as error:
            log.exception("a message of another rank could not be handled")
            self._break(f"sent a message that could not be handled ({error!r})")

    def _break(self, cause: str) -> None:
        """Close the stream, because the peer is lost."""
        self._is_open = False
        self._loop.remove_reader(self._sock)
        self._close_socket()
        self._on_lost(cause)


class BlockingStream(Generic[In]):
    """A stream for threads: any thread may send, and one thread receives."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._frames: FrameSplitter[In] = FrameSplitter(receives)
        self._lock = threading.Lock()

    def send(self, msg: msgspec.Struct) -> None:
        """Send a message. Blocks while the peer does not read.

        If the peer is gone, this does nothing; `receive` reports it.
        """
        with self._lock, suppress(OSError):
            self._sock.sendall(frame(msg))

    def receive(self) -> In | None:
        """Wait for the next message. Return None if the stream has ended or data are invalid."""
        try:
            while (msg := self._frames.take()) is None:
                data = self._sock.recv(_READ_BYTES)
                if not data:
                    return None
                self._frames.feed(data)
            return msg
        except OSError:
            return None
        except ValueError as error:
            log.error("the other end of a stream between ranks sent invalid data: %s", error)
            return None

    def close(self) -> None:
        """Close the stream, and wake the thread that receives."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
