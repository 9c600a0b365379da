"""A star of sockets between the engines of a group: engine 0 is the centre, each other one has a link to it.

On one host Unix sockets in the members' directory, otherwise TCP at the address that the members were told.
Both ends prove that they know the members' token before anything else is read. All of it lives on the caller's event
loop: a vote is a send and a wake-up, without a thread in between.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from moeserve.comm.frames import Frame, take_frame
from moeserve.comm.members import Members
from moeserve.errors import ConfigError, PeerLost

log = logging.getLogger(__name__)

_HELLO = struct.Struct("<8sQI16s")  # magic, epoch, engine, nonce
_MAGIC = b"moevote1"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_WELCOME = b"\x01"
_RETRY_S = 0.01
_READ_BYTES = 1 << 16
_GREET_S = 5.0  # for a stranger that connects and says nothing


class Link:
    """One connection. `heard(frame)` and `lost(cause)` are called on the loop; after `lost` it is closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._watched = False
        self._buffer = bytearray()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._heard: Callable[[Frame], None]
        self._lost: Callable[[str], None]

    def open(self, heard: Callable[[Frame], None], lost: Callable[[str], None]) -> None:
        self._heard, self._lost, self._watched = heard, lost, True
        self._loop.add_reader(self._sock, self._read)

    def send(self, data: bytes) -> None:
        """Never waits: the peer reads each frame before it causes another one, so that the socket has room."""
        if not self._open:
            return
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._read()  # its last words, if there are any, say more than our error
            if self._open:
                self._break("closed its connection")
            return
        if sent < len(data):
            self._break("does not read what it is sent")

    def close(self) -> None:
        """What was sent still arrives, though the peer may have sent something that nobody reads any more."""
        if not self._open:
            return
        self._open = False
        if self._watched:
            self._loop.remove_reader(self._sock)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            while self._sock.recv(_READ_BYTES):  # unread bytes would turn the close into a reset
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
        self._buffer += data
        try:
            while self._open and (got := take_frame(self._buffer)) is not None:
                self._heard(got)
        except ValueError as error:
            self._break(f"sent nonsense ({error})")

    def _break(self, cause: str) -> None:
        self.close()
        self._lost(cause)


async def gather(members: Members) -> dict[int, Link]:
    """The centre's side: a link to each other engine. Raises PeerLost naming those who did not come in time."""
    door = _Door(members)
    try:
        door.open()
        async with asyncio.timeout(members.deadline_s):
            await door.complete.wait()
        return door.links
    except BaseException as error:
        for link in door.links.values():
            link.close()
        if not isinstance(error, TimeoutError):
            raise
        missing = [engine for engine in range(1, members.size // members.tp_size) if engine not in door.links]
        cause = f"{engines(missing)} did not come to the vote of epoch {members.epoch} within {members.deadline_s:g} s"
        raise PeerLost(cause, ranks_of(members, missing)) from None
    finally:
        door.close()


async def reach(members: Members) -> Link:
    """A leaf's side: its link to the centre. Raises PeerLost when that is not there in time."""
    try:
        async with asyncio.timeout(members.deadline_s):
            while True:
                sock = await _connect(members)
                if sock is not None:
                    return await _introduce(sock, members)
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        cause = f"{engines([0])} did not open the vote of epoch {members.epoch} within {members.deadline_s:g} s"
        raise PeerLost(cause, ranks_of(members, [0])) from None


def engines(numbers: list[int]) -> str:
    """[1] -> "engine 1", [1, 3] -> "engines 1, 3" """
    return f"engine{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def ranks_of(members: Members, engines: list[int]) -> tuple[int, ...]:
    return tuple(rank for rank in range(members.size) if rank // members.tp_size in engines)


def _path(members: Members) -> Path:
    return Path(members.directory, "vote.sock")


def _place(members: Members) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Where the centre listens, and the kind of address that is."""
    if members.one_host:
        return socket.AF_UNIX, str(_path(members))
    host, _, port = members.vote.rpartition(":")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host.strip("[]"), int(port))


class _Door:
    """Where the others come in, each greeted by itself: a stranger that says nothing holds nobody up."""

    def __init__(self, members: Members) -> None:
        self.links: dict[int, Link] = {}
        self._members = members
        self._loop = asyncio.get_running_loop()
        self._listener = _listen(members)
        self._greetings: set[asyncio.Task[None]] = set()
        self.complete = asyncio.Event()

    def open(self) -> None:
        self._loop.add_reader(self._listener, self._let_in)

    def close(self) -> None:
        """Nobody comes in any more; whoever is not greeted yet is turned away."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._members.one_host:
            _path(self._members).unlink(missing_ok=True)
        for task in self._greetings:
            task.cancel()

    def _let_in(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # it is gone already
            return
        sock.setblocking(False)
        self._greetings.add(task := self._loop.create_task(self._greet(sock)))
        task.add_done_callback(self._greetings.discard)
        task.add_done_callback(lambda task: sock.close() if task.cancelled() else None)  # even before its first step

    async def _greet(self, sock: socket.socket) -> None:
        engine = await _admit(sock, self._members, self.links)
        if engine is not None:
            self.links[engine] = Link(sock)
            if len(self.links) == self._members.size // self._members.tp_size - 1:
                self.complete.set()


def _listen(members: Members) -> socket.socket:
    family, place = _place(members)
    listener = socket.socket(family)
    try:
        listener.bind(place)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        cause = f"the step vote cannot listen at {place}: {error}"
        # A port may have been taken since it was chosen; the next epoch has another one.
        raise (ConfigError(cause) if members.one_host else PeerLost(cause)) from None
    listener.setblocking(False)
    return listener


async def _connect(members: Members) -> socket.socket | None:
    """A connected socket; None when nobody can be reached there yet."""
    loop = asyncio.get_running_loop()
    family, target = _place(members)
    sock = socket.socket(family)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, target)
    except OSError:  # nobody listens, or a network is not up: the deadline is for that
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


async def _introduce(sock: socket.socket, members: Members) -> Link:
    """Says who we are, and checks that the centre is whom we look for."""
    loop = asyncio.get_running_loop()
    try:
        hello = _HELLO.pack(_MAGIC, members.epoch, members.dp_rank, secrets.token_bytes(_NONCE_BYTES))
        await loop.sock_sendall(sock, hello)
        theirs = await _exactly(sock, _NONCE_BYTES + _PROOF_BYTES)
        nonce, proof = theirs[:_NONCE_BYTES], theirs[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(members, b"centre", hello, nonce)):
            raise PeerLost(f"{engines([0])} does not know this group's token", ranks_of(members, [0]))
        await loop.sock_sendall(sock, _proof(members, b"leaf", hello, nonce))
        await _exactly(sock, len(_WELCOME))
        _tune(sock)
        return Link(sock)
    except (OSError, EOFError):
        sock.close()
        cause = f"{engines([0])} turned us away from epoch {members.epoch}: another token or epoch, or it is gone"
        raise PeerLost(cause, ranks_of(members, [0])) from None
    except BaseException:
        sock.close()
        raise


async def _admit(sock: socket.socket, members: Members, links: dict[int, Link]) -> int | None:
    """The engine behind a connection; None, and closed, when it is none that we wait for."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_GREET_S):
            hello = await _exactly(sock, _HELLO.size)
            magic, epoch, engine, _ = _HELLO.unpack(hello)
            if magic != _MAGIC or epoch != members.epoch:
                raise ValueError(f"it is of epoch {epoch}, not {members.epoch}" if magic == _MAGIC else "not ours")
            nonce = os.urandom(_NONCE_BYTES)
            await loop.sock_sendall(sock, nonce + _proof(members, b"centre", hello, nonce))
            if not hmac.compare_digest(await _exactly(sock, _PROOF_BYTES), _proof(members, b"leaf", hello, nonce)):
                raise ValueError("it does not know the token")
            if not 0 < engine < members.size // members.tp_size or engine in links:
                raise ValueError(f"it says that it is engine {engine}, which is here already or does not exist")
            _tune(sock)
            sock.send(_WELCOME)
            return int(engine)
    except TimeoutError:
        log.warning("the step vote turned a connection away: it said nothing")
    except ValueError as error:
        log.warning("the step vote turned a connection away: %s", error)
    except (OSError, EOFError) as error:  # it gave up, as one does that got a newer Join
        log.info("a connection to the step vote broke before it was admitted: %s", error)
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


def _proof(members: Members, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(members.token.encode(), side + hello + nonce, hashlib.sha256)


def _tune(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)


async def _exactly(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        more = await loop.sock_recv(sock, count - len(data))
        if not more:
            raise EOFError("it closed the connection")
        data += more
    return data
