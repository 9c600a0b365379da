"""What the launcher and a machine's part say to each other, over the part's stdin and stdout.

The part says `PartHello`, gets one line with its `Order`, and from then on single bytes. Its stdout
is its log; lines that begin with MARK are no log but what happens. Logs cannot forge them, because
loggers escape control characters.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from moeserve.actor.tasks import every

MARK = "\x1e"  # ASCII's record separator
ENDED = "ended "  # and the exit code: a part that is gone without having said so was lost
DRAIN = b"d"
KILL = b"k"
PING = b"."
PONG = "pong"  # a part's answer to a ping, so that each side notices that the other is gone
PING_S = 1.0
SILENCE_S = 60.0  # a part ends after that: as long as one may hold a launcher by Ctrl-Z
REPORT_S = 0.2

NNODES = "MOESERVE_LAUNCH_NNODES"
NODE_RANK = "MOESERVE_LAUNCH_NODE_RANK"
ADDRESS = "MOESERVE_LAUNCH_ADDRESS"
PORT = "MOESERVE_LAUNCH_PORT"


class PartHello(msgspec.Struct, frozen=True):
    """A part is there. address: of its machine, on the network by which it was reached. port: a
    free one.
    """

    address: str
    port: int


class Order(msgspec.Struct, frozen=True):
    """What a part runs: `moeserve` with these words, in this folder where there is one. key: the
    cluster's secret.
    """

    words: list[str]
    env: dict[str, str]
    folder: str
    key: str


def tell(what: str) -> None:
    """Tell the launcher, if there is one, what has happened on this machine."""
    if NNODES in os.environ:
        say(what)


def say(what: str) -> None:
    """Write one line for the launcher."""
    with suppress(OSError, ValueError):  # a launcher that is gone ends us in another way
        sys.stdout.write(f"{MARK}{what}\n")
        sys.stdout.flush()


async def report(state: Callable[[], str]) -> None:
    """Send the launcher each change of a state, until cancelled. Return without a launcher."""
    sent = ""

    def send_change() -> None:
        nonlocal sent
        if (now := state()) != sent:
            tell(now)
            sent = now

    if NNODES in os.environ:
        await every(REPORT_S, send_change, name="report")
