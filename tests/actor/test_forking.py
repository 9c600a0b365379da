"""A fork server and its forks: real processes, which end up as our children."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import psutil
import pytest

from moeserve.actor.forking import ForkServer
from moeserve.actor.process import Child

SERVER = """
import os, sys, threading, time
from moeserve.actor import guard
from moeserve.actor.forking import fork_child, serve
guard.die_with_parent()
what = serve(int(sys.argv[1]))
document = guard.adopt()
fds = sorted(map(int, os.listdir("/proc/self/fd")))[:-1]
print("says", document.decode(), what, threading.active_count(), fds)
if what == 1:
    raise RuntimeError("as it was told")
if what == 2:
    sys.stdout.flush()
    time.sleep(1000)
os._exit(what)
"""


_others: set[int] = set()  # children that fixtures of other tests keep

Run = Callable[[Coroutine[Any, Any, None]], None]
Check = Callable[[ForkServer], Coroutine[Any, Any, None]]


@pytest.fixture
def with_server(run: Run) -> Callable[[Check], None]:
    """with_server(check) runs check(server), on each kind of loop."""

    async def checked(check: Check) -> None:
        _others.clear()
        _others.update(child.pid for child in psutil.Process().children())
        server = ForkServer([sys.executable, "-c", SERVER])
        try:
            await check(server)
        finally:
            await server.close()

    return lambda check: run(checked(check))


def test_a_fork_is_a_child_like_any_other(with_server: Callable[[Check], None]) -> None:
    with_server(_ordinary)


async def _ordinary(server: ForkServer) -> None:
    lines: list[str] = []
    fds = len(os.listdir("/proc/self/fd"))
    for what in (0, 7, 1):
        child = Child.take("fork", await server.fork(what), b'"hello"', forward=lines.append)
        death = await child.death()
        assert death.exit_code == what
        # A pipe each for stdin and stdout, a thread for the lifeline beside the main one.
        assert lines[0] == f'says "hello" {what} 2 [0, 1, 2]'
        assert (what == 1) == any("as it was told" in line for line in death.log_tail)
        lines.clear()
        del child
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds + 2  # what the server's own pipes need
    ours = [child for child in psutil.Process().children() if child.pid not in _others]
    assert ours == [psutil.Process(server.child.pid)]


def test_forks_are_killed_stopped_and_outlive_the_server(
    with_server: Callable[[Check], None],
) -> None:
    with_server(_ends)


async def _ends(server: ForkServer) -> None:
    killed, stopped, left = [Child.take("fork", await server.fork(2), b"0") for _ in range(3)]
    assert {psutil.Process(child.pid).ppid() for child in (killed, stopped, left)} == {os.getpid()}
    killed.kill("was not needed")
    assert (await killed.death()).exit_code == -signal.SIGKILL
    assert (await stopped.stop(5.0)).exit_code == -signal.SIGTERM
    server.child.kill("enough")
    await server.child.death()
    await asyncio.sleep(0.1)
    assert left.alive
    with pytest.raises(OSError, match=r"gone|Broken|reset"):
        await server.fork(2)
    assert (await left.stop(5.0)).exit_code == -signal.SIGTERM
    left.kill("again")  # nobody is hurt


def test_many_forks_at_once(with_server: Callable[[Check], None]) -> None:
    with_server(_many)


async def _many(server: ForkServer) -> None:
    forks = await asyncio.gather(*(server.fork(2) for _ in range(12)))
    children = [Child.take(f"fork {i}", fork, b"0") for i, fork in enumerate(forks)]
    assert len({child.pid for child in children}) == 12
    for child in children:
        child.kill("was not needed")
    assert {(await child.death()).exit_code for child in children} == {-signal.SIGKILL}


def test_orphans_of_others_are_not_ours(with_server: Callable[[Check], None]) -> None:
    with_server(_orphans)


async def _orphans(server: ForkServer) -> None:
    fork = Child.take("fork", await server.fork(2), b"0")
    told, tell = os.pipe()
    script = (
        "import os, time\nif os.fork() == 0:\n    os.write(1, b'%d' % os.getpid())\n   "
        " time.sleep(1000)"
    )
    subprocess.run([sys.executable, "-c", script], stdout=tell, check=True)  # noqa: ASYNC221
    os.close(tell)
    orphan = psutil.Process(int(os.read(told, 100)))
    os.close(told)
    assert orphan.ppid() != os.getpid()
    orphan.kill()
    await fork.stop(5.0)
