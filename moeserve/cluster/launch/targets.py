"""Where parts run: the command that starts one on each machine, over ssh, by srun, or here."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeserve.cluster.allocation import expand
from moeserve.cluster.launch.connection import PartConnection, ProcessConnection
from moeserve.cluster.launch.hosts import Host
from moeserve.errors import ConfigError

PART = ("-m", "moeserve.cluster.launch.part")
_SSH = {  # the first value that ssh sees of an option counts
    "BatchMode": "yes",  # never ask
    "ConnectTimeout": "5",
    "LogLevel": "ERROR",
}
_SSH_REMEDY = (
    "Check that `ssh -o BatchMode=yes HOST true` works, and that moeserve is installed there at the path that it has "
    "here, or name its Python with --python"
)
_SLURM_REMEDY = (
    "Check that `srun hostname` works, and that moeserve is installed on all nodes at the path that it has here"
)


@dataclass(frozen=True, slots=True)
class LaunchTarget:
    """A machine, by its name for people, the command that starts its part, and what to check if that fails."""

    name: str
    command: tuple[str, ...]
    remedy: str = ""

    async def connect(self) -> PartConnection:
        """Starts the part. Raises ConfigError where the command is not installed."""
        return await ProcessConnection.open(self.command)


def on_this_machine(number: int) -> list[LaunchTarget]:
    """Returns `number` machines that are all this one."""
    return [LaunchTarget(f"local-{rank}", (sys.executable, *PART, "127.0.0.1")) for rank in range(number)]


def over_ssh(hosts: Sequence[Host], python: str | None, options: Sequence[str]) -> list[LaunchTarget]:
    """Returns the hosts, by the system's ssh, which reads the user's ~/.ssh/config. python: shell text that runs
    Python there; the path of ours by default. options: as in ssh_config, Port=2222. Raises ConfigError."""
    for option in options:
        if "=" not in option or option.startswith(("-", "=")):
            raise ConfigError(f"--ssh-option {option}: must be NAME=VALUE as in ssh_config, for example Port=2222")
    remote = f"{python or shlex.quote(sys.executable)} {' '.join(PART)} ssh"
    words = [f"-o{option}" for option in (*options, *(f"{name}={value}" for name, value in _SSH.items()))]
    return [LaunchTarget(host.name, ("ssh", "-T", *words, "--", host.name, remote), _SSH_REMEDY) for host in hosts]


def in_slurm(env: Mapping[str, str]) -> list[LaunchTarget]:
    """Returns the nodes of this job of Slurm: a step for each, so that one alone can be started again. Raises
    ConfigError outside of a job."""
    nodes = env.get("SLURM_JOB_NODELIST") if env.get("SLURM_JOB_ID") else None
    if not nodes:
        raise ConfigError(
            "--slurm: this is no job of Slurm; run it in `salloc --nodes N --no-kill` or a batch script "
            "(`moeserve launch --print slurm --nodes N -- serve MODEL` writes one)"
        )
    with ConfigError.instead_of(ValueError, f"SLURM_JOB_NODELIST={nodes!r:.100}"):
        names = expand(nodes)
    step = ("--nodes=1", "--ntasks=1", "--overlap", "--no-kill", "--unbuffered", "--quiet")
    return [
        LaunchTarget(it, ("srun", *step, f"--nodelist={it}", sys.executable, *PART, "slurm"), _SLURM_REMEDY)
        for it in names
    ]
