"""`moeserve launch --local 2`: two machines that are both this one, as real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port

from .conftest import Server
from .test_standby import stands_by, story, until

pytestmark = pytest.mark.timeout(400)  # machines start several times, one after the other
BOOT_S = 90
FLAGS = [
    "--threads",
    "1",
    "--max-model-len",
    "512",
    "--kv-cache-bytes",
    "64MiB",
    "--rebalance",
    "off",
]
COMPLETION = {"prompt": "Once", "max_tokens": 4, "temperature": 0}


@contextmanager
def launched(log: Path, *words: str, standby: bool = False) -> Iterator[Server]:
    port = free_port()
    serve = ["serve", *(["--standby"] if standby else [])]
    command = [
        sys.executable,
        "-m",
        "moeserve.cli.main",
        "launch",
        *words,
        "--",
        *serve,
        "--port",
        str(port),
        *FLAGS,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    all_of_it = psutil.Process(process.pid)
    try:
        yield Server(process, port, log)
    finally:
        left = all_of_it.children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        for it in left:
            it.kill()


def part(server: Server, number: int) -> psutil.Process:
    """The `moeserve serve` of a machine."""
    for it in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if (
                it.environ().get("MOESERVE_LAUNCH_NODE_RANK") == str(number)
                and "serve" in it.cmdline()
            ):
                return it
        except psutil.Error:  # it has just ended
            continue
    raise AssertionError(f"machine {number} has no part:\n{server.log.read_text()}")


def until_said(server: Server, text: str, times: int = 1) -> None:
    deadline_s = time.monotonic() + BOOT_S
    while server.log.read_text().count(text) < times:
        assert time.monotonic() < deadline_s, server.log.read_text()
        assert server.process.poll() is None, server.log.read_text()
        time.sleep(0.05)


def test_two_machines_from_one_command(tmp_path: Path) -> None:
    """They answer, a killed one joins again, and Ctrl-C ends all in order."""
    with launched(tmp_path / "log", "--local", "2") as server:
        until_said(server, "local-1 (machine 1 of 2): ready")
        status, before = server.post("/v1/completions", COMPLETION)
        assert status == 200
        nobody_sees_the_key(server)
        killed = part(server, 1)
        killed.kill()
        until_said(server, "local-1 (machine 1 of 2): ready", 2)
        log = server.log.read_text()
        states = re.findall(r"local-1 \(machine 1 of 2\): (.*)", log)
        assert states == [
            "connecting",
            "starting",
            "joined",
            "ready",
            "ended with code 137",
            "restarting",
            *states[1:4],
        ]
        assert "local-0 | moeserve serve: moeserve launch: machine 0 of 2" in log
        status, after = server.post("/v1/completions", COMPLETION)
        assert (status, after["choices"]) == (200, before["choices"])
        everything = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        assert "SIGINT: draining" in server.log.read_text()
        assert psutil.wait_procs(everything, timeout=30)[1] == []


async def test_front_ends_of_machine_0_die_and_then_all_of_it(tmp_path: Path) -> None:
    """A front end's death is no machine's: streams go on. The root's is: it starts anew, with the
    others' engines.
    """
    with launched(tmp_path / "log", "--local", "2", standby=True) as server:
        until_said(server, "local-1 (machine 1 of 2): ready")
        until(stands_by(server))
        expected = await story(server)
        root = part(server, 0)
        far = {it.pid for it in part(server, 1).children()}
        assert await story(server, kill_after=4, root=root) == expected
        until(stands_by(server))
        states = re.findall(r"local-\d \(machine \d of 2\): (.*)", server.log.read_text())
        times = server.log.read_text().count("local-0 (machine 0 of 2): ready")
        assert not {"lost", "restarting"} & set(states)
        assert not [state for state in states if state.startswith("ended")]
        root.kill()
        until_said(server, "local-0 (machine 0 of 2): restarting")
        until_said(server, "local-0 (machine 0 of 2): ready", times + 1)
        server.wait_ready()
        assert (
            "machine 0 is gone, and all requests with it; restarting it" in server.log.read_text()
        )
        assert await story(server) == expected
        assert {it.pid for it in part(server, 1).children()} == far
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0


def nobody_sees_the_key(server: Server) -> None:
    """Check that the key is secret.

    Its file has no name that others can open, and it is in no command line and no environment.
    """
    path = part(server, 0).environ()["MOESERVE_CLUSTER_KEY_FILE"]
    key = Path(path).read_text()
    assert len(key) > 40
    assert "(deleted)" in os.readlink(path)
    for it in [
        psutil.Process(server.process.pid),
        *psutil.Process(server.process.pid).children(recursive=True),
    ]:
        assert key not in " ".join(it.cmdline())
        assert key not in it.environ().values()


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path / "log", "--local", "2") as server:
        until_said(server, "local-1 (machine 1 of 2): joined")
        everything = psutil.Process(server.process.pid).children(recursive=True)
        assert len(everything) >= 4  # two parts, two servers
        server.process.kill()
        assert psutil.wait_procs(everything, timeout=30)[1] == []


def test_a_model_that_is_not_there_ends_all(tmp_path: Path) -> None:
    """It is missing on every machine here.

    The first machine to report it is named, and its exit code is the launcher's.
    """
    command = [
        sys.executable,
        "-m",
        "moeserve.cli.main",
        "launch",
        "--local",
        "2",
        "--",
        "serve",
        "/nowhere/model",
    ]
    said = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=BOOT_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert said.returncode == 3, said.stderr
    assert re.search(r"local-\d \| moeserve serve: .*/nowhere/model", said.stderr)
    assert re.search(r"local-\d \(machine \d of 2\): ended with code 3", said.stderr)
