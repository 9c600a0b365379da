"""The child's side of supervision: reads the start document, and ends the process with its parent.

There are two ties, because each has a gap. The kernel's parent-death signal (Linux) kills at once, even inside a long
native call, but also when the thread that started us ends, and it is lost if the parent died before we asked for it.
The lifeline is our stdin: the parent holds its other end and never writes after the document, so end-of-file means the
parent's end, whatever killed it; a thread waits for that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

import msgspec

LIFELINE_FD = 0
PARENT_GONE_EXIT_CODE = 77
_PR_SET_PDEATHSIG = 1


class Birth(msgspec.Struct, frozen=True):
    """The start document's envelope: the one line of JSON that a parent writes into its child's stdin."""

    parent_pid: int
    document: msgspec.Raw


def adopt() -> bytes:
    """Ties this process to its parent and returns the document (JSON) that the parent gave it.

    The first thing a child does. Exits with code 77 if the parent is gone already.
    """
    line = _read_line()
    die_with_parent()
    if not line.endswith(b"\n"):
        _end("the parent ended before it said what to do")
    birth = msgspec.json.decode(line, type=Birth)
    if os.getppid() != birth.parent_pid:  # it died before we asked for the signal
        _end("the parent ended during start-up")
    threading.Thread(target=_hold_lifeline, name="lifeline", daemon=True).start()
    return bytes(birth.document)


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, value: object) -> None:
    """Sets a property of this process in the kernel (Linux). Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def end_process(code: int) -> NoReturn:
    """Ends this process at once: taking down a large process in order takes seconds or hangs."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _read_line() -> bytes:
    parts = []
    while True:
        part = os.read(LIFELINE_FD, 65536)
        parts.append(part)
        if not part or part.endswith(b"\n"):
            return b"".join(parts)


def _hold_lifeline() -> None:
    while os.read(LIFELINE_FD, 4096):
        pass
    _end("the parent is gone")


def _end(why: str) -> None:
    # The parent's terminal or log may be gone as well.
    with suppress(OSError):
        os.write(2, f"{os.path.basename(sys.argv[0])}: {why}; ending\n".encode())
    os._exit(PARENT_GONE_EXIT_CODE)
