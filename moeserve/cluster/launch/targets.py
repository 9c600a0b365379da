"""The machines of a launch, and the command that starts a part on each: ssh, srun, or none.

Users name machines with --hosts or in hostfiles, as for MPI and DeepSpeed.
"""

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moeserve.cluster.allocation import expand_nodelist
from moeserve.cluster.launch.connection import PartConnection, ProcessConnection
from moeserve.errors import ConfigError

MAX_HOSTS = 1024  # the limit of --nnodes
_NAME = r"(?P<name>(?:[\w.+-]+@)?(?:\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9_][\w.-]*))"
_SLOTS = r":(?P<short>[0-9]{1,5})|\s+slots\s*=\s*(?P<long>[0-9]{1,5})"  # host:8 or host slots=8
_HOST = re.compile(rf"{_NAME}(?:{_SLOTS})?")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that the user named."""

    name: str  # for ssh
    slots: int | None = None  # number of processes, if given


def parse_hosts(text: str) -> list[Host]:
    """Parse --hosts: comma-separated a, b:8 or user@c. Raises ConfigError."""
    return _check_hosts(
        (_parse_host(word.strip(), "--hosts") for word in text.split(",")), "--hosts"
    )


def read_hostfile(path: str) -> list[Host]:
    """Read a hostfile: a `host`, `host slots=8` or `host:8` per line, and # comments.

    Raises ConfigError.
    """
    with ConfigError.instead_of((OSError, UnicodeDecodeError), f"--hostfile {path}"):
        lines = Path(path).read_text("utf-8-sig").splitlines()
    uncommented = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    hosts = (_parse_host(text, f"{path}, line {number}") for number, text in uncommented if text)
    return _check_hosts(hosts, path)


def common_slots(hosts: Iterable[Host]) -> int | None:
    """Return the number of slots, which all hosts have; None if not given.

    Raises ConfigError if the hosts differ.
    """
    name_by_slots = {host.slots: host.name for host in hosts}
    if len(name_by_slots) > 1:
        differences = ", ".join(
            f"{name} has {slots or 'no number of'} slots" for slots, name in name_by_slots.items()
        )
        raise ConfigError(
            f"{differences}: all machines get the same number of engines, so give all of them the"
            " same slots, or none"
        )
    return next(iter(name_by_slots))


def _parse_host(text: str, where: str) -> Host:
    match = _HOST.fullmatch(text)
    slots = None
    if match is not None and (digits := match["short"] or match["long"]):
        slots = int(digits)
    if match is None or slots == 0:
        raise ConfigError(
            f"{where}: {text!r:.100} is no host; write `host`, `user@host`, `host slots=8` or"
            " `host:8` (8 is the number of processes; give ssh ports in ~/.ssh/config or by"
            " --ssh-option Port=N)"
        )
    name = match["name"].replace("[", "").replace("]", "")  # ssh takes IPv6 without brackets
    return Host(name, slots)


def _check_hosts(hosts: Iterable[Host], where: str) -> list[Host]:
    """Return the hosts. Raises ConfigError if one is named twice, or if there are too many."""
    checked: list[Host] = []
    for host in hosts:
        if host.name in (other.name for other in checked):
            raise ConfigError(
                f"{where}: {host.name} is named twice; name each machine once, and give the number"
                " of its processes as `slots`"
            )
        checked.append(host)
    if not 1 <= len(checked) <= MAX_HOSTS:
        raise ConfigError(f"{where}: names {len(checked)} hosts, must be 1 to {MAX_HOSTS}")
    return checked


PART = ("-m", "moeserve.cluster.launch.part")
_SSH_DEFAULTS = {  # after the user's options, because ssh uses the first value of each option
    "BatchMode": "yes",  # never prompt
    "ConnectTimeout": "5",
    "LogLevel": "ERROR",
}
_SSH_REMEDY = (
    "Check that `ssh -o BatchMode=yes HOST true` works, and that moeserve is installed there at"
    " the same path as here, or name its Python with --python"
)
_SLURM_REMEDY = (
    "Check that `srun hostname` works, and that moeserve is installed on all nodes at the same"
    " path as here"
)


@dataclass(frozen=True, slots=True)
class LaunchTarget:
    """A machine of a launch."""

    name: str  # for the log
    command: tuple[str, ...]  # starts the part
    remedy: str = ""  # what to check if the part does not start

    async def connect(self) -> PartConnection:
        """Start the part. Raises ConfigError if the command is not installed."""
        return await ProcessConnection.open(self.command)


def on_this_machine(number: int) -> list[LaunchTarget]:
    """Return `number` machines that are all processes on this one."""
    return [
        LaunchTarget(f"local-{rank}", (sys.executable, *PART, "127.0.0.1"))
        for rank in range(number)
    ]


def over_ssh(
    hosts: Sequence[Host], python: str | None, options: Sequence[str]
) -> list[LaunchTarget]:
    """Return the hosts as machines that are reached by ssh, which reads ~/.ssh/config.

    Raises ConfigError.

    Args:
        python: shell command of Python on the hosts; by default the path of this Python.
        options: NAME=VALUE as in ssh_config.
    """
    for option in options:
        if "=" not in option or option.startswith(("-", "=")):
            raise ConfigError(
                f"--ssh-option {option}: must be NAME=VALUE as in ssh_config, for example Port=2222"
            )
    remote_command = f"{python or shlex.quote(sys.executable)} {' '.join(PART)} ssh"
    defaults = [f"{name}={value}" for name, value in _SSH_DEFAULTS.items()]
    ssh = ("ssh", "-T", *(f"-o{option}" for option in (*options, *defaults)), "--")
    return [
        LaunchTarget(host.name, (*ssh, host.name, remote_command), _SSH_REMEDY) for host in hosts
    ]


def in_slurm(env: Mapping[str, str]) -> list[LaunchTarget]:
    """Return the nodes of this Slurm job as machines.

    Each gets its own job step, so that it can be restarted alone. Raises ConfigError outside a job.
    """
    nodes = env.get("SLURM_JOB_NODELIST") if env.get("SLURM_JOB_ID") else None
    if not nodes:
        raise ConfigError(
            "--slurm: this is not a Slurm job; run it in `salloc --nodes N --no-kill` or a batch"
            " script (`moeserve launch --print slurm --nodes N -- serve MODEL` writes one)"
        )
    with ConfigError.instead_of(ValueError, f"SLURM_JOB_NODELIST={nodes!r:.100}"):
        names = expand_nodelist(nodes)
    srun = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--no-kill", "--unbuffered", "--quiet")
    part = (sys.executable, *PART, "slurm")
    return [
        LaunchTarget(name, (*srun, f"--nodelist={name}", *part), _SLURM_REMEDY) for name in names
    ]
