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
_LEADERS = {"wkr": "ldr", "worker": "leader"}  # Grove's role of workers -> role of their leader


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


def find_allocation(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that this process belongs to, None if it has only one machine.

    Raises ConfigError if a variable is missing or wrong, or if launchers contradict each other.
    """
    allocations = [
        allocation
        for read_launcher in (_launch, _lws, _grove, _torchrun, _skypilot, _slurm)
        if (allocation := read_launcher(_Environment(env))) is not None
    ]
    relevant = [allocation for allocation in allocations if allocation.num_nodes > 1]
    if not relevant:  # a local rank other than 0 has nothing to do even on a single machine
        relevant = [allocation for allocation in allocations if allocation.local_rank]
    if not relevant:
        return None
    first, *others = relevant
    for other in others:
        # torchrun numbers the machines in its own order, which changes with each elastic restart.
        have_same_order = "torchrun" not in (first.source, other.source)
        have_other_ranks = have_same_order and first.node_rank != other.node_rank
        if first.num_nodes != other.num_nodes or have_other_ranks:
            claims = [
                f"{each.source} says machine {each.node_rank} of {each.num_nodes}"
                for each in (first, other)
            ]
            raise ConfigError(
                f"{', '.join(claims)}: launchers contradict each other; {BY_FLAGS}; {ALONE}"
            )
    local_rank = max(allocation.local_rank for allocation in allocations)
    return replace(first, local_rank=local_rank)


def complete_settings(
    parallel: ParallelConfig, given: Collection[str], env: Mapping[str, str]
) -> tuple[ParallelConfig, Allocation | None]:
    """Complete the settings from the allocation. Return them, and the allocation if it was used.

    Raises ConfigError if the user's settings contradict the environment.

    given: names of the settings that the user gave, which have precedence.
    """
    if set(given) >= _FLAGS or ("nnodes" in given and parallel.nnodes == 1):
        return parallel, None
    allocation = find_allocation(env)
    if allocation is None:
        return parallel, None
    if allocation.local_rank:  # this process will not serve, so it needs no settings
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


def slurm_step_warning(env: Mapping[str, str]) -> str:
    """Return a warning if a Slurm job has several machines, but this process is not a task of srun.

    Such a process runs in a batch script or a shell of salloc, on one machine. Return "" otherwise.
    """
    nodes = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or ""
    has_several = re.fullmatch("[0-9]{1,4}", nodes) is not None and int(nodes) > 1
    if _slurm_step(env) is not None or not has_several:
        return ""
    return (
        f"this Slurm job has {nodes} machines, but this process serves on this machine alone; to"
        " serve on all of them: srun --ntasks-per-node=1 moeserve serve ..."
    )


def expand_nodelist(nodelist: str) -> list[str]:
    """Expand a Slurm node list: "a[01-03,7],b" is a01, a02, a03, a7, b. Raises ValueError."""
    # `scontrol show hostnames` does the same, but is not available in a job's containers.
    parts = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+", nodelist)
    if not parts or ",".join(parts) != nodelist:
        raise ValueError("not a list such as a[01-03,7],b")
    names: list[str] = []
    for part in parts:
        pieces = re.split(r"\[(.*?)\]", part)  # plain text and numbers alternate
        choices = [_expand_numbers(piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
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


class _Environment:
    """An environment whose values are checked when read. Raises ConfigError with the variable."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables

    def is_any_set(self, *names: str) -> bool:
        """Return whether one of the variables is set."""
        return any(self.variables.get(name) for name in names)

    def text(self, name: str) -> str:
        """Return a variable that must be set."""
        if value := self.variables.get(name):
            return value
        raise ConfigError(
            f"{name} is not set, but other variables of its launcher are; {BY_FLAGS}; {ALONE}"
        )

    def number(self, name: str, low: int = 0, high: int = 2**32, why: str = "") -> int:
        """Return a number from `low` to `high`. why: appended to the error message."""
        value = self.text(name)
        if re.fullmatch("[0-9]{1,10}", value) is None or not low <= int(value) <= high:
            expected = str(low) if low == high else f"a number from {low} to {high}"
            raise self.error(name, f"must be {expected}{why}")
        return int(value)

    def rank(self, name: str, num_nodes: int, first: int = 0) -> int:
        """Return this machine's rank. The launcher's numbers begin with 0 at machine `first`."""
        high = num_nodes - 1 - first
        return first + self.number(name, low=0, high=high, why=f" with {num_nodes} machines")

    def num_nodes(self, name: str) -> int:
        """Return the number of machines."""
        return self.number(name, low=1, high=_MAX_MACHINES)

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
            raise self.error(name, "must have a host name or IP address") from None
        return host

    def error(self, name: str, why: str) -> ConfigError:
        """Return the error about a variable's value."""
        return ConfigError(f"{name}={self.text(name)[:100]!r}: {why}; {BY_FLAGS}; {ALONE}")


def _launch(env: _Environment) -> Allocation | None:
    """`moeserve launch`, on any machine."""
    if not env.is_any_set(protocol.NNODES):
        return None
    num_nodes = env.num_nodes(protocol.NNODES)
    return Allocation(
        source="moeserve launch",
        num_nodes=num_nodes,
        node_rank=env.rank(protocol.NODE_RANK, num_nodes),
        host=env.host(protocol.ADDRESS),
        port=env.number(protocol.PORT, low=1, high=65535),
    )


def _lws(env: _Environment) -> Allocation | None:
    """LeaderWorkerSet 0.6 or newer."""
    if not env.is_any_set("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"):
        return None
    num_nodes = env.num_nodes("LWS_GROUP_SIZE")
    return Allocation(
        source="LWS",
        num_nodes=num_nodes,
        node_rank=env.rank("LWS_WORKER_INDEX", num_nodes),
        host=env.host("LWS_LEADER_ADDRESS"),
    )


def _grove(env: _Environment) -> Allocation | None:
    """A Grove scaling group with a clique of one leader, NAME-ldr, and one of workers, NAME-wkr.

    Dynamo makes such groups. Other groups are not the machines of one server.
    """
    if not env.is_any_set("GROVE_PCSG_NAME"):
        return None
    name, _, role = env.text("GROVE_PCLQ_NAME").rpartition("-")
    leader_role = _LEADERS.get(role, role)
    if leader_role not in _LEADERS.values():
        return None
    num_nodes = env.num_nodes("GROVE_PCSG_TEMPLATE_NUM_PODS")
    index = "GROVE_PCLQ_POD_INDEX"  # within the clique
    if role == leader_role:
        rank = env.number(index, low=0, high=0, why=": a group has one leader")
    else:
        rank = env.rank(index, num_nodes, first=1)
    leader_pod = f"{name}-{leader_role}-0"
    service = env.host("GROVE_HEADLESS_SERVICE")
    host = f"{env.host('GROVE_PCLQ_NAME', leader_pod)}.{service}"
    return Allocation(source="Grove", num_nodes=num_nodes, node_rank=rank, host=host)


def _torchrun(env: _Environment) -> Allocation | None:
    # Other launchers also set RANK and MASTER_ADDR.
    if not env.is_any_set("TORCHELASTIC_RUN_ID", "GROUP_RANK"):
        return None
    size = env.number("WORLD_SIZE", low=1)
    local_size = env.number("LOCAL_WORLD_SIZE", low=1)
    if size % local_size or size // local_size > _MAX_MACHINES:
        raise env.error(
            "WORLD_SIZE",
            f"must be a multiple of LOCAL_WORLD_SIZE={local_size}, at most {_MAX_MACHINES} times as"
            " much",
        )
    num_nodes = size // local_size
    node_rank = env.rank("GROUP_RANK", num_nodes)
    env.number("LOCAL_RANK", high=local_size - 1)  # raises if it is wrong
    # Derived from RANK, because LOCAL_RANK is 0 everywhere with --virtual-local-rank.
    local_rank = env.number("RANK", high=size - 1) - node_rank * local_size
    if not 0 <= local_rank < local_size:
        raise env.error(
            "RANK", f"contradicts GROUP_RANK={node_rank} and LOCAL_WORLD_SIZE={local_size}"
        )
    port = env.number("MASTER_PORT", low=1, high=65535)
    if env.variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun itself listens there, so use a port beside it.
        port += 1 if port < 65535 else -1
    return Allocation(
        source="torchrun",
        num_nodes=num_nodes,
        node_rank=node_rank,
        host=env.host("MASTER_ADDR"),
        port=port,
        local_rank=local_rank,
    )


def _skypilot(env: _Environment) -> Allocation | None:
    if not env.is_any_set("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"):
        return None
    num_nodes = env.num_nodes("SKYPILOT_NUM_NODES")
    hosts = env.text("SKYPILOT_NODE_IPS").split()
    if len(hosts) != num_nodes:
        raise env.error(
            "SKYPILOT_NODE_IPS", f"has {len(hosts)} addresses, SKYPILOT_NUM_NODES is {num_nodes}"
        )
    return Allocation(
        source="SkyPilot",
        num_nodes=num_nodes,
        node_rank=env.rank("SKYPILOT_NODE_RANK", num_nodes),
        host=env.host("SKYPILOT_NODE_IPS", hosts[0]),
    )


def _slurm_step(variables: Mapping[str, str]) -> int | None:
    """Return the Slurm step that this process is a task of, None in shells and batch scripts."""
    text = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID")
    if not text:
        return None
    step = _Environment({"SLURM_STEP_ID": text}).number("SLURM_STEP_ID")
    return step if step < _FIRST_SPECIAL_STEP else None


def _slurm(env: _Environment) -> Allocation | None:
    """A Slurm job step with one task on each machine. It may have fewer machines than its job."""
    step = _slurm_step(env.variables)
    if step is None:
        return None
    has_step_size = env.is_any_set("SLURM_STEP_NUM_NODES")
    num_nodes = env.num_nodes("SLURM_STEP_NUM_NODES" if has_step_size else "SLURM_NNODES")
    if num_nodes == 1:  # also a shell of `srun --pty`
        return Allocation(source="Slurm", num_nodes=1, node_rank=0, host="localhost")
    num_tasks = num_nodes
    if env.is_any_set("SLURM_STEP_NUM_TASKS"):
        num_tasks = env.number("SLURM_STEP_NUM_TASKS")
    if env.number("SLURM_LOCALID") or num_tasks != num_nodes:
        wrong_name = "SLURM_LOCALID" if num_tasks == num_nodes else "SLURM_STEP_NUM_TASKS"
        raise env.error(
            wrong_name,
            f"each of the {num_nodes} machines needs one task: use srun --ntasks-per-node=1",
        )
    has_step_list = env.is_any_set("SLURM_STEP_NODELIST")
    nodelist = "SLURM_STEP_NODELIST" if has_step_list else "SLURM_JOB_NODELIST"
    try:
        hosts = expand_nodelist(env.text(nodelist))
    except ValueError as error:
        raise env.error(nodelist, str(error)) from None
    if len(hosts) != num_nodes:
        raise env.error(nodelist, f"has {len(hosts)} names, the step {num_nodes} machines")
    node_rank = env.rank("SLURM_NODEID", num_nodes)
    # Each step gets a different port, because jobs may share machine 0.
    port = _JOB_PORTS[(env.number("SLURM_JOB_ID") + step) % len(_JOB_PORTS)]
    return Allocation(
        source="Slurm",
        num_nodes=num_nodes,
        node_rank=node_rank,
        host=env.host(nodelist, hosts[0]),
        port=port,
    )
