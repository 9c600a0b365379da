"""Read a launcher's environment variables: the number of machines, this machine's rank, machine 0.

The variables of `moeserve launch`, LWS, Grove, torchrun, SkyPilot and Slurm are read, in this
order. All functions are pure: they map an environment to an `Allocation`. Empty variables count as
unset.
"""

import ipaddress
import itertools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from moeserve.cluster.launch import protocol
from moeserve.config import ParallelConfig
from moeserve.errors import ConfigError

PORT = 29500  # default port of the rendezvous
ALONE = "--nnodes 1 serves on this machine alone"
BY_FLAGS = "--nnodes, --node-rank and --rendezvous together override the environment"
_FLAGS = {"nnodes", "node_rank", "rendezvous"}
_MAX_MACHINES = 1024  # the limit of --nnodes
_FIRST_SPECIAL_STEP = 0xFFFFFF00  # Slurm's step ids from here on are batch scripts and shells
_JOB_PORTS = range(20_000, 30_000)  # below the range of ephemeral ports
_LEADERS = {"wkr": "ldr", "worker": "leader"}  # names of a Grove clique: of workers -> of leader


@dataclass(frozen=True, slots=True)
class Allocation:
    """The machines that a launcher has allocated."""

    source: str  # name of the launcher
    num_nodes: int
    node_rank: int
    host: str  # of the rendezvous, on machine 0
    port: int = PORT
    local_rank: int = 0  # of this process on its machine

    @property
    def rendezvous(self) -> str:
        """The address of machine 0 in the form of --rendezvous."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that this process belongs to, None if it has only one machine.

    Raises ConfigError if a variable is missing or wrong, or if launchers contradict each other.
    """
    allocations = [
        allocation
        for read in (_launch, _lws, _grove, _torchrun, _skypilot, _slurm)
        if (allocation := read(_Variables(env))) is not None
    ]
    relevant = [allocation for allocation in allocations if allocation.num_nodes > 1]
    if not relevant:
        relevant = [allocation for allocation in allocations if allocation.local_rank]
    if not relevant:
        return None
    first, *others = relevant
    for other in others:
        # torchrun numbers the machines in its own order, which changes with each elastic restart.
        same_order = "torchrun" not in (first.source, other.source)
        if first.num_nodes != other.num_nodes or (
            same_order and first.node_rank != other.node_rank
        ):
            claims = [
                f"{each.source} says machine {each.node_rank} of {each.num_nodes}"
                for each in (first, other)
            ]
            raise ConfigError(
                f"{', '.join(claims)}: launchers contradict each other; {BY_FLAGS}; {ALONE}"
            )
    local_rank = max(allocation.local_rank for allocation in allocations)
    return replace(first, local_rank=local_rank)


def fill_in(
    parallel: ParallelConfig, given: Collection[str], env: Mapping[str, str]
) -> tuple[ParallelConfig, Allocation | None]:
    """Fill in the settings from the allocation, and return them with the allocation if it was used.

    Raises ConfigError if the user's settings contradict the environment.

    given: names of the settings that the user gave, which have precedence.
    """
    if set(given) >= _FLAGS or ("nnodes" in given and parallel.nnodes == 1):
        return parallel, None
    allocation = find(env)
    if allocation is None:
        return parallel, None
    if allocation.local_rank:
        return parallel, allocation
    allocated = {"nnodes": allocation.num_nodes, "node_rank": allocation.node_rank}
    for name, allocated_value in allocated.items():
        if name in given and (value := getattr(parallel, name)) != allocated_value:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is {value}, {allocation.source} says {allocated_value}: omit it; or "
                f"{BY_FLAGS}; {ALONE}"
            )
    if parallel.dp < allocation.num_nodes:
        raise ConfigError(
            f"--dp {parallel.dp}: each of the {allocation.num_nodes} machines of "
            f"{allocation.source} needs an engine; give at least --dp {allocation.num_nodes}; "
            f"{ALONE}"
        )
    rendezvous = parallel.rendezvous or allocation.rendezvous
    completed = replace(
        parallel,
        nnodes=allocation.num_nodes,
        node_rank=allocation.node_rank,
        rendezvous=rendezvous,
    )
    return completed, allocation


def outside_of_slurm_step(env: Mapping[str, str]) -> str:
    """Return a warning if a Slurm job has several machines, but this process is not a task of srun.

    Such a process runs in a batch script or a shell of salloc, on one machine. Return "" otherwise.
    """
    nodes = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or ""
    if _step(env) is not None or not re.fullmatch("[0-9]{1,4}", nodes) or int(nodes) < 2:
        return ""
    return (
        f"this Slurm job has {nodes} machines, but this process serves on this machine alone; to"
        " serve on all of them: srun --ntasks-per-node=1 moeserve serve ..."
    )


def expand(nodelist: str) -> list[str]:
    """Expand a Slurm node list: "a[01-03,7],b" is a01, a02, a03, a7, b. Raises ValueError."""
    # `scontrol show hostnames` does the same, but is not available in a job's containers.
    parts = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+", nodelist)
    if not parts or ",".join(parts) != nodelist:
        raise ValueError("not a list such as a[01-03,7],b")
    names: list[str] = []
    for part in parts:
        plain_or_numbers = re.split(r"\[(.*?)\]", part)  # plain text and numbers alternate
        choices = [
            _expand_numbers(piece) if i % 2 else [piece] for i, piece in enumerate(plain_or_numbers)
        ]
        if len(names) + math.prod(map(len, choices)) > _MAX_MACHINES:
            raise ValueError(f"more than {_MAX_MACHINES} names")
        names += map("".join, itertools.product(*choices))
    return names


def _expand_numbers(text: str) -> list[str]:
    """Expand the numbers in brackets: "01-03,7" is 01, 02, 03, 7. Raises ValueError."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            raise ValueError(f"[{text}] are no numbers such as [01-03,7]")
        low = int(match[1])
        high = int(match[2] or match[1])
        if not low <= high < low + _MAX_MACHINES:
            raise ValueError(f"{part} is no range of at most {_MAX_MACHINES} numbers")
        numbers += [f"{number:0{len(match[1])}}" for number in range(low, high + 1)]
    return numbers


class _Variables:
    """An environment whose values are checked when read. Raises ConfigError with the variable."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env

    def any(self, *names: str) -> bool:
        """Return whether one of the variables is set."""
        return any(self.env.get(name) for name in names)

    def text(self, name: str) -> str:
        """Return a variable that must be set."""
        if value := self.env.get(name):
            return value
        raise ConfigError(
            f"{name} is not set, but other variables of its launcher are; {BY_FLAGS}; {ALONE}"
        )

    def number(self, name: str, low: int = 0, high: int = 2**32, why: str = "") -> int:
        """Return a number from `low` to `high`. why: appended to the error message."""
        value = self.text(name)
        if re.fullmatch("[0-9]{1,10}", value) is None or not low <= int(value) <= high:
            raise self.wrong(
                name, f"must be {low if low == high else f'a number from {low} to {high}'}{why}"
            )
        return int(value)

    def rank(self, name: str, nodes: int, first: int = 0) -> int:
        """Return this machine's rank. The launcher's numbers begin with 0 at machine `first`."""
        return first + self.number(name, 0, nodes - 1 - first, f" with {nodes} machines")

    def nodes(self, name: str) -> int:
        """Return the number of machines."""
        return self.number(name, 1, _MAX_MACHINES)

    def host(self, name: str, value: str | None = None) -> str:
        """Return a host name or IP address.

        value: the host, if it is only a part of the variable's value or derived from it.
        """
        host = self.text(name) if value is None else value
        try:
            if ":" in host:
                ipaddress.IPv6Address(host)
            elif re.fullmatch(r"(?!-|.{254})[0-9A-Za-z_-]+(\.[0-9A-Za-z_-]+)*\.?", host) is None:
                raise ValueError
        except ValueError:
            raise self.wrong(name, "must have a host name or IP address") from None
        return host

    def wrong(self, name: str, why: str) -> ConfigError:
        """Return the error about a variable's value."""
        return ConfigError(f"{name}={self.text(name)[:100]!r}: {why}; {BY_FLAGS}; {ALONE}")


def _launch(read: _Variables) -> Allocation | None:
    """`moeserve launch`, on any machine."""
    if not read.any(protocol.NNODES):
        return None
    nodes = read.nodes(protocol.NNODES)
    rank = read.rank(protocol.NODE_RANK, nodes)
    return Allocation(
        "moeserve launch",
        nodes,
        rank,
        read.host(protocol.ADDRESS),
        read.number(protocol.PORT, 1, 65535),
    )


def _lws(read: _Variables) -> Allocation | None:
    """LeaderWorkerSet 0.6 or newer."""
    if not read.any("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"):
        return None
    nodes = read.nodes("LWS_GROUP_SIZE")
    return Allocation(
        "LWS", nodes, read.rank("LWS_WORKER_INDEX", nodes), read.host("LWS_LEADER_ADDRESS")
    )


def _grove(read: _Variables) -> Allocation | None:
    """A Grove scaling group with a clique of one leader, NAME-ldr, and one of workers, NAME-wkr.

    Dynamo makes such groups. Other groups are not the machines of one server.
    """
    if not read.any("GROVE_PCSG_NAME"):
        return None
    clique, _, role = read.text("GROVE_PCLQ_NAME").rpartition("-")
    leader = _LEADERS.get(role, role)
    if leader not in _LEADERS.values():
        return None
    nodes = read.nodes("GROVE_PCSG_TEMPLATE_NUM_PODS")
    index = "GROVE_PCLQ_POD_INDEX"
    rank = (
        read.rank(index, nodes, 1)
        if role != leader
        else read.number(index, 0, 0, ": a group has one leader")
    )
    name = f"{clique}-{leader}-0"
    service = read.host("GROVE_HEADLESS_SERVICE")
    return Allocation("Grove", nodes, rank, f"{read.host('GROVE_PCLQ_NAME', name)}.{service}")


def _torchrun(read: _Variables) -> Allocation | None:
    # Other launchers set RANK and MASTER_ADDR, too.
    if not read.any("TORCHELASTIC_RUN_ID", "GROUP_RANK"):
        return None
    size = read.number("WORLD_SIZE", 1)
    local_size = read.number("LOCAL_WORLD_SIZE", 1)
    if size % local_size or size // local_size > _MAX_MACHINES:
        raise read.wrong(
            "WORLD_SIZE",
            f"must be a multiple of LOCAL_WORLD_SIZE={local_size}, at most {_MAX_MACHINES} times as"
            " much",
        )
    nodes = size // local_size
    node_rank = read.rank("GROUP_RANK", nodes)
    read.number("LOCAL_RANK", 0, local_size - 1)
    # Derived from RANK, because LOCAL_RANK is 0 everywhere with --virtual-local-rank.
    local_rank = read.number("RANK", 0, size - 1) - node_rank * local_size
    if not 0 <= local_rank < local_size:
        raise read.wrong(
            "RANK", f"contradicts GROUP_RANK={node_rank} and LOCAL_WORLD_SIZE={local_size}"
        )
    port = read.number("MASTER_PORT", 1, 65535)
    if read.env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens there
        port += 1 if port < 65535 else -1
    host = read.host("MASTER_ADDR")
    return Allocation("torchrun", nodes, node_rank, host, port, local_rank)


def _skypilot(read: _Variables) -> Allocation | None:
    if not read.any("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"):
        return None
    nodes = read.nodes("SKYPILOT_NUM_NODES")
    hosts = read.text("SKYPILOT_NODE_IPS").split()
    if len(hosts) != nodes:
        raise read.wrong(
            "SKYPILOT_NODE_IPS", f"has {len(hosts)} addresses, SKYPILOT_NUM_NODES is {nodes}"
        )
    rank = read.rank("SKYPILOT_NODE_RANK", nodes)
    return Allocation("SkyPilot", nodes, rank, read.host("SKYPILOT_NODE_IPS", hosts[0]))


def _step(env: Mapping[str, str]) -> int | None:
    """Return the Slurm step that this process is a task of, None in shells and batch scripts."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    if not step:
        return None
    number = _Variables({"SLURM_STEP_ID": step}).number("SLURM_STEP_ID")
    return number if number < _FIRST_SPECIAL_STEP else None


def _slurm(read: _Variables) -> Allocation | None:
    """A Slurm job step with one task on each machine. It may have fewer machines than its job."""
    if (step := _step(read.env)) is None:
        return None
    has_step_size = read.any("SLURM_STEP_NUM_NODES")
    nodes = read.nodes("SLURM_STEP_NUM_NODES" if has_step_size else "SLURM_NNODES")
    if nodes == 1:  # also a shell of `srun --pty`
        return Allocation("Slurm", 1, 0, "localhost")
    tasks = read.number("SLURM_STEP_NUM_TASKS") if read.any("SLURM_STEP_NUM_TASKS") else nodes
    if read.number("SLURM_LOCALID") or tasks != nodes:
        name = "SLURM_LOCALID" if tasks == nodes else "SLURM_STEP_NUM_TASKS"
        raise read.wrong(
            name, f"each of the {nodes} machines needs one task: use srun --ntasks-per-node=1"
        )
    name = "SLURM_STEP_NODELIST" if read.any("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    try:
        hosts = expand(read.text(name))
    except ValueError as error:
        raise read.wrong(name, str(error)) from None
    if len(hosts) != nodes:
        raise read.wrong(name, f"has {len(hosts)} names, the step {nodes} machines")
    rank = read.rank("SLURM_NODEID", nodes)
    # Each step gets a different port, because jobs may share machine 0.
    port = _JOB_PORTS[(read.number("SLURM_JOB_ID") + step) % len(_JOB_PORTS)]
    return Allocation("Slurm", nodes, rank, read.host(name, hosts[0]), port)
