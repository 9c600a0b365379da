"""What a launcher tells its processes: how many machines there are, which one this is, and where
machine 0 is.

Variables of `moeserve launch`, LWS, Grove, torchrun, SkyPilot and Slurm are read, in this order.
The functions are pure: they map an environment to an `Allocation`. An empty variable counts as
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

PORT = 29500
ALONE = "--nnodes 1 serves on this machine alone"
BY_FLAGS = "--nnodes, --node-rank and --rendezvous together replace what the environment says"
_FLAGS = {"nnodes", "node_rank", "rendezvous"}
_MAX_MACHINES = 1024  # as --nnodes
_FIRST_SPECIAL_STEP = (
    0xFFFFFF00  # Slurm's numbers of steps that are none: the batch script, a shell of salloc
)
_JOB_PORTS = range(20_000, 30_000)  # below the ports that kernels give to whoever asks for any
_LEADERS = {"wkr": "ldr", "worker": "leader"}  # by the last word of a Grove clique's name


@dataclass(frozen=True, slots=True)
class Allocation:
    """One launcher's machines. host, port: of the rendezvous on machine 0. local_rank: of this
    process among those that the launcher started on this machine."""

    source: str
    num_nodes: int
    node_rank: int
    host: str
    port: int = PORT
    local_rank: int = 0

    @property
    def rendezvous(self) -> str:
        """The address of machine 0 as --rendezvous has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of several machines that this process belongs to, or None.

    Raises ConfigError for a variable that is missing or wrong, and for launchers that contradict
    each other.
    """
    found = [
        it
        for read in (_launch, _lws, _grove, _torchrun, _skypilot, _slurm)
        if (it := read(_Variables(env))) is not None
    ]
    several = [it for it in found if it.num_nodes > 1] or [it for it in found if it.local_rank]
    if not several:
        return None
    first, *others = several
    for other in others:
        # torchrun counts the machines in an order of its own, and anew after each elastic restart.
        same_order = "torchrun" not in (first.source, other.source)
        if first.num_nodes != other.num_nodes or (
            same_order and first.node_rank != other.node_rank
        ):
            told = [
                f"{it.source} says machine {it.node_rank} of {it.num_nodes}"
                for it in (first, other)
            ]
            raise ConfigError(
                f"{', '.join(told)}: launchers contradict each other; {BY_FLAGS}; {ALONE}"
            )
    return replace(first, local_rank=max(it.local_rank for it in found))


def apply(
    parallel: ParallelConfig, given: Collection[str], env: Mapping[str, str]
) -> tuple[ParallelConfig, Allocation | None]:
    """Return the settings with those of the allocation, and the allocation if it was used. given:
    names of settings that the user set, which win. Raises ConfigError where they contradict the
    environment."""
    if (
        set(given) >= _FLAGS
        or ("nnodes" in given and parallel.nnodes == 1)
        or (found := find(env)) is None
    ):
        return parallel, None
    if found.local_rank:
        return parallel, found
    for name, told in (("nnodes", found.num_nodes), ("node_rank", found.node_rank)):
        if name in given and (value := getattr(parallel, name)) != told:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is {value}, {found.source} says {told}: leave it out; or {BY_FLAGS};"
                f" {ALONE}"
            )
    if parallel.dp < found.num_nodes:
        raise ConfigError(
            f"--dp {parallel.dp}: the {found.num_nodes} machines of {found.source} need an engine"
            " each, "
            f"--dp {found.num_nodes} at least; {ALONE}"
        )
    rendezvous = parallel.rendezvous or found.rendezvous
    return replace(
        parallel, nnodes=found.num_nodes, node_rank=found.node_rank, rendezvous=rendezvous
    ), found


def outside_of_step(env: Mapping[str, str]) -> str:
    """Return advice to who has several machines of Slurm and starts on one: in a shell of salloc
    or a batch script.
    """
    nodes = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or ""
    if _step(env) is not None or not re.fullmatch("[0-9]{1,4}", nodes) or int(nodes) < 2:
        return ""
    return (
        f"this job of Slurm has {nodes} machines, and this is one process: serving on this"
        " machine alone; "
        "to serve on all of them: srun --ntasks-per-node=1 moeserve serve ..."
    )


def expand(nodelist: str) -> list[str]:
    """Return the names in Slurm's short form: "a[01-03,7],b" is a01, a02, a03, a7, b. Raises
    ValueError.
    """
    # Own code, not `scontrol show hostnames`: containers of a job have no scontrol, and the form is
    # this small.
    parts = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+", nodelist)
    if not parts or ",".join(parts) != nodelist:
        raise ValueError("not a list such as a[01-03,7],b")
    names: list[str] = []
    for part in parts:
        plain_or_numbers = re.split(r"\[(.*?)\]", part)  # plain text and numbers take turns
        choices = [_numbers(it) if i % 2 else [it] for i, it in enumerate(plain_or_numbers)]
        if len(names) + math.prod(map(len, choices)) > _MAX_MACHINES:
            raise ValueError(f"more than {_MAX_MACHINES} names")
        names += map("".join, itertools.product(*choices))
    return names


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            raise ValueError(f"[{text}] are no numbers such as [01-03,7]")
        low = int(match[1])
        high = int(match[2] or match[1])
        if not low <= high < low + _MAX_MACHINES:
            raise ValueError(f"{part} is no range of at most {_MAX_MACHINES} numbers")
        found += [f"{number:0{len(match[1])}}" for number in range(low, high + 1)]
    return found


class _Variables:
    """An environment whose values are checked when read: ConfigError names the variable."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env

    def any(self, *names: str) -> bool:
        """Whether one of them is set."""
        return any(self.env.get(name) for name in names)

    def text(self, name: str) -> str:
        """Return a variable that has to be set."""
        if value := self.env.get(name):
            return value
        raise ConfigError(
            f"{name} is not set, as it must be beside others of its launcher; {BY_FLAGS}; {ALONE}"
        )

    def number(self, name: str, low: int = 0, high: int = 2**32, why: str = "") -> int:
        """Return a number from `low` to `high`. why: the rest of the sentence if it is another
        one.
        """
        value = self.text(name)
        if re.fullmatch("[0-9]{1,10}", value) is None or not low <= int(value) <= high:
            raise self.wrong(
                name, f"must be {low if low == high else f'a number from {low} to {high}'}{why}"
            )
        return int(value)

    def rank(self, name: str, nodes: int, first: int = 0) -> int:
        """Return a machine's number among `nodes`, of which the launcher counts those from `first`
        on.
        """
        return first + self.number(name, 0, nodes - 1 - first, f" with {nodes} machines")

    def nodes(self, name: str) -> int:
        """Return a number of machines."""
        return self.number(name, 1, _MAX_MACHINES)

    def host(self, name: str, value: str | None = None) -> str:
        """Return a host's name or IP address. value: what the variable says, if it says more than
        that.
        """
        host = self.text(name) if value is None else value
        try:
            if ":" in host:
                ipaddress.IPv6Address(host)
            elif re.fullmatch(r"(?!-|.{254})[0-9A-Za-z_-]+(\.[0-9A-Za-z_-]+)*\.?", host) is None:
                raise ValueError
        except ValueError:
            raise self.wrong(name, "must have a host's name or IP address") from None
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
    """LeaderWorkerSet, from 0.6 on."""
    if not read.any("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"):
        return None
    nodes = read.nodes("LWS_GROUP_SIZE")
    return Allocation(
        "LWS", nodes, read.rank("LWS_WORKER_INDEX", nodes), read.host("LWS_LEADER_ADDRESS")
    )


def _grove(read: _Variables) -> Allocation | None:
    """A Grove scaling group that has a clique of one leader, NAME-ldr, and one of workers,
    NAME-wkr, as Dynamo makes them. Other groups are no machines of one server."""
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
    if not read.any(
        "TORCHELASTIC_RUN_ID", "GROUP_RANK"
    ):  # RANK and MASTER_ADDR alone are set by many
        return None
    world = read.number("WORLD_SIZE", 1)
    here = read.number("LOCAL_WORLD_SIZE", 1)
    if world % here or world // here > _MAX_MACHINES:
        raise read.wrong(
            "WORLD_SIZE",
            f"must be a multiple of LOCAL_WORLD_SIZE={here}, {_MAX_MACHINES} times at most",
        )
    nodes = world // here
    node = read.rank("GROUP_RANK", nodes)
    read.number("LOCAL_RANK", 0, here - 1)
    local = (
        read.number("RANK", 0, world - 1) - node * here
    )  # LOCAL_RANK is 0 everywhere with --virtual-local-rank
    if not 0 <= local < here:
        raise read.wrong("RANK", f"contradicts GROUP_RANK={node} and LOCAL_WORLD_SIZE={here}")
    port = read.number("MASTER_PORT", 1, 65535)
    if read.env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens there
        port += 1 if port < 65535 else -1
    return Allocation("torchrun", nodes, node, read.host("MASTER_ADDR"), port, local)


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
    """Return the number of the job step of Slurm that this process is a task of. Shells and batch
    scripts are none.
    """
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    if not step:
        return None
    number = _Variables({"SLURM_STEP_ID": step}).number("SLURM_STEP_ID")
    return number if number < _FIRST_SPECIAL_STEP else None


def _slurm(read: _Variables) -> Allocation | None:
    """A job step: it may have fewer machines than its job. One task on each is expected."""
    if (step := _step(read.env)) is None:
        return None
    of_step = read.any("SLURM_STEP_NUM_NODES")
    nodes = read.nodes("SLURM_STEP_NUM_NODES" if of_step else "SLURM_NNODES")
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
    port = _JOB_PORTS[
        (read.number("SLURM_JOB_ID") + step) % len(_JOB_PORTS)
    ]  # jobs may share machine 0
    return Allocation("Slurm", nodes, rank, read.host(name, hosts[0]), port)
