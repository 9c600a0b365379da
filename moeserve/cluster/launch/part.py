"""The part of one machine: `python -m moeserve.cluster.launch.part`, started by ssh, srun, Ray or
the launcher.

It runs `moeserve serve` and ends with it. Its stdin is connected to the launcher. An end-of-file,
or silence for a minute, means that the launcher or the network is gone, so the part ends.

The cluster's secret also arrives over stdin, and is never written to disk: `moeserve serve` reads
it from an unnamed file in memory that only this user can open.
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
    write_message,
)

END_S = 10.0  # for a server to end when the launcher is gone, before it is killed


def main() -> int:
    """Run the part, and return the server's exit code (128 + n after signal n)."""
    with socket.socket() as reserving:
        # Bound until the end, so that nobody gets the port before the server of machine 0 listens
        # there. With SO_REUSEADDR, both may bind the port. This socket never listens.
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserving.bind(("", 0))
        port = int(reserving.getsockname()[1])
        write_message(msgspec.json.encode(PartHello(_own_address(sys.argv[1]), port)).decode())
        line = _read_line()
        if not line:
            return 0  # the launcher has ended, or does not need this part
        return _run(msgspec.json.decode(line, type=Order))


def _run(order: Order) -> int:
    """Run the server of this machine, and return its exit code (128 + n after signal n)."""
    with suppress(OSError):
        os.chdir(order.folder)
    # The file has no name, and is in memory if there is /dev/shm.
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryFile(dir=folder) as key:
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
        threading.Thread(target=_execute_commands, args=(child,), daemon=True).start()
        return_code = child.wait()
    # A negative return code is minus the signal.
    exit_code = return_code if return_code >= 0 else 128 - return_code
    write_message(f"{ENDED}{exit_code}")
    return exit_code


def _own_address(started_by: str) -> str:
    """Return this machine's address on the network by which it was reached.

    started_by: "ssh", "slurm", or the address itself.
    """
    if started_by == "ssh":
        return os.environ["SSH_CONNECTION"].split()[2]
    if started_by != "slurm":
        return started_by
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or os.environ["SLURM_SRUN_COMM_HOST"]
    family = socket.AF_INET6 if ":" in launcher else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((launcher, 9))  # sends nothing, but selects the local address
        return str(probe.getsockname()[0])


def _read_line() -> bytes:
    # Do not use sys.stdin, because its buffer would consume the bytes that follow the line.
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return b""
        line += byte
    return line


def _execute_commands(child: subprocess.Popen[bytes]) -> None:
    """Execute the launcher's commands until the launcher is gone, then end the child."""
    while select.select([0], [], [], SILENCE_S)[0] and (commands := os.read(0, 4096)):
        if KILL in commands:
            child.kill()
        elif DRAIN in commands:
            child.terminate()
        if PING in commands:
            write_message(PONG)
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()


if __name__ == "__main__":
    sys.exit(main())
