"""A machine's part, as ssh starts it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest
import zmq

from moeserve.cluster.launch.protocol import KILL, MARK

ORDER = {
    "words": ["serve", "--port", "0", "--max-model-len", "512"],
    "env": {},
    "folder": "/nowhere",
    "key": "",
}


def part(code: str = "", **env: str) -> subprocess.Popen[str]:
    run = f"import sys; from moeserve.cluster.launch import part; {code}\nsys.exit(part.main())"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", run, "ssh"]
    env = os.environ | {"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.2 22"} | env
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)


def ordered(process: subprocess.Popen[str]) -> dict[str, object]:
    """Send the part its order; return its hello."""
    assert process.stdin is not None
    assert process.stdout is not None
    hello = process.stdout.readline()
    assert hello.startswith(MARK)
    process.stdin.write(json.dumps(ORDER) + "\n")
    process.stdin.flush()
    return json.loads(hello[1:])


def test_it_says_by_which_address_it_was_reached_and_obeys() -> None:
    with part() as process:
        hello = ordered(process)
        assert hello["address"] == "10.0.0.2"
        assert 1024 <= int(str(hello["port"])) < 65536
        out, _ = process.communicate(KILL.decode())
        assert (process.returncode, out.split("\n")[-2]) == (137, MARK + "ended 137")


def test_nobody_gets_its_port_before_machine_0_listens_there() -> None:
    with part() as process:
        port = int(str(ordered(process)["port"]))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with zmq.Context() as context, context.socket(zmq.ROUTER) as listening:
            listening.bind(f"tcp://127.0.0.1:{port}")
        process.communicate(KILL.decode())


@pytest.mark.parametrize("silent", [True, False])
def test_it_ends_without_its_launcher(silent: bool) -> None:
    """A network that is gone is silent; a launcher that is gone closes the connection."""
    with part("part.SILENCE_S = 0.5; part.END_S = 1.0" if silent else "") as process:
        ordered(process)
        began = time.monotonic()
        if not silent:
            assert process.stdin is not None
            process.stdin.close()
        assert process.wait(15) in (0, 137, 143)
        assert time.monotonic() - began < 15


def test_a_part_that_nobody_wants_ends() -> None:
    with part() as process:
        process.communicate()
        assert process.returncode == 0
