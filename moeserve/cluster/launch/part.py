"""The part of one machine: `python -m moeserve.cluster.launch.part`, which ssh, srun, Ray or the
launcher starts.

It runs `moeserve serve` and ends with it. Its stdin is the launcher: end-of-file, or silence for a
minute, means that the launcher or the network is gone, and then everything here ends. The secret
comes over stdin too and stays in memory: serve reads it from a file without a name that only this
user can open.
"""

import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress

import msgspec

from moeserve.actor.guard import die_with_parent
from moeserve.cluster.launch.protocol import (
    DRAIN,
    ENDED,
    KILL,
    PING,
    PONG,
    SILENCE_S,
    Order,
    PartHello,
    say,
)

END_S = 10.0  # for a server whose launcher is gone, before it is killed


def main() -> int:
    """Return the exit code of what was run, as a shell counts it."""
    with socket.create_server(("", 0)) as free:
        port = int(free.getsockname()[1])
    say(msgspec.json.encode(PartHello(_own_address(sys.argv[1]), port)).decode())
    line = _read_line()
    if not line:
        return 0  # the launcher has ended, or has no use for us
    order = msgspec.json.decode(line, type=Order)
    with suppress(OSError):
        os.chdir(order.folder)
    with tempfile.TemporaryFile(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as key:  # has no name
        key.write(order.key.encode())
        key.flush()
        path = f"/proc/{os.getpid()}/fd/{key.fileno()}"
        child = subprocess.Popen(
            [sys.executable, "-m", "moeserve.cli.main", *order.words],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            env=os.environ | order.env | {"MOESERVE_CLUSTER_KEY_FILE": path},
            preexec_fn=die_with_parent,
        )
        threading.Thread(target=_obey, args=(child,), daemon=True).start()
        code = child.wait()
    code = code if code >= 0 else 128 - code
    say(f"{ENDED}{code}")
    return code


def _own_address(way: str) -> str:
    """Return this machine's address on the network by which it was reached. way: ssh, slurm, or
    that address.
    """
    if way == "ssh":
        return os.environ["SSH_CONNECTION"].split()[2]
    if way != "slurm":
        return way
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or os.environ["SLURM_SRUN_COMM_HOST"]
    with socket.socket(
        socket.AF_INET6 if ":" in launcher else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        probe.connect((launcher, 9))  # sends nothing, but chooses our address
        return str(probe.getsockname()[0])


def _read_line() -> bytes:
    # Not sys.stdin: its buffer would swallow the bytes that follow.
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return b""
        line += byte
    return line


def _obey(child: subprocess.Popen[bytes]) -> None:
    """Obey the launcher until it is gone, and end the child then."""
    while select.select([0], [], [], SILENCE_S)[0] and (said := os.read(0, 4096)):
        if KILL in said:
            child.kill()
        elif DRAIN in said:
            child.terminate()
        if PING in said:
            say(PONG)
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()


if __name__ == "__main__":
    sys.exit(main())
