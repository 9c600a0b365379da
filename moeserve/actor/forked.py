"""Children that are forks of a process which has imported what takes long: they begin where its imports end.

`ForkServer` is the parent's side, forking.py the one that forks. A fork ends up as a child of ours and not of the
server: its exit code comes to us, it dies with us, and it outlives the server. For that the kernel needs a moment in
which orphans below this process become our children (`_adopting`). Linux only.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from moeserve.actor.process import Child

POSSIBLE = sys.platform == "linux"
PID = struct.Struct("=i")  # what the server answers: 0 first, once it is warm; 0 later where it could not fork
FORK_S = 5.0  # for one answer; it takes some 20 ms
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class Forked:
    """`Running`: a child of ours that was forked with these ends of pipes, ours, to its stdin and stdout."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb", buffering=0)
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb", buffering=0)
        self._lock = threading.Lock()
        self._over = False  # its pid may be somebody else's

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def wait(self) -> int:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._over = True
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def forget(self) -> None:
        """In a process that is not its parent."""
        assert self.stdin is not None
        assert self.stdout is not None
        self.stdin.close()
        self.stdout.close()

    def _signal(self, number: int) -> None:
        with self._lock:
            if not self._over:
                os.kill(self.pid, number)


class ForkServer:
    """One server, running. Belongs to the loop that started it, like any `Child`.

    command: a program that ends up in `forking.serve` with the descriptor in its last argument.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.setblocking(False)
        try:
            fd = theirs.fileno()
            self.child = Child.start("fork server", [*command, str(fd)], None, pass_fds=[fd])
        except BaseException:
            self._sock.close()
            raise
        finally:
            theirs.close()
        self._turn = asyncio.Lock()
        self.warm = False

    async def until_warm(self) -> None:
        """Returns when it has imported everything. Raises OSError if it is gone."""
        async with self._turn:
            await self._until_warm()

    async def fork(self, what: int) -> Forked:
        """A new child. what: a number from 0 to 255 that `serve` returns in it. Raises OSError if there is none."""
        async with self._turn:
            await self._until_warm()
            with _pipes() as (stdin, stdout), _adopting():
                socket.send_fds(self._sock, [bytes([what])], [stdin[0], stdout[1]])
                try:
                    async with asyncio.timeout(FORK_S):
                        pid = await self._answer()
                except TimeoutError:
                    self.child.kill("did not fork in time")
                    raise
                if not pid:
                    raise OSError("there are too many processes, or too little memory")
                _check_ours(pid)
                return Forked(pid, os.dup(stdin[1]), os.dup(stdout[0]))

    async def close(self) -> None:
        """Ends the server, not the forks."""
        self.child.kill("is not needed any more")
        await self.child.death()
        async with self._turn:
            self._sock.close()

    async def _until_warm(self) -> None:
        if not self.warm:
            await self._answer()
            self.warm = True

    async def _answer(self) -> int:
        data = b""
        while len(data) < PID.size:
            part = await asyncio.get_running_loop().sock_recv(self._sock, PID.size - len(data))
            if not part:
                raise ConnectionResetError("the fork server is gone")
            data += part
        return int(PID.unpack(data)[0])


def _check_ours(pid: int) -> None:
    """Raises OSError if it is not a child of this process. Does not wait."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


Pipe = tuple[int, int]


@contextmanager
def _pipes() -> Iterator[tuple[Pipe, Pipe]]:
    pipes = os.pipe(), os.pipe()
    try:
        yield pipes
    finally:
        for fd in (*pipes[0], *pipes[1]):
            os.close(fd)


@contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile orphans below this process become its children. Raises OSError."""
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    try:
        yield
    finally:
        with suppress(OSError):
            _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value))


def _prctl(option: int, value: object) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
