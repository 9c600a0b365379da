"""Engines that are forks of a process with all imports: real ones, around made-up tokens."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from moeserve.actor import forking
from moeserve.cluster import forks as module
from moeserve.cluster.forks import LocalHost
from moeserve.config import Config, ParallelConfig
from moeserve.errors import ConfigError
from moeserve.frontend.front_end import FrontEnd
from tests.cluster.test_fleet import Open, answers, fleet, some, until

__all__ = ["fleet"]  # a fixture
ENGINE = "moeserve-engine"


_others: set[int] = set()


@pytest.fixture
def warm() -> None:
    """Here engines start as they do in the product."""


@pytest.fixture(autouse=True)
def alone() -> None:
    _others.clear()
    _others.update(child.pid for child in psutil.Process().children())


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.05)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(module, "FORK_SERVER", "light_fork_server")


BUILD_DEMO = """
import sys
from moeserve.cluster.engine_main import import_ahead
import_ahead(any_model=True)
from moeserve.cluster.build import build_runner
from moeserve.cluster.order import Role
from moeserve.config import config_of
known = set(sys.modules)
build_runner(config_of("demo", threads=1, device="cpu"), Role(), lambda phase, percent: None)
print(sorted(name for name in set(sys.modules) - known if name.startswith("moeserve")))
"""


def test_a_fork_imports_nothing_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD_DEMO], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@asynccontextmanager
async def kept() -> AsyncIterator[LocalHost]:
    forks = LocalHost("/nowhere")
    forks.keep_fork_server(Config(parallel=ParallelConfig(dp=2)))
    try:
        yield forks
    finally:
        await forks.close()


def children() -> list[psutil.Process]:
    """Return this process's children, except those that other tests' fixtures keep."""
    return [child for child in psutil.Process().children() if child.pid not in _others]


def server_pid(front: FrontEnd) -> int | None:
    """Return the process id of the fleet's fork server, if it is warm."""
    server = front.fleet.scaling.rendezvous.local_host.server
    return server.child.pid if server is not None else None


def servers() -> list[psutil.Process]:
    """A fork has its server's command line, but not its name."""
    found = []
    for child in children():
        with suppress(psutil.Error):  # it ended meanwhile, or is a zombie
            if module.FORK_SERVER in child.cmdline() and child.name() != ENGINE:
                found.append(child)
    return found


def engine_of(pid: int | None) -> psutil.Process:
    engine = psutil.Process(pid)
    assert engine.ppid() == os.getpid()
    return engine


def names_of_engines(front: FrontEnd) -> list[str]:
    return [engine_of(engine.pid).name() for engine in front.fleet.view.engines]


def pid_of(front: FrontEnd, number: int) -> int | None:
    return front.fleet.view.engines[number].pid


async def replaced(front: FrontEnd, number: int) -> None:
    before = pid_of(front, number)
    engine_of(before).kill()
    await until(lambda: pid_of(front, number) not in (None, 0, before))


async def started_alone(front: FrontEnd, number: int) -> None:
    """Wait for the engine's own command line: between fork and exec a process has none."""

    def has_own_command_line() -> bool:
        with suppress(psutil.Error):
            return module.ENGINE in engine_of(pid_of(front, number)).cmdline()
        return False

    await until(has_own_command_line)


async def test_engines_are_forked_and_replaced_by_forks_however_many_die(fleet: Open) -> None:
    async with fleet(2, fork_server="on") as front:
        assert names_of_engines(front) == [ENGINE] * 2
        server = psutil.Process(server_pid(front))
        await until(lambda: server.status() == psutil.STATUS_SLEEPING)  # the last fork is done
        busy = server.cpu_times()
        await asyncio.sleep(0.3)
        assert server.cpu_times() == busy  # it only waits
        for _ in range(2):
            streams = await some(front, 8, 600)
            before = [pid_of(front, 0), pid_of(front, 1)]
            for pid in before:
                engine_of(pid).kill()
            assert await streams == answers(8, 600)
            await until(lambda: front.fleet.view.complete)
            assert not {pid_of(front, 0), pid_of(front, 1)} & set(before)
            assert names_of_engines(front) == [ENGINE] * 2
        assert front.stats.total.restarts == 4
        assert server_pid(front) == server.pid
        assert server.num_threads() == 1
        left = {process.pid for process in children()}
    assert not left & {process.pid for process in children()}


@pytest.mark.usefixtures("light")
async def test_engines_outlive_their_fork_server_which_is_replaced(fleet: Open) -> None:
    async with fleet(2, fork_server="on") as front:
        streams = await some(front, 4, 600)
        (server,) = servers()
        server.kill()
        await until(lambda: server_pid(front) not in (None, server.pid))
        assert await streams == answers(4, 600)
        assert front.stats.total.restarts == 0
        await replaced(front, 0)
        # A fork gives itself its name.
        await until(lambda: names_of_engines(front)[0] == ENGINE)


@pytest.mark.usefixtures("light")
async def test_without_a_fork_server_engines_start_alone(
    fleet: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 1000.0)
    monkeypatch.setattr(forking, "FORK_TIMEOUT_S", 0.2)
    async with fleet(2, fork_server="on") as front:
        (server,) = servers()
        # it answers nobody: the first engine waits for it, the second one need not
        server.suspend()
        for number in range(2):
            await replaced(front, number)
            await started_alone(front, number)
            await until(lambda: front.fleet.view.complete)
        assert not servers()


@pytest.mark.usefixtures("light")
async def test_an_engine_whose_start_is_cancelled_never_runs() -> None:
    async with kept() as forks:
        unwanted, other = (
            asyncio.create_task(forks.start(name, b"{}")) for name in ("engine 0", "engine 1")
        )
        await until(lambda: forks.server is not None)
        unwanted.cancel()  # the fork is under way
        child = await other
        assert child.pid > 0
        death = await child.death()
        assert death.exit_code == 1  # that is no order
        assert "ValidationError" in "".join(death.log_tail)
        await until(lambda: children() == servers())


@pytest.mark.usefixtures("light")
async def test_an_order_that_no_pipe_takes_is_a_config_error() -> None:
    async with kept() as forks:
        with pytest.raises(ConfigError, match="start document of 268"):
            await forks.start("engine 0", b"[" + b" " * (1 << 28) + b"]")
        assert children() == servers()


@pytest.mark.usefixtures("light")
def test_all_end_with_their_parent() -> None:
    script = (
        "import asyncio\n"
        "from moeserve.cluster import forks as module\n"
        "module.FORK_SERVER = 'light_fork_server'\n"
        "from moeserve.cluster.forks import LocalHost\n"
        "from moeserve.config import Config, ParallelConfig\n"
        "async def main():\n"
        "    forks = LocalHost('/nowhere')\n"
        "    forks.keep_fork_server(Config(parallel=ParallelConfig(tp=2)))\n"
        "    await asyncio.sleep(0)\n"
        "    server = forks._server\n"
        "    forked = [await server.fork(2), await server.fork(2)]\n"
        "    print('warm', flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"warm\n"
    # the server, two engines, and their workers
    num_children = 3 + 2
    deadline_s = time.monotonic() + 30
    while len(children := psutil.Process(parent.pid).children(recursive=True)) < num_children:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(children) == num_children
    _, left = psutil.wait_procs(children, timeout=30)
    assert not left


async def test_there_is_no_fork_server_where_none_is_asked_for(fleet: Open) -> None:
    async with fleet(2, fork_server="off") as front:
        await until(lambda: front.fleet.view.complete)
        assert not servers()
        assert server_pid(front) is None
