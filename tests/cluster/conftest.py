"""Engine links around the builders of builders.py, in this process and in child processes."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moeserve.actor import forking
from moeserve.actor.process import Child, Forked
from moeserve.cluster import forks
from moeserve.cluster.fleet import Fleet
from moeserve.cluster.link import EngineGone, EngineLink, FromEngine
from moeserve.cluster.local_engine import LocalEngine
from moeserve.config import Config
from moeserve.messages import FinishReason, Ready, StepOutput, Submit
from moeserve.sampling import TokenSampling


class Reader:
    """Reads a link as a front end does, and keeps all messages in order."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self.seen: list[FromEngine] = []
        self._unread: list[FromEngine] = []

    def submit(self, rid: int, max_tokens: int, prompt: tuple[int, ...] = (1, 2, 3)) -> None:
        tokens = array("i", prompt).tobytes()
        sampling = TokenSampling(seed=1, max_tokens=max_tokens)
        self.link.send(Submit(rid=rid, tokens=tokens, num_prompt=len(prompt), sampling=sampling))

    async def until(self, condition: Callable[[FromEngine], bool]) -> Any:
        """Return the next message that meets the condition."""
        async with asyncio.timeout(40):
            while True:
                self._unread = self._unread or await self.link.outbox.drain(wait=True)
                self.seen.append(msg := self._unread.pop(0))
                if condition(msg):
                    return msg

    async def ready(self) -> Ready:
        """Return the facts of the next engine that is ready."""
        ready: Ready = await self.until(lambda msg: isinstance(msg, Ready))
        return ready

    async def gone(self) -> EngineGone:
        gone: EngineGone = await self.until(lambda msg: isinstance(msg, EngineGone))
        return gone

    async def finished(self, rid: int) -> list[int]:
        """Return the remaining tokens of a request."""
        tokens: list[int] = []

        def last(msg: FromEngine) -> bool:
            if not isinstance(msg, StepOutput):
                return False
            rids = memoryview(msg.rids).cast("q")
            columns = memoryview(msg.tokens).cast("i")
            if rid not in rids:
                return False
            row = rids.tolist().index(rid)
            tokens.extend([columns[row]] if columns[row] >= 0 else [])
            return msg.finish[row] != FinishReason.NONE

        await self.until(last)
        return tokens


@asynccontextmanager
async def _opened(link: EngineLink) -> AsyncIterator[tuple[Any, Reader]]:
    await link.start()
    try:
        yield link, Reader(link)
    finally:
        await link.close(0.0)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Yield a temporary directory with a path short enough for sockets, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="t-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[socket.socket]:
    """Yield a warm fork server (light_fork_server.py) for all tests' engines.

    An engine then starts in 30 ms instead of half a second.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "light_fork_server", str(theirs.fileno())]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with (
        ours,
        subprocess.Popen(
            command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        ) as server,
    ):
        theirs.close()
        ours.settimeout(30)
        assert ours.recv(32) == b"0"
        yield ours
        server.kill()


@pytest.fixture
def warm(fork_server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork engines that would start on their own from the warm server.

    They have the environment with which the session began.
    """

    class WarmChild(Child):
        @classmethod
        def start(cls, name: str, command: Any, document: Any, **options: Any) -> Child:
            if forks.ENGINE not in command:
                return super().start(name, command, document, **options)
            stdin = os.pipe()
            stdout = os.pipe()
            with forking._adopting():
                socket.send_fds(fork_server, [b"\1"], [stdin[0], stdout[1]])
                pid = int(fork_server.recv(32))
            os.close(stdin[0])
            os.close(stdout[1])
            return cls.take(name, Forked(pid, stdin[1], stdout[0]), document, **options)

    monkeypatch.setattr(forks, "Child", WarmChild)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, warm: None) -> Callable[..., Any]:
    """Return child("null", policy=...), which opens a fleet of one engine and a Reader."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def open_link(builder: str, config: Config | None = None, **options: Any) -> Any:
        return _opened(Fleet(config or Config(), builder=f"builders:{builder}", **options))

    return open_link


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return local("null"), which opens a LocalEngine and a Reader."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def open_link(builder: str, config: Config | None = None) -> Any:
        return _opened(LocalEngine(config or Config(), builder=f"builders:{builder}"))

    return open_link


@pytest.fixture(params=["child", "local"])
def engine(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return either kind of link, for tests of what front ends may rely on."""
    opener: Callable[..., Any] = request.getfixturevalue(request.param)
    return opener
