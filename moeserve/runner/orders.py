"""What the leader of an engine (its tensor-parallel rank 0) and its other ranks tell each other, over a Unix socket.

leader --Order-->  worker     Build, Allocate, Run, Meet, Part, Prepare
worker --Report--> leader     Hello, OrderDone (one per order), Progress, Far, Failed
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from moeserve.comm.world import World
from moeserve.config import Config, Limits
from moeserve.messages import Join, PlacementTable, TraceEvent

In = TypeVar("In")

_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class Build(msgspec.Struct, frozen=True, tag=True):
    """Load your part of the model. OrderDone.value: bytes that are left for KV blocks."""

    config: Config
    world: World
    placement: PlacementTable | None


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Take what these limits need, and warm up."""

    limits: Limits


class Run(msgspec.Struct, frozen=True, tag=True):
    """Execute a plan (see engine/plan_codec.py). OrderDone.value: a checksum of the tokens."""

    plan: bytes


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Join the group."""

    join: Join


class Part(msgspec.Struct, frozen=True, tag=True):
    """Leave the group, whatever waits for it. OrderDone once no step runs any more."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Prepare a placement in the background."""

    placement: PlacementTable


class Order(msgspec.Struct, frozen=True, array_like=True):
    """seq: its OrderDone carries the same."""

    seq: int
    what: Build | Allocate | Run | Meet | Part | Prepare


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker's first word. Without the right token its sender is a stranger."""

    token: str
    tp_rank: int


class OrderDone(msgspec.Struct, frozen=True, tag=True):
    """The end of an order; with `lost` it failed because of another rank, and may come again after the next Meet.

    placed: how far the pending placement is prepared.
    """

    seq: int
    value: int = 0
    placed: int = 0
    events: tuple[TraceEvent, ...] = ()
    lost: str = ""
    missing: tuple[int, ...] = ()


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Of the start: a human's word for the phase, percent of the whole."""

    name: str
    percent: int


class Far(msgspec.Struct, frozen=True, tag=True):
    """The pending placement is prepared so far."""

    placed: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker's last word: it ends with this exit code."""

    cause: str
    exit_code: int


Report = Hello | OrderDone | Progress | Far | Failed


class WorkerChannel(Generic[In]):
    """Messages over a connected stream socket. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket, receives: object) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._lock = threading.Lock()
        self._decode = msgspec.msgpack.Decoder(receives).decode

    def send(self, msg: msgspec.Struct) -> None:
        """Blocks while the peer does not read. A peer that is gone is not an error: `receive` tells."""
        frame = _encode(msg)
        with self._lock, suppress(OSError):
            self._sock.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self) -> In | None:
        """The next message; None when the peer, or `close`, ended the connection."""
        if (head := self._read(_LENGTH.size)) and (frame := self._read(*_LENGTH.unpack(head))):
            msg: In = self._decode(frame)
            return msg
        with suppress(OSError):
            self._file.close()
        return None

    def _read(self, length: int) -> bytes:
        """Empty at the end of the connection, wherever it ended."""
        try:
            data = self._file.read(length)
        except (OSError, ValueError):  # reset, or closed before
            return b""
        return data if len(data) == length else b""

    def close(self) -> None:
        """Ends the connection in both directions and wakes whoever receives."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
