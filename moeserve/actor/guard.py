"""The child's side of supervision: the start document, and an end together with the parent.

There are two ties, because each has a gap. The kernel's parent-death signal (Linux) kills at once,
even inside a long native call, but also when the thread that started us ends, and it is lost if the
parent died before we asked for it. The lifeline is our stdin: the parent holds its other end, so
end-of-file means the parent's end, whatever killed it; a thread waits for that, and for further
documents, which few children expect.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NoReturn

import msgspec

LIFELINE_FD = 0
PARENT_GONE_EXIT_CODE = 77
_PR_SET_PDEATHSIG = 1


class Birth(msgspec.Struct, frozen=True):
    """The start document's envelope: the one line of JSON that a parent writes into its child's
    stdin.
    """

    parent_pid: int
    document: msgspec.Raw


def adopt(later: Callable[[bytes], object] = lambda document: None) -> bytes:
    """Tie this process to its parent, and return the document (JSON) that the parent gave it.

    later: called in a thread with each further one (see `Child.hand_over`). The first thing a child
    does. Exits with code 77 if the parent is gone already.
    """
    lines = _read_lines()
    line = next(lines, None)
    die_with_parent()
    if line is None:
        _end("the parent ended before it sent a start document")
    birth = _decode(line)
    if os.getppid() != birth.parent_pid:  # it died before we asked for the signal
        _end("the parent ended during start-up")
    threading.Thread(
        target=_hold_lifeline, args=[lines, later], name="lifeline", daemon=True
    ).start()
    return bytes(birth.document)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, value: object) -> None:
    """Set a property of this process in the kernel (Linux). Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def end_process(code: int) -> NoReturn:
    """End this process at once: taking down a large process in order takes seconds or hangs."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


_decode = msgspec.json.Decoder(Birth).decode


def _read_lines() -> Iterator[bytes]:
    rest = b""
    while part := os.read(LIFELINE_FD, 65536):
        *lines, rest = (rest + part).split(b"\n")
        yield from lines


def _hold_lifeline(lines: Iterator[bytes], later: Callable[[bytes], object]) -> None:
    for line in lines:
        later(bytes(_decode(line).document))
    _end("the parent is gone")


def _end(why: str) -> NoReturn:
    # The parent's terminal or log may be gone as well.
    with suppress(OSError):
        os.write(2, f"{os.path.basename(sys.argv[0])}: {why}; ending\n".encode())
    os._exit(PARENT_GONE_EXIT_CODE)
