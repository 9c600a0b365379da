"""The protocol between the launcher and a machine's part, over the part's stdin and stdout.

1. The part sends a `PartHello`.
2. The launcher sends one line with an `Order`.
3. The launcher sends commands of a single byte: DRAIN, KILL or PING.

The part's stdout carries the server's log. Lines that begin with MARK are messages: PartHello,
PONG, ENDED or a state. A log cannot forge them, because loggers escape control characters.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from moeserve.actor.tasks import every

MARK = "\x1e"  # ASCII's record separator
ENDED = "ended "  # followed by the exit code; a part that ends without this message was lost
DRAIN = b"d"
KILL = b"k"
PING = b"."
PONG = "pong"  # the answer to a ping
PING_S = 1.0
# A part ends if it gets no ping for this long. It is long, because Ctrl-Z may stop the launcher.
SILENCE_S = 60.0
REPORT_S = 0.2  # interval at which a state is checked for changes

# Environment variables that the launcher sets, see allocation.py.
NNODES = "MOESERVE_LAUNCH_NNODES"
NODE_RANK = "MOESERVE_LAUNCH_NODE_RANK"
ADDRESS = "MOESERVE_LAUNCH_ADDRESS"
PORT = "MOESERVE_LAUNCH_PORT"


class PartHello(msgspec.Struct, frozen=True):
    """The first message of a part."""

    address: str  # of its machine, on the network by which it was reached
    port: int  # free, for the rendezvous


class Order(msgspec.Struct, frozen=True):
    """The command that a part runs."""

    words: list[str]  # arguments of `moeserve`
    env: dict[str, str]
    folder: str  # working directory, ignored if it does not exist
    key: str  # the cluster's secret


def report_state(state: str) -> None:
    """Report a state of this machine to the launcher, if there is one."""
    if NNODES in os.environ:
        write_message(state)


def write_message(text: str) -> None:
    """Write a message to the launcher."""
    with suppress(OSError, ValueError):  # the launcher is gone, which part.py notices itself
        sys.stdout.write(f"{MARK}{text}\n")
        sys.stdout.flush()


async def report_changes(get_state: Callable[[], str]) -> None:
    """Report each change of a state to the launcher, until cancelled.

    Return at once if there is no launcher.
    """
    last_reported = ""

    def report_if_changed() -> None:
        nonlocal last_reported
        state = get_state()
        if state != last_reported:
            report_state(state)
            last_reported = state

    if NNODES in os.environ:
        await every(REPORT_S, report_if_changed, name="report")
