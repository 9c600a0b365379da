"""Run Python programs as forks of a process that has imported torch.

Each starts in 50 ms instead of three seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    ["torch", "moeserve.comm.gloo", "moeserve.comm.shm", "moeserve.moe.layer"]
)


class Program:
    """Runs `code` as `python -c code *words` would, until the end of the context.

    `stdout` is what it prints.
    """

    def __init__(self, code: str, *words: str) -> None:
        here, there = _forks.Pipe(duplex=False)
        self._process = _forks.Process(target=_run, args=(there, code, words), daemon=True)
        self._process.start()
        there.close()
        self.stdout = os.fdopen(os.dup(here.fileno()))
        here.close()
        self.pid = self._process.pid
        assert self.pid is not None

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code, or None if the program still runs after `timeout_s`."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self._process.close()


def _run(stdout: Connection, code: str, words: tuple[str, ...]) -> None:
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    sys.argv = ["-c", *words]
    with os.fdopen(1, "w", closefd=False) as sys.stdout:
        exec(code, {"__name__": "__main__"})
    sys.stdout = sys.__stdout__
