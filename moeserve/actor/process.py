"""One child process, watched from birth: its document, its log lines, its end. Works on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol

import msgspec

from moeserve.actor.guard import Birth
from moeserve.errors import ConfigError

TAIL_LINES = 50
MAX_LINE_BYTES = 4096
PIPE_BYTES = 65536  # that fit into any pipe
LOG_GRACE_S = 0.5  # for the last log lines after the exit; a grandchild may hold the pipe open for ever

# Control characters but the tab, line and paragraph separators, changes of writing direction.
_CONTROL = {code: f"\\x{code:02x}" for code in [*range(0x20), *range(0x7F, 0xA0)] if code != 0x09}
_CONTROL |= {code: f"\\u{code:04x}" for code in [*range(0x2028, 0x202F), *range(0x2066, 0x206A)]}


@dataclass(frozen=True, slots=True)
class Death:
    """How a child ended. exit_code as in subprocess: negative is minus the signal. log_tail: its last lines."""

    name: str
    pid: int
    exit_code: int
    lived_s: float
    log_tail: tuple[str, ...]
    verdict: str = ""  # why we ended it, if we did
    stranded: bool = False  # it went with its machine, which is no fault of its own

    @property
    def summary(self) -> str:
        """One line: who, how, when and, if it was us, why."""
        story = f"{self.name} (pid {self.pid}) {describe_exit(self.exit_code)} after {self.lived_s:.1f} s"
        if self.verdict:
            return f"{story}: it {self.verdict}"
        if self.exit_code == -signal.SIGKILL:
            return f"{story}; not by us: the kernel does that when memory runs out"
        return story

    def __str__(self) -> str:
        if not self.log_tail:
            return self.summary
        return "\n    ".join([f"{self.summary}; its last log lines:", *self.log_tail])


class Running(Protocol):
    """A child of this process: a `subprocess.Popen`, or a fork (forked.py). `kill` after its end does nothing."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def kill(self) -> None: ...

    def terminate(self) -> None: ...

    def wait(self) -> int:
        """Blocks; returns the exit code as in subprocess."""
        ...


class Process(Protocol):
    """A process that somebody supervises, wherever it runs. pid: 0 until it has one."""

    name: str

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    async def death(self) -> Death:
        """Returns when the process has ended and its last log lines were read. May be awaited by several."""
        ...

    def kill(self, verdict: str) -> None:
        """Ends it at once, whatever it does. `verdict` says why, for the log and the error."""
        ...

    async def stop(self, term_s: float, verdict: str = "") -> Death:
        """SIGTERM, then SIGKILL if it still runs `term_s` later. Takes `term_s` plus a moment at most."""
        ...


class Child:
    """`Process` of our own, running. Belongs to the loop that started it, and so does the child: see guard.py.

    start() it on a thread that lives as long as the child should, which means the loop's own.
    """

    def __init__(self, name: str, process: Running, forward: Callable[[str], None] | None) -> None:
        self.name = name
        self.pid = process.pid
        self.verdict = ""  # the rest of a sentence that begins with "it"
        self._process = process
        self._born_s = time.monotonic()
        self._log = _LogLines(forward)
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._death: asyncio.Task[Death] = self._loop.create_task(self._watch(), name=f"watch {name}")
        threading.Thread(target=self._reap, name=f"reap {name}", daemon=True).start()

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        document: bytes | None,
        *,
        env: Mapping[str, str] | None = None,
        forward: Callable[[str], None] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Starts `command` and hands it `document` (JSON) over stdin, which nobody else can read; None: it needs none.

        The child must call `guard.adopt()` first. Its stdout and stderr are kept as log tail and passed on, line
        by line and with control characters escaped, to `forward` (default: our stderr). pass_fds: what else of ours
        it inherits. Raises ConfigError.
        """
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                bufsize=0,
                pass_fds=pass_fds,
            )
        except OSError as exc:
            raise ConfigError(f"cannot start {name} ({command[0]}): {exc}") from exc
        return cls(name, process, forward) if document is None else cls.take(name, process, document, forward=forward)

    @classmethod
    def take(
        cls, name: str, process: Running, document: bytes, *, forward: Callable[[str], None] | None = None
    ) -> Child:
        """As `start`, with a process that runs already and waits for its document. Raises ConfigError, and ends it."""
        try:
            _hand_over(process, document, name)
        except ConfigError:
            assert process.stdin is not None
            assert process.stdout is not None
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
            raise
        return cls(name, process, forward)

    def log_tail(self, lines: int = 20) -> tuple[str, ...]:
        return tuple(self._log.tail)[-lines:]

    @property
    def alive(self) -> bool:
        return not self._exit.done()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._born_s

    async def started(self) -> int:
        """Its pid; others than `Child` may have none yet."""
        return self.pid

    async def death(self) -> Death:
        return await asyncio.shield(self._death)

    def kill(self, verdict: str) -> None:
        self.verdict = self.verdict or verdict
        self._process.kill()

    async def stop(self, term_s: float, verdict: str = "") -> Death:
        self._process.terminate()
        try:
            async with asyncio.timeout(term_s):
                return await self.death()
        except TimeoutError:
            self.kill(verdict or f"did not end within {term_s:g} s of SIGTERM")
            return await self.death()

    def _reap(self) -> None:
        # A thread and not a child watcher: those differ between asyncio, its versions and uvloop.
        code = self._process.wait()
        with suppress(RuntimeError):  # the loop is closed; nobody asks any more
            self._loop.call_soon_threadsafe(self._exit.set_result, code)

    async def _watch(self) -> Death:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            transport, _ = await self._loop.connect_read_pipe(lambda: self._log, process.stdout)
            try:
                code = await self._exit
                lived_s = self.age_s
                await asyncio.wait([self._log.ended], timeout=LOG_GRACE_S)
            finally:
                transport.close()
        finally:
            process.stdin.close()  # the lifeline: a child whose watcher is cancelled ends too
        return Death(self.name, self.pid, code, lived_s, self.log_tail(), self.verdict)


def _hand_over(process: Running, document: bytes, name: str) -> None:
    line = msgspec.json.encode(Birth(os.getpid(), msgspec.Raw(document))) + b"\n"
    assert process.stdin is not None
    _make_room(process.stdin.fileno(), len(line), name)
    with suppress(BrokenPipeError):  # it is dead already, and its exit says why
        process.stdin.write(line)


def _make_room(fd: int, num_bytes: int, name: str) -> None:
    """A pipe must take the whole start document before anyone reads: writing must not block the loop."""
    if num_bytes <= PIPE_BYTES:
        return
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, num_bytes)  # type: ignore[attr-defined,unused-ignore]  # Linux
    except (AttributeError, OSError) as exc:
        raise ConfigError(f"cannot hand {name} a start document of {num_bytes} bytes through a pipe: {exc}") from exc


class _LogLines(asyncio.Protocol):
    """Cuts a child's output into lines, keeps the last ones, passes each on."""

    def __init__(self, forward: Callable[[str], None] | None) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.forward = to_stderr if forward is None else forward
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._keep(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self._keep(self._rest)
            self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._keep(self._rest)
        if not self.ended.done():
            self.ended.set_result(None)

    def _keep(self, line: bytes) -> None:
        text = one_line(line[:MAX_LINE_BYTES].decode(errors="backslashreplace"))
        self.tail.append(text)
        self.forward(text)


def one_line(text: str) -> str:
    """Text that cannot forge a log line or move a terminal's cursor: control characters become \\xNN."""
    return text.rstrip("\r\n").translate(_CONTROL)


def to_stderr(line: str) -> None:
    """A log line of a child on its way."""
    with suppress(OSError, ValueError):  # a closed terminal must not hurt the engine
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def describe_exit(code: int) -> str:
    """1 -> "exited with code 1"; -11 -> "was killed by SIGSEGV"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
