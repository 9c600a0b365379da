"""A wire is a connection between actors in two processes: ZeroMQ over `ipc://`, or over `tcp://`
with CURVE keys.

Messages are msgspec structs, encoded as msgpack, and arrive in order. The first frame is a hello
with the protocol version and a token. The listener (ROUTER) accepts one peer with the right token,
and drops and counts all other frames. When the peer is lost, a `PeerGone` is put into the inbox,
after the last message from it.

Nothing polls: ZeroMQ's descriptor wakes the loop (asyncio or uvloop), its monitor reports a closed
connection, and heartbeats over TCP detect a lost machine.
"""

import asyncio
import errno
import logging
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from moeserve.actor.actor import Inbox
from moeserve.actor.handshake import Hello, Keys, Refusal, answer_hello, check_address, secure
from moeserve.actor.tasks import in_thread
from moeserve.errors import ActorStopped, ConfigError, Overloaded
from moeserve.messages import PROTOCOL_VERSION

Out = TypeVar("Out")
In = TypeVar("In")

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 128 * 2**20
MAX_SOCKETS = 16_384  # ZeroMQ's sockets of one process; a wire has three
MAX_QUEUED_FRAMES = 10_000  # in each direction
MAX_FRAMES_PER_TURN = 256  # per turn of the loop, so that a flood does not block the loop
HEARTBEAT_INTERVAL_MS = 1000  # over TCP
HEARTBEAT_TIMEOUT_MS = 5000  # a machine that is silent for this long is lost
NEVER_MS = 2**30  # 12 days; a wire without a peer is closed long before
_GONE_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_EVENTS = _GONE_EVENTS | zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED


class PeerGone(msgspec.Struct, frozen=True):
    """The other end of a wire is lost: it ended, was killed, or has another protocol version."""

    cause: str


# The ZeroMQ context of all wires of a process, with one I/O thread. By process id, because a fork
# needs a new one.
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    context = _contexts.get(os.getpid())
    if context is None:
        context = zmq.Context(io_threads=1)
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        _contexts[os.getpid()] = context
    return context


async def flush_closed(timeout_s: float) -> None:
    """Wait until the messages of closed wires are sent. No wire may be opened after this."""
    context = _contexts.pop(os.getpid(), None)
    if context is not None:
        await asyncio.wait([in_thread("end of wires", context.term)], timeout=timeout_s)


_encode = msgspec.msgpack.Encoder().encode
_decode_greeting = msgspec.msgpack.Decoder(Hello | Refusal).decode


class ZmqWire(Generic[Out, In]):
    """One end of a wire between two processes, created by `listen` or `connect`. Belongs to the
    running loop.

    address: `ipc:///path` in a private folder, or `tcp://host:port` with `keys`. With port *, the
    listener chooses a free port, which its `address` then contains.
    token: the secret of both ends.
    receives: the union of the messages that may arrive.
    inbox: where these messages are put.
    notice: converts a `PeerGone` into a message for the inbox.

    Raises ConfigError if the address cannot be used.
    """

    def __init__(
        self,
        kind: zmq.SocketType,
        address: str,
        *,
        token: str,
        receives: Any,
        inbox: Inbox[In],
        notice: Callable[[PeerGone], Any] = lambda gone: gone,
        keys: Keys | None = None,
    ) -> None:
        check_address(address, keys)
        self.address = address
        self.inbox = inbox
        self.greeted = False  # whether the handshake was completed
        self.num_dropped = 0  # invalid frames, and frames from strangers
        self._kind = kind
        self._notice = notice
        self._hello = Hello(PROTOCOL_VERSION, token)
        self._decode: Callable[[bytes], In] = msgspec.msgpack.Decoder(receives).decode
        self._route: list[bytes] = []  # frames that address the peer: its identity on a ROUTER
        self._peer_fd: int | None = None  # descriptor of the connection to the peer
        self._was_connected = False  # whether there was a connection, perhaps to a stranger
        self._end_cause: str | None = None  # why the wire has ended; None: it has not
        self._loop = asyncio.get_running_loop()
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._open(keys)

    def _open(self, keys: Keys | None) -> None:
        socket = _context().socket(self._kind)
        self._socket = socket
        socket.set_hwm(MAX_QUEUED_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        # Never reconnect: a peer that comes back is another process, which gets another wire. Not
        # with ZeroMQ's own "never" (-1), which drops unread frames of a lost connection.
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        if keys is not None:
            secure(socket, keys, listens=self._kind == zmq.ROUTER)
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._monitor = socket.get_monitor_socket(_EVENTS)
        try:
            if self._kind == zmq.ROUTER:
                socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                socket.bind(self.address)
                if self.address.startswith("ipc://"):
                    os.chmod(self.address.removeprefix("ipc://"), 0o600)
                else:
                    self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            else:
                socket.connect(self.address)
        except (zmq.ZMQError, OSError) as exc:
            self._release()
            raise ConfigError(
                f"cannot use {self.address} for messages between processes: {exc}"
            ) from exc
        self._loop.add_reader(socket.FD, self._read)
        self._loop.add_reader(self._monitor.FD, self._on_monitor)
        if self._kind == zmq.DEALER:
            socket.send(_encode(self._hello), zmq.NOBLOCK)
        # The descriptors are edge-triggered, and there may have been a change already.
        self._loop.call_soon(self._read)
        self._loop.call_soon(self._on_monitor)

    def send(self, msg: Out) -> bool:
        """Send a message without blocking. Return False if there is no peer, yet or any more.

        Raises Overloaded if the peer does not keep up, and ValueError for a message of more than
        MAX_FRAME_BYTES.
        """
        if self._end_cause is not None or (self._kind == zmq.ROUTER and not self.greeted):
            return False
        return self._send(msg)

    def _send(self, msg: Any) -> bool:
        frame = _encode(msg)
        what = type(msg).__name__
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a {what} of {len(frame)} bytes exceeds the wire's {MAX_FRAME_BYTES}")
        try:
            self._socket.send_multipart([*self._route, frame], zmq.NOBLOCK)
        except zmq.Again:
            raise Overloaded(
                f"{self.inbox.owner}: the peer does not read; {what} was not sent"
            ) from None
        except zmq.ZMQError as exc:
            if exc.errno != errno.EHOSTUNREACH:
                raise
            self._read_rest()
            self._lose("the connection was closed by the other process")
            return False
        # Sending may clear the descriptor's event for an incoming frame; see zmq_getsockopt(3),
        # ZMQ_FD.
        if int(self._socket.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._read)
        return True

    def _read(self) -> None:
        """Deliver the messages that have arrived. Called by the loop, so an error ends the wire."""
        try:
            self._read_burst()
        except Exception as error:
            log.exception("%s: messages could not be read", self.inbox.owner)
            self._lose(f"its messages could not be read: {error!r}")

    def _read_burst(self) -> None:
        if self._end_cause is not None:
            return
        for _ in range(MAX_FRAMES_PER_TURN):
            if self.inbox.full:
                self.inbox.when_room(self._read)  # until then, ZeroMQ applies back pressure
                return
            if not self._read_one():
                return
        self._loop.call_soon(self._read)

    def _read_one(self) -> bool:
        """Read one frame, and deliver or drop it. Return False if none has arrived."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        *route, frame = frames
        sender = [part.bytes for part in route]
        if self.greeted and sender != self._route:
            self._drop("a stranger")
            return True
        decode = self._decode if self.greeted else _decode_greeting
        try:
            msg: Any = decode(frame.bytes)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            self._drop(f"{len(frame)} bytes that are no message ({exc})")
            return True
        if not self.greeted:
            self._greet(msg, sender, int(frame.get(zmq.SRCFD)))
        elif not self.inbox.closed:
            self.inbox.put(msg, force=True)  # `_read_burst` has checked the limit
        return True

    def _greet(self, greeting: Hello | Refusal, sender: list[bytes], fd: int) -> None:
        if isinstance(greeting, Refusal):
            if self._kind == zmq.DEALER:
                self._lose(greeting.cause)
            else:
                self._drop("a refusal")
        elif (answer := answer_hello(greeting, self._hello)) is None:
            self._drop("a wrong token")
        else:
            self._route = sender
            self._peer_fd = fd
            self.greeted = isinstance(answer, Hello)
            if self._kind == zmq.ROUTER:
                self._send(answer)
            if isinstance(answer, Refusal):
                self._lose(answer.cause)
            elif not self._connected.done():
                self._connected.set_result(None)

    def _drop(self, what: str) -> None:
        self.num_dropped += 1
        # Log the 1st, 2nd, 4th, 8th, ..., so that a flood of frames does not flood the log.
        if self.num_dropped.bit_count() == 1:
            log.warning("%s: dropped %s (%d so far)", self.inbox.owner, what, self.num_dropped)

    # ---- the end of a wire

    def _on_monitor(self) -> None:
        """Handle events of the connection. Called by the loop, so an error ends the wire."""
        try:
            self._look_at_events()
        except Exception as error:
            log.exception("%s: events could not be read", self.inbox.owner)
            self._lose(f"its events could not be read: {error!r}")

    def _look_at_events(self) -> None:
        if self._end_cause is not None:
            return
        lost_fds: set[int] = set()
        # Take events again after reading: the hello may be among the frames, over a connection that
        # reuses the descriptor of a lost one.
        while self._take_events(lost_fds) and lost_fds:
            self._read_rest()
        if lost_fds and (self._kind == zmq.DEALER or self._peer_fd in lost_fds):
            self._lose(self._why_closed())

    def _take_events(self, lost_fds: set[int]) -> bool:
        """Add the descriptors of lost connections to `lost_fds`. Return whether there were any
        events.
        """
        has_events = False
        with suppress(zmq.Again):
            while True:
                event, fd = struct.unpack("=Hi", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
                has_events = True
                self._was_connected |= bool(event & zmq.EVENT_CONNECTED)
                if event & _GONE_EVENTS:
                    lost_fds.add(fd)
                else:
                    lost_fds.discard(fd)  # a new connection has the same descriptor
        return has_events

    def _why_closed(self) -> str:
        if self.greeted or self.address.startswith("ipc://"):
            return "the connection was closed by the other process"
        if not self._was_connected:
            return f"nobody listens at {self.address}"
        return (
            f"{self.address} closed the connection before it answered: is the cluster key there"
            " the same?"
        )

    def _read_rest(self) -> None:
        """Deliver the messages that arrived before the end, beyond the inbox's limit if need be.

        The notice must come after these messages.
        """
        while self._end_cause is None and self._read_one():
            pass

    def _lose(self, cause: str) -> None:
        """End the wire, and put the notice into the inbox."""
        if self._end(cause) and not self.inbox.closed:
            self.inbox.put(self._notice(PeerGone(cause)), force=True)

    def _end(self, cause: str) -> bool:
        """Stop reading and writing. Return False if the wire had ended before."""
        if self._end_cause is not None:
            return False
        self._end_cause = cause
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        if not self._connected.done():
            self._connected.set_exception(ActorStopped(f"{self.inbox.owner}: {cause}"))
            self._connected.exception()  # so that asyncio does not warn if nobody awaits it
        return True

    async def connected(self, timeout_s: float | None) -> None:
        """Wait for the handshake. Raises ActorStopped if the wire ends, or TimeoutError.

        timeout_s: None: no time limit.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._connected)
        except TimeoutError:
            raise TimeoutError(
                f"{self.inbox.owner}: no peer has connected within {timeout_s:g} s"
            ) from None

    def close(self, linger_s: float = 0.0) -> None:
        """Close the wire without waiting. Idempotent.

        Earlier messages are still sent for up to `linger_s`, if the process lives that long (see
        `flush_closed`). The peer then receives them before its `PeerGone`, unless MAX_QUEUED_FRAMES
        of them were unread there, or the network loses packets at that moment. If a message must
        not be lost, let the peer close first.
        """
        if self._socket.closed:
            return
        had_peer = self._end("closed")
        self._release(linger_s if had_peer else 0.0)

    def _release(self, linger_s: float = 0.0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(int(linger_s * 1000))
        if self._kind == zmq.ROUTER and self.address.startswith("ipc://"):
            with suppress(OSError):
                os.unlink(self.address.removeprefix("ipc://"))


# `listen` waits at an address for one peer with the token. `connect` creates the other end, which
# may send at once.
listen: Callable[..., ZmqWire[Any, Any]] = partial(ZmqWire, zmq.ROUTER)
connect: Callable[..., ZmqWire[Any, Any]] = partial(ZmqWire, zmq.DEALER)
