"""A real server in its own processes, as a user runs it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port


def command_of(process: psutil.Process) -> str:
    """Return the words that started it; none if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@dataclass
class Server:
    """A `moeserve serve` process. `log` has its stderr and stdout."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    flags: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path: str, body: object) -> tuple[int, dict[str, object]]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_ready(self, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(
                    f"the server ended with {self.process.returncode}:\n{self.log.read_text()}"
                )
            try:
                if self.get("/readyz")[0] == 200:
                    return
            except (OSError, http.client.HTTPException):  # it does not listen yet, or is slow
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready in {timeout_s} s:\n{self.log.read_text()}")

    def engine(self) -> psutil.Process:
        """The engine process, a child of the server."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        engines = [it for it in children if "moeserve.cluster.engine_main" in command_of(it)]
        assert len(engines) == 1, engines
        return engines[0]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def running_server(log: Path, *flags: str) -> Iterator[Server]:
    port = free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "moeserve.cli.main",
                "serve",
                "--port",
                str(port),
                "--threads",
                "1",
                *flags,
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    server = Server(process, port, log, list(flags))
    try:
        server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield one server on the demo model, for all tests that leave it unchanged."""
    with running_server(tmp_path_factory.mktemp("server") / "log", "--max-model-len", "1024") as it:
        yield it


@pytest.fixture(scope="module")
def mortals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Server]]:
    """Yield mortals(), which returns a ready server that a test may kill.

    It is that of the module's previous such test, if it still runs.
    """
    servers: list[Server] = []
    with ExitStack() as stack:

        def living() -> Server:
            if not servers or servers[-1].process.poll() is not None:
                folder = tmp_path_factory.mktemp("mortal")
                flags = ("--shutdown-timeout", "120")  # time for an engine to start meanwhile
                servers.append(stack.enter_context(running_server(folder / "log", *flags)))
            servers[-1].wait_ready()
            return servers[-1]

        yield living


@pytest.fixture
def own_server(mortals: Callable[[], Server]) -> Server:
    """Return a server that the test may kill, reused from the previous test if it still runs."""
    return mortals()
