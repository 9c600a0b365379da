"""Start children quickly, as forks of a process that has already done the slow imports. Linux only.

`ForkServer` requests forks, and `serve` runs in the process that forks. A fork becomes a child of
the requesting process, not of the server. So it can be supervised like any child, and it outlives
the server.
"""

import asyncio
import ctypes
import gc
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from moeserve.actor.guard import prctl
from moeserve.actor.process import Child, Forked, end_now
from moeserve.actor.tasks import spawn

IS_SUPPORTED = sys.platform == "linux"
IMPORTS_TIMEOUT_S = 120.0  # time for the server's imports
FORK_TIMEOUT_S = 5.0  # a fork takes about 20 ms
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class ForkServer:
    """A running fork server. Like any `Child`, it belongs to the loop that started it.

    command: a program that calls `serve` with the descriptor in its last argument.

    Raises ConfigError or OSError.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._sock, server_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        try:
            self.child = Child.start(
                "fork server",
                [*command, str(server_sock.fileno())],
                document=None,
                pass_fds=[server_sock.fileno()],
            )
        except BaseException:
            self._sock.close()
            raise
        finally:
            server_sock.close()
        self._imports = spawn(
            self._receive(), name="fork server imports", on_error=self._imports_failed
        )
        self._lock = asyncio.Lock()

    def _imports_failed(self, _name: str, error: Exception) -> None:
        # Does nothing if the server is dead already.
        self.child.kill(f"did not do its imports: {error}")

    @property
    def warm(self) -> bool:
        """Whether the server has imported everything."""
        return (
            self._imports.done()
            and not self._imports.cancelled()
            and self._imports.exception() is None
        )

    async def until_warm(self) -> None:
        """Wait until the server has imported everything. Raises OSError if it is gone."""
        await asyncio.shield(self._imports)

    async def fork(self, argument: int) -> Forked:
        """Return a new child, in which `serve` returns `argument` (0 to 255). Raises OSError if the
        fork fails.
        """
        # Not `wait_for`, which may swallow a cancellation (Python 3.11).
        async with asyncio.timeout(IMPORTS_TIMEOUT_S):
            await self.until_warm()
        forking = asyncio.get_running_loop().create_task(self._fork(argument), name="fork")
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_end_unwanted)  # because a fork cannot be cancelled
            raise

    async def close(self) -> None:
        """End the server, but not the forks."""
        self.child.kill("is not needed any more")
        await self.child.death()
        self._imports.cancel()
        async with self._lock:
            self._sock.close()

    async def _fork(self, argument: int) -> Forked:
        async with self._lock:
            parent_fds, child_fds = _pipes()
            try:
                with _adopting():
                    socket.send_fds(self._sock, [bytes([argument])], child_fds)
                    pid = await asyncio.wait_for(self._receive(), FORK_TIMEOUT_S)
                    if not pid:
                        raise OSError("there are too many processes, or too little memory")
                    # Does not wait. Raises OSError unless the fork is a child of this process.
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # noqa: ASYNC222
            except BaseException as error:
                if isinstance(error, TimeoutError):
                    self.child.kill("did not fork in time")
                _close(parent_fds)
                raise
            finally:
                _close(child_fds)
            return Forked(pid, *parent_fds)

    async def _receive(self) -> int:
        message = await asyncio.get_running_loop().sock_recv(self._sock, 32)
        if not message:
            raise ConnectionResetError("the fork server is gone")
        return int(message)


def _end_unwanted(forking: asyncio.Task[Forked]) -> None:
    if not forking.cancelled() and forking.exception() is None:
        end_now(forking.result())


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Create the pipes for a child's stdin and stdout. Return the parent's ends and the child's."""
    stdin = os.pipe()
    stdout = os.pipe()
    return (stdin[1], stdout[0]), (stdin[0], stdout[1])


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


@contextmanager
def _adopting() -> Iterator[None]:
    """Inside the block, adopt orphaned descendants as children. Raises OSError."""
    before = ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    try:
        yield
    finally:
        with suppress(OSError):
            prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value))


# ---- In the process that forks. It has one thread, because a fork has only the forking thread.


def serve(fd: int) -> int:
    """Fork at each request on this socket. The process ends with the requesting process.

    Return in each fork, with the request's argument. There, stdin, stdout and stderr are pipes to
    the requesting process.
    """
    sock = socket.socket(fileno=fd)
    gc.collect()
    gc.freeze()  # because a collection in a fork would copy the pages that forks share
    sock.send(b"0")
    while True:
        argument, fds, _, _ = socket.recv_fds(sock, 1, 2)
        if not argument:
            os._exit(0)
        pid = _fork_orphan()
        if pid is None:
            sock.close()
            _redirect(*fds)
            return argument[0]
        _close(fds)
        sock.send(b"%d" % pid)


def _fork_orphan() -> int | None:
    """Fork twice, so that the second fork is an orphan, which the requesting process adopts.

    Return None in the second fork. In the server, return its pid once it is an orphan, or 0 if
    forking failed.
    """
    reader, writer = os.pipe()
    try:
        if middle := os.fork():
            os.waitpid(middle, 0)
            os.set_blocking(reader, False)
            return int(os.read(reader, 32))
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(writer, b"%d" % pid)
            os._exit(0)
        return None
    except OSError:  # no fork, or nothing to read
        return 0
    finally:
        _close((reader, writer))


def fork_child() -> Forked | None:
    """Fork this process, which must have one thread. Return None in the child. Raises OSError."""
    parent_fds, child_fds = _pipes()
    pid = os.fork()
    _close(child_fds if pid else parent_fds)
    if pid:
        return Forked(pid, *parent_fds)
    _redirect(*child_fds)
    return None


def _redirect(stdin: int, stdout: int) -> None:
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    _close((stdin, stdout))
