"""Wires: how messages reach an actor that lives elsewhere. The code at both ends is the same over every wire.

    a wire of (Out, In): send(Out) leaves, In arrives in `inbox`

`zmq_wire` has them. Order is kept, `send` never blocks (a peer that does not keep up means Overloaded, one that is gone
ActorStopped), and the loss of the peer puts a notice into the inbox behind the last message that arrived from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

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
