"""The child's side of supervision: it receives its start document, and ends with its parent.

Two mechanisms end it, because each has a gap:

- The kernel's parent-death signal (Linux) kills at once, even during a long native call. But it is
  also sent when the thread that started the child ends, and it is lost if the parent died before
  the child requested it.
- The lifeline is the child's stdin, whose other end the parent holds. End-of-file means that the
  parent is gone, whatever the cause. A thread waits for that, and for further documents.
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
    """The envelope of a document: one line of JSON, which a parent writes to its child's stdin."""

    parent_pid: int
    document: msgspec.Raw


def adopt(on_document: Callable[[bytes], object] = lambda document: None) -> bytes:
    """Tie this process to its parent, and return the start document (JSON).

    To be called first.

    Exits with code 77 if the parent is gone already.

    on_document: called in a thread with each further document (see `Child.hand_over`).
    """
    lines = _read_lines()
    line = next(lines, None)
    die_with_parent()
    if line is None:
        _end_with_parent("the parent ended before it sent a start document")
    birth = _decode(line)
    if os.getppid() != birth.parent_pid:  # the parent died before `die_with_parent`
        _end_with_parent("the parent ended during start-up")
    threading.Thread(
        target=_hold_lifeline, args=[lines, on_document], name="lifeline", daemon=True
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
    """End this process at once. An orderly end of a large process would take seconds, or hang."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


_decode = msgspec.json.Decoder(Birth).decode


def _read_lines() -> Iterator[bytes]:
    partial_line = b""
    while data := os.read(LIFELINE_FD, 65536):
        *lines, partial_line = (partial_line + data).split(b"\n")
        yield from lines


def _hold_lifeline(lines: Iterator[bytes], on_document: Callable[[bytes], object]) -> None:
    for line in lines:
        on_document(bytes(_decode(line).document))
    _end_with_parent("the parent is gone")


def _end_with_parent(why: str) -> NoReturn:
    # stderr may be gone together with the parent.
    with suppress(OSError):
        os.write(2, f"{os.path.basename(sys.argv[0])}: {why}; ending\n".encode())
    os._exit(PARENT_GONE_EXIT_CODE)
