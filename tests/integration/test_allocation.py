"""Machines started by a launcher with one command; only environment variables differ."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port

from .conftest import Server

BOOT_S = 90
# A loopback address for each process of pytest: the port of an allocation is fixed.
ADDRESS = f"127.77.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}"
FLAGS = [
    "--dp",
    "2",
    "--threads",
    "1",
    "--max-model-len",
    "512",
    "--kv-cache-bytes",
    "64MiB",
    "--rebalance",
    "off",
]


class Launcher:
    """Starts `moeserve serve --dp 2` on the loopback, with its log in a file. port: for HTTP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, env: dict[str, str], *prefix: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"log-{len(self.processes)}"
        command = [
            sys.executable,
            "-m",
            *prefix,
            "moeserve.cli.main",
            "serve",
            "--port",
            str(self.port),
            *FLAGS,
        ]
        env = os.environ | {"XDG_CONFIG_HOME": str(self.folder)} | env
        with log.open("wb") as out:
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)
            )
        return self.processes[-1]

    def log(self, number: int) -> str:
        return (self.folder / f"log-{number}").read_text()

    def server(self, number: int) -> Server:
        return Server(self.processes[number], self.port, self.folder / f"log-{number}")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    it = Launcher(tmp_path)
    yield it
    for process in it.processes:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(server: Server) -> None:
    server.wait_ready(BOOT_S)
    for _ in range(2):  # one for each engine
        status, body = server.post(
            "/v1/completions", {"prompt": "Once", "max_tokens": 4, "temperature": 0}
        )
        assert (status, body["usage"]["completion_tokens"]) == (200, 4)  # type: ignore[index]


def lws(rank: int) -> dict[str, str]:
    return {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(rank), "LWS_LEADER_ADDRESS": ADDRESS}


def test_two_pods_of_lws_are_one_server(launcher: Launcher) -> None:
    # a worker may come first: it waits
    node = launcher.start(lws(1))
    first = launcher.start(lws(0))
    answers(launcher.server(1))
    assert f"LWS: machine 1 of 2; machine 0 is at {ADDRESS}:29500" in launcher.log(0)
    assert f"LWS: machine 0 of 2; machine 0 is at {ADDRESS}:29500" in launcher.log(1)
    assert str(launcher.folder / "moeserve" / "cluster.key") in launcher.log(0)
    first.terminate()
    assert [first.wait(20), node.wait(20)] == [0, 0]


@pytest.mark.full("ranks")
def test_torchrun_with_two_processes_per_machine(launcher: Launcher) -> None:
    """With the real torchrun, the second process of each machine has nothing to do and succeeds.

    A killed part of a machine is restarted and joins while machine 0 continues.
    """
    port = free_port()

    def prefix(rank: int) -> list[str]:
        where = [
            "--nnodes",
            "2",
            "--node-rank",
            str(rank),
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(port),
        ]
        return [
            "torch.distributed.run",
            *where,
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "2",
            "-m",
        ]

    for rank in (0, 1):
        launcher.start({}, *prefix(rank))
    answers(launcher.server(0))
    assert f"torchrun: machine 0 of 2; machine 0 is at 127.0.0.1:{port + 1}" in launcher.log(0)
    for number in (0, 1):
        assert "torchrun: local rank 1 has nothing to do" in launcher.log(number)
    (node,) = psutil.Process(launcher.processes[1].pid).children()
    node.kill()
    until_said(launcher, 1, "torchrun: machine 1 of 2", 2)
    answers(launcher.server(0))
    assert launcher.log(0).count("torchrun: machine 0 of 2") == 1


def until_said(launcher: Launcher, number: int, text: str, times: int) -> None:
    deadline_s = time.monotonic() + BOOT_S
    while launcher.log(number).count(text) < times:
        assert time.monotonic() < deadline_s, launcher.log(number)
        time.sleep(0.05)


@pytest.fixture
def said(launcher: Launcher) -> Callable[[dict[str, str]], str]:
    def run(env: dict[str, str]) -> str:
        assert launcher.start(env).wait(30) == 2
        return launcher.log(len(launcher.processes) - 1)

    return run


def test_contradictions_end_the_start(said: Callable[[dict[str, str]], str]) -> None:
    other = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1 127.0.0.2",
    }
    assert "LWS says machine 1 of 2, SkyPilot says machine 0 of 2" in said(lws(1) | other)
    assert "--nnodes is 4, LWS says 2" in said(lws(1) | {"MOESERVE_NNODES": "4"})
