"""A worker process for untrusted input, which may take forever or need all memory."""

import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from moeserve.errors import ConfigError
from moeserve.text.sandbox_child import LIMIT_EXIT

TRIES = 2  # processes that may be killed by others during one request
# Signals caused by the process's own code. SIGSEGV is also the result of a stack overflow.
_OWN_FAULTS = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
)
_EXIT_S = 5.0  # time to exit for a process that closed its output


class SandboxDied(Exception):
    """The process reached a limit because of its input, or two processes were killed.

    too_long: the limit was time, not memory or stack.
    """

    def __init__(self, why: str, *, too_long: bool = False) -> None:
        super().__init__(why)
        self.too_long = too_long


class _Killed(Exception):
    """Another process killed the worker, so its input may be harmless."""


class SandboxProcess:
    """A worker process that speaks a line protocol and sets its own limits (`sandbox_child`).

    It starts with the first request, and again after it died. Not thread-safe, except for `stop`.
    """

    def __init__(self, *module: str, hello: bytes = b"") -> None:
        """Start nothing yet.

        Args:
            module: A module of this package and its arguments.
            hello: The line that a new process reads first.
        """
        self._module = module
        self._hello = hello
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of starting and stopping
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """The id of the running process, None if there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, line: bytes) -> bytes:
        """Send a line, and return the line that answers it. Raise SandboxDied.

        If another process kills the worker, such as the kernel when memory runs out, a new one gets
        the line.
        """
        for _ in range(TRIES):
            with suppress(_Killed):
                return self._ask(line)
        raise SandboxDied("killed the process that works on it, and the next one")

    def stop(self) -> None:
        """Kill the process, and start no other. A thread in `ask` gets SandboxDied."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> int | None:
        """Wait for a process that died or was stopped, and close its pipes.

        Return its exit code, None if there was no process.
        """
        process = self._process
        self._process = None
        if process is None:
            return None
        try:
            code = process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        return code

    def _ask(self, line: bytes) -> bytes:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        self._send(line)
        answer = self._readline()
        if answer is None:
            raise self._death()
        return answer

    def _start(self) -> None:
        with self._lock:
            if self._stopped:
                raise SandboxDied("came while the server stops")
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # hostile input could fill the log with tracebacks
                bufsize=2**16,
                pipesize=2**20,  # a long conversation in few writes
                # So that Python imports this package, and no module of the user's directory.
                cwd=Path(__file__).resolve().parents[2],
            )
        if self._hello:
            self._send(self._hello)
        if self._readline() is None:
            code = self.close()
            if code is not None and code < 0:
                raise _Killed
            command = f"python -m {' '.join(self._module)}"
            raise ConfigError(f"{command}: ends at its start (exit code {code}); run it to see why")

    def _send(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died; reading will show it
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def _readline(self) -> bytes | None:
        """Return a line of the process, None if it died."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return line if line.endswith(b"\n") else None

    def _death(self) -> Exception:
        """Return the exception for a process that died."""
        code = self.close()
        if self._stopped:
            return SandboxDied("came while the server stops")
        if code == -signal.SIGPROF:
            return SandboxDied("took too long", too_long=True)
        if code == LIMIT_EXIT or code in [-fault for fault in _OWN_FAULTS]:
            return SandboxDied("needed too much memory")
        if code is not None and code < 0:
            return _Killed()
        return SandboxDied(f"ended the process that works on it with exit code {code}")
