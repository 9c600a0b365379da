"""A process that works on what strangers sent, so that input which never ends or needs all memory
kills only it.
"""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import moeserve


class SandboxDied(Exception):
    """The process died of a question. too_long: of the time that it took, rather than of memory or
    the stack.
    """

    def __init__(self, *, too_long: bool) -> None:
        super().__init__("took too long" if too_long else "needed too much memory")
        self.too_long = too_long


class SandboxProcess:
    """A module of ours, with its arguments, that answers lines with lines and sets its own limits.
    Not thread-safe.

    It starts with the first question, and again after a death. hello: the line that a new process
    reads first.
    """

    def __init__(self, *module: str, hello: bytes = b"") -> None:
        self._module = module
        self._hello = hello
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, line: bytes) -> bytes:
        """Returns the line that answers another one. Raises SandboxDied."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # how it died
                bufsize=2**16,
                pipesize=2**20,  # a long conversation in few turns
                cwd=Path(moeserve.__file__).parents[
                    1
                ],  # so that it finds this package and nothing of the user's
            )
            self._send(self._hello)
        self._send(line + b"\n")
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer.endswith(b"\n"):
            raise SandboxDied(too_long=self.close() == -signal.SIGPROF)
        return answer

    def _send(self, text: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died; whoever reads sees it
            self._process.stdin.write(text)
            self._process.stdin.flush()

    def close(self) -> int | None:
        """Ends the process. Returns its exit code, None if there was none."""
        process = self._process
        self._process = None
        if process is None:
            return None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        return process.wait()
