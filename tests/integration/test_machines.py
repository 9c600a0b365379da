"""Two machines that share the experts of one model give the tokens of one, also over kill -9.

If network namespaces can be made, machine 1 has one of its own, joined by a veth pair; otherwise
both are on the loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.ports import free_port

from .conftest import Server
from .test_expert_parallel import ADMIN, BODIES, BOOT_S, tokens
from .test_faults import until

HERE = [body | {"max_tokens": 60} for body in BODIES[:4]]
# A network for each process of pytest: two of them may run tests of this file at once, each with
# machines of its own.
SUBNET = f"10.{64 + os.getpid() // 256 % 64}.{os.getpid() % 256}"
OURS = f"{SUBNET}.1"
THEIRS = f"{SUBNET}.2"


@dataclass
class Network:
    """How machine 1 is reached.

    `address` is machine 0's as seen from machine 1. `prefix` precedes a command to run on machine
    1.
    """

    address: str
    prefix: tuple[str, ...] = ()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    name = f"ms{os.getpid()}n"
    ours = f"ms{os.getpid()}a"
    theirs = f"ms{os.getpid()}b"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        yield Network("127.0.0.1")
        return
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        ip("addr", "add", f"{OURS}/30", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", name, "addr", "add", f"{THEIRS}/30", "dev", theirs)
        for device in (theirs, "lo"):
            ip("-n", name, "link", "set", device, "up")
        yield Network(OURS, ("ip", "netns", "exec", name))
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", ours)
        ip("netns", "del", name)


class Machines:
    """Machine 0, and one agent after the other."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.rendezvous = f"{network.address}:{free_port()}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.key("key", "the secret of two machines")
        self.key("admin", "root")
        self.port = free_port()
        self.log = folder / "machine-0"
        self.pair: Pair | None = None

    def key(self, name: str, secret: str) -> None:
        path = self.folder / name
        path.write_text(secret)
        path.chmod(0o600)

    def _start(
        self, log: Path, prefix: tuple[str, ...], flags: list[str]
    ) -> subprocess.Popen[bytes]:
        flags = [
            "--dp",
            "2",
            "--nnodes",
            "2",
            "--threads",
            "1",
            "--max-model-len",
            "512",
            "--encrypt-rows",
            *flags,
        ]
        flags += ["--kv-cache-bytes", "64MiB", "--rebalance", "off", "--log-level", "debug"]
        command = [*prefix, sys.executable, "-m", "moeserve.cli.main", "serve", *flags]
        with log.open("wb") as out:
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )
        return self.processes[-1]

    def first(self) -> Server:
        key = ["--cluster-key-file", str(self.folder / "key")]
        key += ["--admin-key-file", str(self.folder / "admin")]
        process = self._start(
            self.log, (), ["--port", str(self.port), "--rendezvous", self.rendezvous, *key]
        )
        return Server(process, self.port, self.log)

    def node(
        self, log: str, *, key: str = "key", rendezvous: str = "", dp: str = "2"
    ) -> subprocess.Popen[bytes]:
        flags = ["--node-rank", "1", "--rendezvous", rendezvous or self.rendezvous, "--dp", dp]
        flags += ["--cluster-key-file", str(self.folder / key)]
        return self._start(self.folder / log, self.network.prefix, flags)

    def whys(self, **options: dict[str, str]) -> list[str]:
        """Return the messages of agents that cannot join."""
        nodes = [self.node(log, **settings) for log, settings in options.items()]
        assert [node.wait(BOOT_S) for node in nodes] == [2] * len(nodes)
        return [(self.folder / log).read_text() for log in options]

    def engine_of(self, node: subprocess.Popen[bytes]) -> psutil.Process:
        """The engine of a machine: its agent's youngest child (the oldest is the fork server)."""
        return max(psutil.Process(node.pid).children(), key=psutil.Process.create_time)


@pytest.fixture(scope="module")
def machines(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    it = Machines(network, tmp_path_factory.mktemp("machines"))
    yield it
    for process in it.processes:
        if process.poll() is None:
            process.kill()
            process.wait()


@dataclass
class Pair:
    """The running server, and the agent of machine 1 with the name of its log."""

    server: Server
    node: subprocess.Popen[bytes]
    log: str


@pytest.fixture
def pair(machines: Machines) -> Pair:
    """The same two machines for all tests, or new ones where a test has ended them."""
    if machines.pair is None or machines.pair.server.process.poll() is not None:
        machines.pair = started(machines)
    return machines.pair


def started(machines: Machines) -> Pair:
    """Starts both machines, and two agents that may not join."""
    server = machines.first()
    deadline_s = time.monotonic() + BOOT_S
    while "waiting for machine 1 of 2" not in phase(server):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    machines.key("other", "not the secret of two machines")
    wrong_key, dp = machines.whys(wrong_key={"key": "other"}, dp={"dp": "4"})
    assert "is the cluster key there the same?" in wrong_key
    assert "--dp is 4 on machine 1, 2 on machine 0" in dp
    node = machines.node("node")
    server.wait_ready(BOOT_S)
    return Pair(server, node, "node")


async def ask(url: str, seen: list[list[int]]) -> list[list[int]]:
    async with aiohttp.ClientSession() as session:
        streams = (tokens(session, url, body, mine) for body, mine in zip(HERE, seen, strict=True))
        return await asyncio.gather(*streams)


@pytest.fixture(scope="module")
def alone(server: Server) -> list[list[int]]:
    """Return the answers of one engine on one machine."""
    return asyncio.run(ask(server.url, [[] for _ in HERE]))


def test_who_cannot_join_says_why(machines: Machines) -> None:
    unused = f"{machines.network.address}:{free_port()}"
    asked = {"nobody": {"rendezvous": unused}, "nowhere": {"rendezvous": "nowhere.invalid:29500"}}
    if (
        machines.network.prefix
    ):  # without the right to make network namespaces other machines may be reachable
        silent = f"{OURS[:-1]}3:29500"
        asked |= {
            "unreachable": {"rendezvous": "192.0.2.1:29500"},
            "silent": {"rendezvous": silent},
        }
    nobody, nowhere, *others = machines.whys(**asked)
    assert (
        f"nobody listens at tcp://{unused}: start machine 0 first, or check --rendezvous" in nobody
    )
    # By the resolver's answer, or by none: some networks drop what asks for such a name.
    assert (
        "cannot resolve 'nowhere.invalid'" in nowhere
        or "'nowhere.invalid' was not resolved" in nowhere
    )
    for said, address in zip(
        others, ("192.0.2.1:29500", f"tcp://{OURS[:-1]}3:29500"), strict=False
    ):
        assert address in said


def test_the_engines_are_on_both_machines(pair: Pair, machines: Machines) -> None:
    assert machines.engine_of(pair.node).is_running()
    assert "shm serves one machine, these ranks are on 2" in machines.log.read_text()


async def test_two_machines_say_what_one_says(pair: Pair, alone: list[list[int]]) -> None:
    assert await ask(pair.server.url, [[] for _ in HERE]) == alone


async def test_a_lost_machine_costs_no_token(
    pair: Pair, machines: Machines, alone: list[list[int]]
) -> None:
    seen: list[list[int]] = [[] for _ in HERE]
    streams = asyncio.create_task(ask(pair.server.url, seen))
    await until(lambda: all(len(mine) >= 10 for mine in seen))
    engine = machines.engine_of(pair.node)
    pair.node.kill()
    pair.node.wait()
    await until(lambda: not engine.is_running())
    await until(lambda: "waiting for machine 1 of 2" in phase(pair.server))
    assert not streams.done()
    pair.node = machines.node("again")
    pair.log = "again"
    assert await streams == alone
    await until(lambda: pair.server.get("/readyz")[0] == 200, BOOT_S)


async def test_a_drained_machine_costs_no_token_and_may_return(
    pair: Pair, machines: Machines, alone: list[list[int]]
) -> None:
    seen: list[list[int]] = [[] for _ in HERE]
    streams = asyncio.create_task(ask(pair.server.url, seen))
    await until(lambda: all(len(mine) >= 10 for mine in seen))
    async with aiohttp.ClientSession() as session:
        for machine, status, said in (
            (0, 400, "answers HTTP"),
            (1, 200, '"dp":1,"before":2'),
            (1, 409, "drained"),
        ):
            body = {"machine": machine}
            url = pair.server.url + "/v1/admin/drain"
            async with session.post(url, json=body, headers=ADMIN) as answer:
                assert (answer.status, said in await answer.text()) == (status, True), (
                    await answer.text()
                )
    assert pair.node.wait(30) == 0
    assert await streams == alone
    assert pair.server.get("/readyz")[0] == 200
    assert states(pair.server) == (["serving"], ["here", "drained"])
    pair.node = machines.node("returned")
    pair.log = "returned"
    await until(lambda: states(pair.server) == (["serving"] * 2, ["here"] * 2), BOOT_S)
    assert await ask(pair.server.url, [[] for _ in HERE]) == alone


def test_without_machine_0_all_others_end(pair: Pair, machines: Machines) -> None:
    """Its own engines, those of the other machine, and their fork servers end."""
    ours = psutil.Process(pair.server.process.pid).children(recursive=True)
    theirs = psutil.Process(pair.node.pid).children(recursive=True)
    assert len(ours) >= 2
    assert len(theirs) >= 2
    pair.server.process.kill()
    assert pair.node.wait(30) == 1
    assert (
        "serve: machine 0 is lost: the connection was closed"
        in (machines.folder / pair.log).read_text()
    )
    assert psutil.wait_procs([*ours, *theirs], timeout=30)[1] == []


def states(server: Server) -> tuple[list[str], list[str]]:
    """Return the states of engines and of machines."""
    status = json.loads(server.get("/v1/experts")[1])
    return [engine["state"] for engine in status["engines"]], list(status["machines"].values())


def phase(server: Server) -> str:
    try:
        return server.get("/readyz")[1]
    except OSError:
        return ""
