"""The process that forks for others; forked.py is the side that asks.

It must be on one thread, and stay so: of its threads a fork has only the one that forked, and whatever the others held.
"""

from __future__ import annotations

import gc
import os
import socket

from moeserve.actor.forked import PID, Forked

_STDIN, _STDOUT, _STDERR = range(3)


def serve(fd: int) -> int:
    """Forks as often as it is asked over this socket. Returns in each fork, with what the asker gave along; its stdin
    and stdout (and stderr) are the asker's pipes then. In the server itself it ends the process with the asker."""
    sock = socket.socket(fileno=fd)
    gc.collect()
    gc.freeze()  # no collection looks at what is here again, which would copy the pages that all forks share
    sock.sendall(PID.pack(0))
    while True:
        what, fds, _, _ = socket.recv_fds(sock, 1, 2)
        if not what:
            os._exit(0)
        pid = _fork_orphan()
        if pid is None:
            sock.close()
            _take(fds[0], fds[1])
            return what[0]
        for given in fds:
            os.close(given)
        sock.sendall(PID.pack(pid))


def _fork_orphan() -> int | None:
    """None in the fork. In the server its pid, when it has lost its parent; 0 if it could not be forked."""
    told, tell = os.pipe()
    try:
        middle = os.fork()
    except OSError:
        os.close(told)
        os.close(tell)
        return 0
    if middle == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid == 0:
            os.close(told)
            os.close(tell)
            return None
        os.write(tell, PID.pack(pid))
        os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as answer:
        data = answer.read(PID.size)
    os.waitpid(middle, 0)
    return PID.unpack(data)[0] if data else 0


def fork_child() -> Forked | None:
    """Forks this process, which must be on one thread. None in the child. Raises OSError."""
    stdin, stdout = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(stdin[1])
        os.close(stdout[0])
        _take(stdin[0], stdout[1])
        return None
    os.close(stdin[0])
    os.close(stdout[1])
    return Forked(pid, stdin[1], stdout[0])


def _take(stdin: int, stdout: int) -> None:
    os.dup2(stdin, _STDIN)
    os.dup2(stdout, _STDOUT)
    os.dup2(stdout, _STDERR)
    os.close(stdin)
    os.close(stdout)
