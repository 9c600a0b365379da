"""`moeserve launch [where] -- serve MODEL ...`: starts and watches `serve` on several machines, or
prints files for other process managers.
"""

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moeserve.cluster.launch import protocol
from moeserve.cluster.launch.files import KINDS, Deployment
from moeserve.cluster.launch.kubernetes import run_on_kubernetes
from moeserve.cluster.launch.on_ray import STRATEGIES, start_ray_actors
from moeserve.cluster.launch.protocol import Order, PartHello
from moeserve.cluster.launch.supervise import Launch
from moeserve.cluster.launch.targets import (
    MAX_HOSTS,
    LaunchTarget,
    common_slots,
    in_slurm,
    on_this_machine,
    over_ssh,
    parse_hosts,
    read_hostfile,
)
from moeserve.errors import ConfigError

_SSH_TARGETS = ("hosts", "hostfile")
_FILE_TARGETS = ("kubernetes", "print")
# The launcher itself starts these machines.
_STARTED_TARGETS = (*_SSH_TARGETS, "slurm", "ray", "local")
_TARGET_FLAGS = (*_STARTED_TARGETS, *_FILE_TARGETS)
_TARGETS_OF_FLAG = {  # flag -> the targets for which it has an effect
    "ssh_option": _SSH_TARGETS,
    "python": _SSH_TARGETS,
    "env": _STARTED_TARGETS,
    "max_restarts": _STARTED_TARGETS,
    "nodes": (*_FILE_TARGETS, "ray"),
    "ray_address": ("ray",),
    "ray_placement": ("ray",),
    "gpus_per_node": ("ray",),
    "namespace": ("kubernetes",),
    "image": ("kubernetes", "print lws", "print compose"),
}
# Settings of `moeserve serve` that the launcher sets, so users must not.
_LAUNCHER_SETTINGS = ("nnodes", "node_rank", "cluster_key_file")


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """The command `serve ...` for every machine."""

    words: list[str]
    flags: argparse.Namespace  # as given on the command line, without the environment

    def number(self, name: str, default: int) -> int:
        """Return the value of a numeric setting."""
        from moeserve.cli.settings import setting_named

        given = getattr(self.flags, name)
        if given is None:
            return default
        return int(setting_named(name).read(given, f"flag {_flag(name)}"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = (
        "%(prog)s [--hosts A,B,... | --hostfile FILE | --slurm | --ray | --kubernetes | --local N "
        "| --print KIND] "
        "-- serve MODEL ..."
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts", metavar="A,B,...", help="start on these hosts over ssh; the first serves HTTP"
    )
    where.add_argument(
        "--hostfile", metavar="FILE", help="hosts, one per line: host, host slots=N or host:N"
    )
    where.add_argument("--slurm", action="store_true", help="start on the nodes of this Slurm job")
    where.add_argument(
        "--ray",
        action="store_true",
        help="start on the nodes of a Ray cluster (pip install 'moeserve[ray]')",
    )
    where.add_argument(
        "--kubernetes",
        action="store_true",
        help="start as pods of a LeaderWorkerSet, using the system's kubectl",
    )
    where.add_argument(
        "--local", metavar="N", help="start N 'machines' on this computer, to try it"
    )
    where.add_argument(
        "--print",
        choices=KINDS,
        help="print a file for another process manager, and start nothing",
    )
    parser.add_argument(
        "--ssh-option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="option for ssh, as in ssh_config; may be repeated",
    )
    parser.add_argument(
        "--python",
        metavar="COMMAND",
        help="shell command that runs Python on the hosts [the path of this Python]",
    )
    parser.add_argument(
        "--env",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="environment variable for all machines; may be repeated",
    )
    parser.add_argument(
        "--max-restarts", metavar="N", help="maximum restarts of a machine per hour [10]"
    )
    parser.add_argument(
        "--nodes",
        metavar="N",
        help="number of machines, for --print, --kubernetes and --ray [Ray: all nodes]",
    )
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="Ray cluster: host:port or ray://host:10001 [this node's cluster]",
    )
    parser.add_argument(
        "--ray-placement",
        choices=STRATEGIES,
        help="spread: one Ray node per machine; pack: few nodes [spread]",
    )
    parser.add_argument(
        "--gpus-per-node", metavar="N", help="GPUs that each machine requests from Ray [0]"
    )
    parser.add_argument("--namespace", help="Kubernetes namespace [kubectl's current one]")
    parser.add_argument(
        "--image",
        help="container image, for --kubernetes, --print lws and --print compose [moeserve]",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- serve ...",
        help="the command for all machines, as on one machine",
    )
    parser.epilog = (
        "Ctrl-C or SIGTERM lets running requests finish; a second one stops at once. A machine "
        "that dies is restarted, and requests resume. When machine 0 ends, all end, with its exit "
        "code. See docs/multi-node.md."
    )


def run(args: argparse.Namespace) -> int:
    """Serve until machine 0 ends, and return its exit code. Raises ConfigError."""
    if not any(getattr(args, name) for name in _TARGET_FLAGS):
        raise ConfigError(f"choose where to start: one of {', '.join(map(_flag, _TARGET_FLAGS))}")
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    command = _parse_command(words)
    _check_flags(args)
    if args.print:
        sys.stdout.write(KINDS[args.print](_deployment(args, command)))
        return 0
    if args.kubernetes:
        return asyncio.run(run_on_kubernetes(_deployment(args, command), args.namespace))
    env = _environment(args.env)
    targets, slots_per_machine = _targets(args)
    command = _with_engines(command, len(targets), slots_per_machine)
    key = secrets.token_urlsafe(32) if len(targets) > 1 else ""

    def make_order(rank: int, hello_of_first: PartHello) -> Order:
        env_of_machine = {
            protocol.NNODES: str(len(targets)),
            protocol.NODE_RANK: str(rank),
            protocol.ADDRESS: str(hello_of_first.address),
            protocol.PORT: str(hello_of_first.port),
        }
        return Order(words=command.words, env=env | env_of_machine, folder=os.getcwd(), key=key)

    max_restarts = _number(args.max_restarts or "10", "--max-restarts", low=0, high=10**6)
    return asyncio.run(Launch(targets, make_order, max_restarts).run())


def _parse_command(words: Sequence[str]) -> ServeCommand:
    """Parse the command for all machines. Raises ConfigError; an unknown flag ends the process."""
    from moeserve.cli.main import build_parser, parse

    if list(words[:1]) != ["serve"]:
        raise ConfigError(
            "put the command for all machines after --, as in `-- serve MODEL --dp 2`; got "
            f"{' '.join(words)!r:.100}"
        )
    flags = parse(build_parser("serve"), list(words[1:]))
    for name in _LAUNCHER_SETTINGS:
        variable = f"MOESERVE_{name.upper()}"
        origin = ""
        if getattr(flags, name) is not None:
            origin = _flag(name)
        elif os.environ.get(variable):
            origin = variable
        if origin:
            raise ConfigError(
                f"{origin}: omit it, because the launcher numbers the machines and gives them a"
                " common key"
            )
    return ServeCommand(list(words), flags)


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags without effect, and for missing required flags."""
    target = next(name for name in _TARGET_FLAGS if getattr(args, name))
    # The same with the kind of file, as `_TARGETS_OF_FLAG` has it.
    target_and_kind = target if target != "print" else f"print {args.print}"
    for name, targets in _TARGETS_OF_FLAG.items():
        if getattr(args, name) and not {target, target_and_kind} & set(targets):
            raise ConfigError(f"{_flag(name)} is only for {', '.join(map(_flag, targets))}")
    if target in _FILE_TARGETS and not args.nodes:
        raise ConfigError(f"--{target_and_kind} needs --nodes N, the number of machines")
    if args.kubernetes and not args.image:
        raise ConfigError("--kubernetes needs --image IMAGE, which the nodes can pull")


def _targets(args: argparse.Namespace) -> tuple[list[LaunchTarget], int | None]:
    """Return the machines, and the number of slots (processes) per machine if it was given."""
    if args.slurm:
        return in_slurm(os.environ), None
    if args.ray:
        nodes = _number(args.nodes, "--nodes", low=1, high=MAX_HOSTS) if args.nodes else None
        gpus = _number(args.gpus_per_node or "0", "--gpus-per-node", low=0, high=1024)
        return start_ray_actors(nodes, args.ray_address, args.ray_placement or "spread", gpus), None
    if args.local:
        return on_this_machine(_number(args.local, "--local", low=1, high=MAX_HOSTS)), None
    hosts = parse_hosts(args.hosts) if args.hosts else read_hostfile(args.hostfile)
    return over_ssh(hosts, args.python, args.ssh_option), common_slots(hosts)


def _with_engines(
    command: ServeCommand, num_machines: int, slots_per_machine: int | None
) -> ServeCommand:
    """Return the command with a number of engines: --dp if given, otherwise as many as the
    machines' slots hold, or one per machine. Raises ConfigError if slots and flags contradict each
    other.
    """
    tp = command.number("tp", int(os.environ.get("MOESERVE_TP") or 1))
    if slots_per_machine is not None and slots_per_machine % tp:
        raise ConfigError(
            f"slots={slots_per_machine} cannot be shared by engines of --tp {tp} processes"
        )
    num_engines = num_machines * (slots_per_machine or tp) // tp
    if command.flags.dp is None and (command.flags.config or os.environ.get("MOESERVE_DP")):
        return command  # `serve` reads the number from the file or the variable
    dp = command.number("dp", num_engines)
    if slots_per_machine is not None and dp != num_engines:
        raise ConfigError(
            f"--dp {dp} contradicts slots={slots_per_machine}: {num_machines} machines have "
            f"{num_engines} engines of --tp {tp}"
        )
    if dp < num_machines:
        raise ConfigError(
            f"--dp {dp}: each of the {num_machines} machines needs an engine; use "
            f"--dp {num_machines} or more"
        )
    words = command.words if command.flags.dp is not None else [*command.words, "--dp", str(dp)]
    return ServeCommand(words, command.flags)


def _environment(given: Sequence[str]) -> dict[str, str]:
    """Return the variables for all machines: MOESERVE_ variables and --env. Raises ConfigError."""
    from moeserve.cli.settings import PREFIX

    env = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in os.environ):
            raise ConfigError(
                f"--env {text}: must be NAME=VALUE, or the name of a variable that is set here"
            )
        env[name] = value if equals else os.environ[name]
    return env


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _number(text: str, flag: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text[:9]) <= high:
        raise ConfigError(f"{flag} {text}: must be a number from {low} to {high}")
    return int(text)


def _deployment(args: argparse.Namespace, command: ServeCommand) -> Deployment:
    nodes = _number(args.nodes, "--nodes", low=1, high=MAX_HOSTS)
    model = Path(command.flags.model) if command.flags.model else None
    command = _with_engines(command, nodes, slots_per_machine=None)
    in_containers = args.print not in ("slurm", "systemd")
    if in_containers and model is not None and not model.is_absolute() and model.exists():
        raise ConfigError(
            f"MODEL {model}: containers need an absolute path; use {model.absolute()}"
        )
    # Port 0 is any free port, which a container's definition cannot name.
    min_port = 1 if in_containers else 0
    port = _number(str(command.number("port", 8000)), "--port", low=min_port, high=65535)
    return Deployment(
        words=command.words[1:],
        nodes=nodes,
        model=model,
        rendezvous=command.flags.rendezvous,
        host_given=command.flags.host is not None,
        https=command.flags.ssl_certfile is not None,
        port=port,
        drain_s=command.number("shutdown_timeout", 30),
        image=args.image or "moeserve",
    )
