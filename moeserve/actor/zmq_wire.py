"""A wire carries messages between two actors in different processes: ZeroMQ over `ipc://`, or
`tcp://` with CURVE keys.

Messages are msgspec structs in msgpack; the first frame is a hello with the protocol version and a
token. The listener (ROUTER) accepts one peer, the one that knows the token, and drops and counts
everything else. Order is kept. The loss of the peer puts a `PeerGone` into the inbox, behind the
last message that arrived from it.

Nothing polls: ZeroMQ's descriptor wakes the loop (asyncio or uvloop), its monitor reports a closed
connection, and heartbeats over TCP report a machine that vanished.
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
MAX_SOCKETS = 16_384  # of one process; a wire has three
MAX_WAITING = 10_000  # frames on their way in each direction
READ_BURST = 256  # frames per turn of the loop, so that a flood cannot starve everything else
# over TCP: a machine that is silent for so long is gone
HEARTBEAT_MS = 1000
VANISHED_MS = 5000
NEVER_MS = 2**30  # 12 days: a wire that has lost its peer is closed long before
_GONE_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_EVENTS = _GONE_EVENTS | zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED


class PeerGone(msgspec.Struct, frozen=True):
    """Notice that the other end of a wire is lost: it ended, was killed, or speaks another protocol
    version.
    """

    cause: str


# The context of all wires of a process, with one I/O thread, by process id: a fork has its own.
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    context = _contexts.get(os.getpid())
    if context is None:
        context = zmq.Context(io_threads=1)
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        _contexts[os.getpid()] = context
    return context


async def flush_closed(limit_s: float) -> None:
    """Wait until the messages of closed wires have left. The process opens no wires afterwards."""
    context = _contexts.pop(os.getpid(), None)
    if context is not None:
        await asyncio.wait([in_thread("end of wires", context.term)], timeout=limit_s)


_encode = msgspec.msgpack.Encoder().encode
_decode_greeting = msgspec.msgpack.Decoder(Hello | Refusal).decode


class ZmqWire(Generic[Out, In]):
    """One end of a wire between exactly two processes, made by `listen` or `connect`. Belongs to
    the running loop.

    address: `ipc:///path`, in a directory that only we can enter, or `tcp://host:port` with `keys`
    (port *: any free one; the listener's `address` then has its number). token: the secret that
    both ends know. receives: the union of messages that may come. inbox: where they go. notice:
    makes the inbox's message from a `PeerGone`. Raises ConfigError if the address cannot be used.
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
        self.greeted = False  # both ends know each other, or did
        self.num_dropped = 0  # frames that were no message, or came from a stranger
        self._kind = kind
        self._notice = notice
        self._hello = Hello(PROTOCOL_VERSION, token)
        self._decode: Callable[[bytes], In] = msgspec.msgpack.Decoder(receives).decode
        self._route: list[bytes] = []  # how ZeroMQ addresses the peer: its identity on a ROUTER
        self._peer_fd: int | None = None
        self._met = False  # there was a connection, perhaps to a stranger
        self._gone: str | None = None  # why there is no peer any more
        self._loop = asyncio.get_running_loop()
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._open(keys)

    def _open(self, keys: Keys | None) -> None:
        self._socket = socket = _context().socket(self._kind)
        socket.set_hwm(MAX_WAITING)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        # A peer that comes back is another process; it gets another wire. Not ZeroMQ's own "never"
        # (-1): with a lost connection that drops what came over it and was not read yet.
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        if keys is not None:
            secure(socket, keys, listens=self._kind == zmq.ROUTER)
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, VANISHED_MS)
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
        # The descriptors report changes only, and there may have been one already.
        self._loop.call_soon(self._read)
        self._loop.call_soon(self._on_monitor)

    def send(self, msg: Out) -> bool:
        """Send in order, without blocking. Return False if there is no peer yet, or no more:
        `PeerGone` says why.

        Raises Overloaded when the peer does not keep up, ValueError for a message beyond
        MAX_FRAME_BYTES.
        """
        if self._gone is not None or (self._kind == zmq.ROUTER and not self.greeted):
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
        # Sending may swallow the descriptor's news of an incoming frame; see zmq_getsockopt(3),
        # ZMQ_FD.
        if int(self._socket.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._read)
        return True

    def _read(self) -> None:
        """Deliver the messages that are here. Called by the loop: an error is the wire's end."""
        try:
            self._read_burst()
        except Exception as error:
            log.exception("%s: messages could not be read", self.inbox.owner)
            self._lose(f"its messages could not be read: {error!r}")

    def _read_burst(self) -> None:
        if self._gone is not None:
            return
        for _ in range(READ_BURST):
            if self.inbox.full:
                self.inbox.when_room(self._read)  # meanwhile ZeroMQ holds the peer back
                return
            if not self._read_one():
                return
        self._loop.call_soon(self._read)

    def _read_one(self) -> bool:
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
            self.inbox.put(msg, force=True)  # `_read` has looked at the limit
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
        if (
            self.num_dropped.bit_count() == 1
        ):  # 1, 2, 4, 8, ...: a flood of frames is no flood of log lines
            log.warning("%s: dropped %s (%d so far)", self.inbox.owner, what, self.num_dropped)

    # How a wire ends

    def _on_monitor(self) -> None:
        """Act on events of the connection. Called by the loop: an error is the wire's end."""
        try:
            self._look_at_events()
        except Exception as error:
            log.exception("%s: events could not be read", self.inbox.owner)
            self._lose(f"its events could not be read: {error!r}")

    def _look_at_events(self) -> None:
        if self._gone is not None:
            return
        gone: set[int] = set()
        # Again behind what was read: the hello may be among it, over a connection that took the
        # number of a lost one.
        while self._take_events(gone) and gone:
            self._read_rest()
        if gone and (self._kind == zmq.DEALER or self._peer_fd in gone):
            self._lose(self._why_closed())

    def _take_events(self, gone: set[int]) -> bool:
        """Add to `gone` the connections that the monitor reports as lost. Return False without
        news.
        """
        told = False
        with suppress(zmq.Again):
            while True:
                event, fd = struct.unpack("=Hi", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
                told = True
                self._met |= bool(event & zmq.EVENT_CONNECTED)
                if event & _GONE_EVENTS:
                    gone.add(fd)
                else:
                    gone.discard(fd)  # the number was given to a new connection
        return told

    def _why_closed(self) -> str:
        if self.greeted or self.address.startswith("ipc://"):
            return "the connection was closed by the other process"
        if not self._met:
            return f"nobody listens at {self.address}"
        return (
            f"{self.address} closed the connection before it answered: is the cluster key there"
            " the same?"
        )

    def _read_rest(self) -> None:
        """Delivers what arrived before the end, whatever the inbox's limit: the notice comes behind
        it.
        """
        while self._gone is None and self._read_one():
            pass

    def _lose(self, cause: str) -> None:
        if self._end(cause) and not self.inbox.closed:
            self.inbox.put(self._notice(PeerGone(cause)), force=True)

    def _end(self, cause: str) -> bool:
        """Stop reading and writing. Return False if the wire had ended before."""
        if self._gone is not None:
            return False
        self._gone = cause
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        if not self._connected.done():
            self._connected.set_exception(ActorStopped(f"{self.inbox.owner}: {cause}"))
            self._connected.exception()  # nobody has to await it
        return True

    async def connected(self, deadline_s: float | None) -> None:
        """Return when both ends know each other. Raises ActorStopped with the cause, or
        TimeoutError. None: waits for as long as it takes."""
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self._connected)
        except TimeoutError:
            raise TimeoutError(
                f"{self.inbox.owner}: nobody has connected within {deadline_s:g} s"
            ) from None

    def close(self, linger_s: float = 0.0) -> None:
        """Close the wire without waiting; safe to repeat.

        Messages that were sent before still leave if that takes at most `linger_s`, and the process
        lives so long (see `flush_closed`). The peer then has them before its notice, except where
        as many messages as the wire's limit were unread there, or the network loses packets at that
        moment. A message that must not be lost needs a peer that closes first.
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


# `listen` waits at an address for the one peer with the token, `connect` makes the other end, which
# may send at once.
listen: Callable[..., ZmqWire[Any, Any]] = partial(ZmqWire, zmq.ROUTER)
connect: Callable[..., ZmqWire[Any, Any]] = partial(ZmqWire, zmq.DEALER)
