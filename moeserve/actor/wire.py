"""Wires: how messages reach an actor that lives elsewhere. The code at both ends is the same over every wire.

    a wire of (Out, In): send(Out) leaves, In arrives in `inbox`

`local_pair` joins two inboxes on one loop; `zmq_wire` crosses processes. On every wire: order is kept, `send`
never blocks (a peer that does not keep up means Overloaded, one that is gone ActorStopped), and the loss of the
peer puts a notice into the inbox behind the last message that arrived from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from moeserve.actor.inbox import Inbox
from moeserve.errors import ActorStopped

Out = TypeVar("Out")
In = TypeVar("In")
Out_contra = TypeVar("Out_contra", contravariant=True)
In_co = TypeVar("In_co", covariant=True)


class PeerGone(msgspec.Struct, frozen=True):
    """The other end of a wire is lost: it ended, was killed, or speaks another protocol version."""

    cause: str


@dataclass(slots=True)
class WireStats:
    """Counts since the wire was made. `dropped`: frames that were no message, or came from a stranger."""

    sent: int = 0
    received: int = 0
    dropped: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Wire(Protocol[Out_contra, In_co]):
    """One end of a connection between exactly two parties. Belongs to one loop and its thread."""

    stats: WireStats

    def send(self, msg: Out_contra) -> None:
        """Sends in order, without blocking. Raises Overloaded (peer too slow) or ActorStopped (no peer)."""
        ...

    async def connected(self, deadline_s: float) -> None:
        """Returns when both ends know each other. Raises ActorStopped with the cause, or TimeoutError."""
        ...

    def close(self, linger_s: float = 0.0) -> None:
        """Lets go; safe to repeat. What was sent already still leaves if that takes at most `linger_s`, and the peer
        has it before its notice. Not so where the peer had as many messages unread as its wire's limit, or where the
        network loses packets at that moment: what must not be lost needs a peer that hangs up first."""
        ...


class LocalWire(Generic[Out, In]):
    """A wire inside one loop: messages pass as objects, nothing is copied."""

    def __init__(self, name: str, inbox: Inbox[In], notice: Callable[[PeerGone], In]) -> None:
        self.name = name
        self.inbox = inbox
        self.stats = WireStats()
        self._notice = notice
        self._peer: LocalWire[In, Out] | None = None

    def send(self, msg: Out) -> None:
        if self._peer is None:
            raise ActorStopped(f"{self.name}: the other end is gone")
        self._peer.inbox.put(msg)
        self._peer.stats.received += 1
        self.stats.sent += 1

    async def connected(self, deadline_s: float) -> None:
        if self._peer is None:
            raise ActorStopped(f"{self.name}: the other end is gone")

    def close(self, linger_s: float = 0.0) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            peer._lose("closed by the other end")

    def _lose(self, cause: str) -> None:
        self._peer = None
        if not self.inbox.closed:
            self.inbox.put(self._notice(PeerGone(cause)), force=True)


def local_pair(
    a: Inbox[In],
    b: Inbox[Out],
    *,
    notice_a: Callable[[PeerGone], Any] = lambda gone: gone,
    notice_b: Callable[[PeerGone], Any] = lambda gone: gone,
) -> tuple[LocalWire[Out, In], LocalWire[In, Out]]:
    """Two ends that fill inboxes `a` and `b`. notice_*: what the loss of the peer looks like in that inbox."""
    asyncio.get_running_loop()  # a wire belongs to a loop; fail where the mistake is
    left: LocalWire[Out, In] = LocalWire(a.owner, a, notice_a)
    right: LocalWire[In, Out] = LocalWire(b.owner, b, notice_b)
    left._peer, right._peer = right, left
    return left, right
