"""Handles of supervised processes, and child processes. Works with asyncio and with uvloop."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import msgspec

from moeserve.actor.guard import Birth
from moeserve.actor.tasks import log_error, spawn
from moeserve.errors import ConfigError

TAIL_LINES = 20
MAX_LINE_BYTES = 4096
PIPE_BYTES = 65536  # default capacity of a pipe on Linux
# Time for the last log lines after the exit. It is limited, because a grandchild may hold the pipe
# open forever.
LOG_GRACE_S = 0.5

# Control characters except the tab, line and paragraph separators, changes of writing direction.
_CONTROL = {code: f"\\x{code:02x}" for code in [*range(0x20), *range(0x7F, 0xA0)] if code != 0x09}
_CONTROL |= {code: f"\\u{code:04x}" for code in [*range(0x2028, 0x202F), *range(0x2066, 0x206A)]}


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process."""

    name: str
    pid: int
    exit_code: int  # as in `subprocess`: a negative one is minus the signal
    lived_s: float
    log_tail: tuple[str, ...]  # its last log lines
    reason: str = ""  # why moeserve killed the process, if it did
    stranded: bool = False  # its machine was lost, which is not the process's fault

    @property
    def summary(self) -> str:
        """One line: the process, how and when it ended, and the reason if moeserve killed it."""
        summary = (
            f"{self.name} (pid {self.pid}) {describe_exit(self.exit_code)} after"
            f" {self.lived_s:.1f} s"
        )
        if self.reason:
            return f"{summary}: it {self.reason}"
        if self.exit_code == -signal.SIGKILL:
            return f"{summary}; not by us: the kernel does that when memory runs out"
        return summary

    def __str__(self) -> str:
        if not self.log_tail:
            return self.summary
        return "\n    ".join([f"{self.summary}; its last log lines:", *self.log_tail])


class Forked:
    """A forked child of this process, with the part of `subprocess.Popen` that `Child` uses."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb", buffering=0)
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb", buffering=0)
        self._lock = threading.Lock()
        self._is_reaped = False  # after that, the pid may belong to another process

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process was reaped."""
        with self._lock:
            if not self._is_reaped:
                os.kill(self.pid, number)

    def wait(self) -> int:
        """Block until the process ends. Return its exit code, as in `subprocess`."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._is_reaped = True
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def end_now(process: subprocess.Popen[bytes] | Forked) -> None:
    """Kill and reap a process that is not watched yet, and close its pipes."""
    process.send_signal(signal.SIGKILL)
    process.wait()
    close_pipes(process)


def close_pipes(process: subprocess.Popen[bytes] | Forked) -> None:
    """Close our ends of a child's pipes."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


class Process(ABC):
    """A supervised process, on this machine (`Child`) or on another one.

    pid: 0 while it is not known.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._death: asyncio.Future[Death]

    @property
    def alive(self) -> bool:
        """Whether the process has not ended yet, as far as is known."""
        return not self._death.done()

    async def death(self) -> Death:
        """Wait until the process has ended and its last log lines were read.

        Several tasks may await this.
        """
        return await asyncio.shield(self._death)

    @abstractmethod
    def kill(self, reason: str) -> None:
        """Send SIGKILL. reason: the rest of a sentence that begins with "it", for the log."""

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM."""

    async def stop(self, term_s: float) -> Death:
        """Send SIGTERM, and SIGKILL if the process still runs after `term_s`."""
        self.terminate()
        try:
            async with asyncio.timeout(term_s):
                return await self.death()
        except TimeoutError:
            self.kill(f"did not end within {term_s:g} s of SIGTERM")
            return await self.death()


def to_stderr(line: str) -> None:
    """Write a child's log line to stderr."""
    with suppress(OSError, ValueError):  # a closed terminal must not end the engine
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class Child(Process):
    """A child process. It ends with the loop and with the thread that started it: see guard.py."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes] | Forked, forward: Callable[[str], None]
    ) -> None:
        super().__init__(name, process.pid)
        self._kill_reason = ""  # reason of the first `kill`
        self._process = process
        self._born_at_s = time.monotonic()
        self._log = _LogLines(forward)
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._death = spawn(self._watch(), name=f"watch of {name}", on_error=self._watch_failed)
        threading.Thread(target=self._reap, name=f"reap {name}", daemon=True).start()

    def _watch_failed(self, name: str, error: Exception) -> None:
        """End a child that nobody watches any more. `death` raises the error."""
        log_error(name, error)
        self.kill("was not watched any more")

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        document: bytes | None,
        *,
        forward: Callable[[str], None] = to_stderr,
        pass_fds: Sequence[int] = (),
    ) -> "Child":
        """Start `command`, and send it its start document (`document`) over stdin.

        Nobody else can read its stdin.

        The child must first call `guard.adopt()`. The lines of its stdout and stderr are passed to
        `forward` with control characters escaped. The last lines are kept as its log tail.

        document: the start document, as JSON; None: send nothing.
        pass_fds: descriptors that the child inherits.

        Raises ConfigError.
        """
        with ConfigError.instead_of(OSError, f"cannot start {name} ({command[0]})"):
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=pass_fds,
            )
        return (
            cls(name, process, forward)
            if document is None
            else cls.take(name, process, document, forward=forward)
        )

    @classmethod
    def take(
        cls,
        name: str,
        process: subprocess.Popen[bytes] | Forked,
        document: bytes,
        *,
        forward: Callable[[str], None] = to_stderr,
    ) -> "Child":
        """Watch a process that is running already and waits for its document.

        Raises ConfigError, after killing the process.
        """
        try:
            _hand_over(process, document, name)
        except ConfigError:
            end_now(process)
            raise
        return cls(name, process, forward)

    @property
    def alive(self) -> bool:
        """Whether the process has not been reaped yet."""
        return not self._exit.done()

    def kill(self, reason: str) -> None:
        self._kill_reason = self._kill_reason or reason
        self._process.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)

    def hand_over(self, document: bytes, forward: Callable[[str], None] | None = None) -> None:
        """Send the running child another document; see `guard.adopt`.

        forward: called with its log lines from now on.
        """
        if forward is not None:
            self._log.forward_to(forward)
        _hand_over(self._process, document, self.name)

    def _reap(self) -> None:
        # In a thread, because child watchers differ between versions of asyncio and uvloop.
        code = self._process.wait()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._exit.set_result, code)

    async def _watch(self) -> Death:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            transport, _ = await self._loop.connect_read_pipe(lambda: self._log, process.stdout)
            try:
                code = await self._exit
                lived_s = time.monotonic() - self._born_at_s
                await asyncio.wait([self._log.ended], timeout=LOG_GRACE_S)
            finally:
                transport.close()
        finally:
            # A child ends when its stdin closes (guard.py), so one without a watcher ends, too.
            process.stdin.close()
        return Death(
            name=self.name,
            pid=self.pid,
            exit_code=code,
            lived_s=lived_s,
            log_tail=tuple(self._log.tail),
            reason=self._kill_reason,
        )


def _hand_over(process: subprocess.Popen[bytes] | Forked, document: bytes, name: str) -> None:
    line = msgspec.json.encode(Birth(os.getpid(), msgspec.Raw(document))) + b"\n"
    assert process.stdin is not None
    # The pipe must hold the whole line, because the write must not block the loop.
    if len(line) > PIPE_BYTES:
        what = f"cannot hand {name} a start document of {len(line)} bytes through a pipe"
        # AttributeError: F_SETPIPE_SZ exists only on Linux.
        with ConfigError.instead_of((AttributeError, OSError), what):
            resize = fcntl.F_SETPIPE_SZ  # type: ignore[attr-defined,unused-ignore]  # Linux
            fcntl.fcntl(process.stdin, resize, len(line))
    with suppress(BrokenPipeError):  # the process is dead already; its exit will be reported
        process.stdin.write(line)


class _LogLines(asyncio.Protocol):
    """Splits a child's output into lines, keeps the last ones, and forwards each."""

    def __init__(self, forward: Callable[[str], None]) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forward = forward
        self._partial_line = b""

    def forward_to(self, forward: Callable[[str], None]) -> None:
        """Forward the lines to another function from now on."""
        self._forward = forward

    def data_received(self, data: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._add_line(line)
        if len(self._partial_line) > MAX_LINE_BYTES:
            self._add_line(self._partial_line)
            self._partial_line = b""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._partial_line:
            self._add_line(self._partial_line)
        if not self.ended.done():
            self.ended.set_result(None)

    def _add_line(self, line: bytes) -> None:
        text = one_line(line[:MAX_LINE_BYTES].decode(errors="backslashreplace"))
        self.tail.append(text)
        self._forward(text)


def one_line(text: str) -> str:
    """Escape control characters as \\xNN, so that text cannot forge a log line or control a
    terminal.
    """
    return text.rstrip("\r\n").translate(_CONTROL)


def describe_exit(code: int) -> str:
    """Return an exit code in words: 1 -> "exited with code 1"; -11 -> "was killed by SIGSEGV"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
