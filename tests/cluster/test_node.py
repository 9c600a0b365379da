"""Two machines simulated on one: a fleet, real agents and made-up tokens; losses and returns."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from moeserve.actor.handshake import keys_of
from moeserve.cluster.fleet import Fleet
from moeserve.cluster.forks import LocalHost
from moeserve.cluster.node import NodeAgent, wire_opener
from moeserve.cluster.order import EngineOrder, Role
from moeserve.cluster.rendezvous import Admitted
from moeserve.config import Config, ParallelConfig, config_of
from moeserve.errors import DoesNotFit
from moeserve.frontend.front_end import FrontEnd
from tests.ports import free_port

from .test_fleet import FAST, answers, some, until
from .test_rendezvous import SECRET

BOOT_S = 90


@dataclass
class Node:
    """An agent process. log: what it wrote."""

    process: subprocess.Popen[bytes]
    log: Path

    def engines(self, front: FrontEnd) -> list[psutil.Process]:
        """Return the fleet's engines that run on this node."""
        here = psutil.Process(self.process.pid).children()
        return [
            process
            for process in here
            if process.pid in [engine.pid for engine in front.fleet.view.engines]
        ]

    def ends(self, *codes: int) -> None:
        """Wait for the process to end with one of `codes` (default: 0).

        The assertion shows its log.
        """
        assert self.process.wait(30) in (codes or (0,)), self.log.read_text()


class Cluster:
    """Settings that all machines share, and the agents of this test."""

    def __init__(self, folder: Path, dp: int = 2) -> None:
        self.folder = folder
        key = folder / "key"
        key.write_text(SECRET)
        key.chmod(0o600)
        self.parallel: dict[str, Any] = {
            "dp": dp,
            "nnodes": 2,
            "rendezvous": f"127.0.0.1:{free_port()}",
            "cluster_key_file": str(key),
            "rebalance": "off",
        }
        self.nodes: list[Node] = []

    def node(self, rank: int = 1) -> Node:
        flags = [
            word
            for name, value in self.parallel.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        log = self.folder / f"node-{len(self.nodes)}"
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        settings = self.folder / "node.yaml"
        settings.write_text('parallel: {fork_server: "off"}')
        flags += ["--config", str(settings), "--node-rank", str(rank)]
        command = [sys.executable, "-m", "moeserve.cli.main", "serve", "demo", *flags]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env
            )
        self.nodes.append(Node(process, log))
        return self.nodes[-1]

    @asynccontextmanager
    async def fleet(self, builder: str = "paced", ready: bool = True) -> AsyncIterator[FrontEnd]:
        config = Config(parallel=ParallelConfig(fork_server="off", **self.parallel))
        link = Fleet(config, builder=f"builders:{builder}", policy=FAST)
        await link.start()
        front = FrontEnd(
            link,
            model_name="m",
            model_dir=Path(),
            tokenizer=None,
            chat_template=None,
            defaults={},
            max_queued=1000,
        )
        runs = asyncio.create_task(front.run())
        try:
            if ready:
                await asyncio.wait_for(front.wait_ready(), BOOT_S)
            yield front
        finally:
            await link.close(0.0)
            runs.cancel()
            await asyncio.gather(runs, return_exceptions=True)

    def close(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                node.process.kill()
                node.process.wait()


@pytest.fixture
def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: None
) -> Iterator[Callable[..., Cluster]]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    made: list[Cluster] = []

    def make(dp: int = 2) -> Cluster:
        made.append(Cluster(tmp_path, dp))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def test_engines_of_two_machines_serve_as_one_fleet(cluster: Callable[..., Cluster]) -> None:
    two = cluster()
    async with two.fleet(ready=False) as front:
        await until(lambda: front.phase.name == "waiting for machine 1 of 2")
        node = two.node()
        await front.wait_ready()
        (remote,) = node.engines(front)
        assert [engine.pid == remote.pid for engine in front.fleet.view.engines] == [False, True]
        assert SECRET not in " ".join(remote.cmdline() + psutil.Process(node.process.pid).cmdline())
        streams = await some(front, 8, 400)
        assert [engine.num_requests for engine in front.fleet.view.engines] == [4, 4]
        assert await streams == answers(8, 400)
    node.ends()
    assert "machine 0 stops or drains this machine" in node.log.read_text()
    assert SECRET not in node.log.read_text()
    assert not remote.is_running()


async def test_a_killed_agent_costs_no_token_and_may_come_back(
    cluster: Callable[..., Cluster],
) -> None:
    two = cluster(dp=4)
    node = two.node()
    async with two.fleet() as front:
        streams = await some(front, 8, 150)
        before = front.fleet.view.epoch
        engines = node.engines(front)
        assert len(engines) == 2
        node.process.kill()
        killed_s = time.monotonic()
        await until(lambda: not any(engine.up for engine in front.fleet.engines[2:]))
        assert time.monotonic() - killed_s < 15
        assert [engine.up for engine in front.fleet.engines] == [True, True, False, False]
        await until(lambda: not any(engine.is_running() for engine in engines))
        await until(lambda: front.phase.name == "waiting for machine 1 of 2")
        assert not front.fleet.view.complete
        again = two.node()
        assert await streams == answers(8, 150)
        assert len(again.engines(front)) == 2
        assert front.fleet.view.epoch == before + 1
    again.ends()


async def test_a_killed_engine_on_another_machine_is_replaced(
    cluster: Callable[..., Cluster],
) -> None:
    two = cluster()
    node = two.node()
    async with two.fleet() as front:
        streams = await some(front, 8, 150)
        (engine,) = node.engines(front)
        engine.kill()
        assert await streams == answers(8, 150)
        await until(lambda: front.fleet.view.engines[1].restarts > 0)  # streams may end before
        await until(lambda: front.fleet.view.complete)
        replaced = front.fleet.view.engines[1]
        assert replaced.restarts == 1
        (replacement,) = node.engines(front)
        assert replacement.pid == replaced.pid != engine.pid


async def test_an_agent_ends_at_once_when_told_and_is_waited_for(
    cluster: Callable[..., Cluster],
) -> None:
    two = cluster()
    node = two.node()
    async with two.fleet() as front:
        node.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(node.ends)
        await until(lambda: front.phase.name == "waiting for machine 1 of 2")
        stopping_s = time.monotonic()
    assert time.monotonic() - stopping_s < 15


async def test_why_an_engine_cannot_start_there_is_told_here(
    cluster: Callable[..., Cluster],
) -> None:
    two = cluster()
    node = two.node()
    async with two.fleet("too_large", ready=False) as front:
        with pytest.raises(DoesNotFit, match="needs 80 GiB, has 1 GiB"):
            await front.wait_ready()
    # Machine 0's own engine fails alike, sometimes before the node has come: then there is nobody
    # to join.
    node.ends(1, 2)
    assert "machine 0" in node.log.read_text()


async def test_log_lines_and_last_words_come_here(
    cluster: Callable[..., Cluster], capfd: Any
) -> None:
    two = cluster()
    node = two.node()
    async with two.fleet("second_crashes", ready=False) as front:
        with pytest.raises(Exception, match="ValueError: a bug"):
            await front.wait_ready()
    node.ends(1)
    assert "a bug" in node.log.read_text()
    assert "ValueError: a bug" in capfd.readouterr().err


async def test_an_engine_keeps_its_sockets_in_its_machines_folder(tmp_path: Path) -> None:
    config = config_of("demo")
    admitted = Admitted(address=f"ipc://{tmp_path / 'nobody'}", token="t")
    agent = NodeAgent(
        config, LocalHost(str(tmp_path)), wire_opener(admitted, keys_of(SECRET.encode()))
    )
    order = EngineOrder(
        config=config, address="tcp://a:1", token="t", born_s=0.0, role=Role(folder="elsewhere")
    )
    local = agent._adapt_order(msgspec.json.encode(order))
    agent._wire.close()
    assert local.role.folder == str(tmp_path)
