"""Choose the CPUs on which a rank computes: fast cores of one NUMA node.

A step ends when its slowest thread ends, so slow cores of hybrid processors are avoided. Weights
are in the memory of the node whose thread has read them, so a rank stays on one node.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SYSTEM = Path("/sys/devices")
# A fast core has at least this share of the fastest core's capacity or clock. Cores of one kind
# differ by less.
MIN_FAST_SHARE = 0.75


def cpu_list(text: str) -> set[int]:
    """Parse a CPU list of the kernel: 0-2,5 -> {0, 1, 2, 5}"""
    ends = (item.partition("-") for item in text.strip().split(",") if item.strip())
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


def format_cpus(cpus: set[int]) -> str:
    """Return the kernel's notation of a set of CPUs: {0, 1, 2, 5} -> 0-2,5"""
    starts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    ends = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    return ",".join(
        f"{first}-{last}" if first < last else f"{first}"
        for first, last in zip(starts, ends, strict=True)
    )


def fast_cpus(allowed: set[int], system: Path = SYSTEM) -> set[int]:
    """Return the performance cores among these CPUs; all if the kernel reports no difference."""
    if (system / "cpu_atom/cpus").is_file():  # Intel
        return (allowed & cpu_list(_read(system / "cpu_core/cpus"))) or allowed
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = {cpu: int(_read(system / f"system/cpu/cpu{cpu}" / name) or 0) for cpu in allowed}
        max_speed = max(speeds.values())
        if max_speed > min(speeds.values()):
            return {cpu for cpu, speed in speeds.items() if speed >= MIN_FAST_SHARE * max_speed}
    return allowed


def nodes(allowed: set[int], system: Path = SYSTEM) -> list[set[int]]:
    """Return the CPUs of each NUMA node that has some of these."""
    folders = sorted(
        (system / "system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])
    )
    allowed_of_node = [allowed & cpu_list(_read(folder / "cpulist")) for folder in folders]
    return [cpus for cpus in allowed_of_node if cpus] or [allowed]


def num_cores(cpus: Iterable[int], system: Path = SYSTEM) -> int:
    """Return the number of physical cores of these CPUs. Two hardware threads of a core count once,
    because they share its vector units.
    """
    files = (system / f"system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in cpus)
    return len({_read(file) or str(file) for file in files})


def assign_cpus(
    allowed: set[int], rank: int, ranks: int, threads: int | None = None, system: Path = SYSTEM
) -> tuple[set[int], int]:
    """Return the CPUs of one of `ranks` ranks on this machine, and the number of ranks that share
    them.

    threads: the configured number. If one node has too few fast CPUs for them, the fast CPUs of all
    nodes are used, and otherwise all CPUs.
    """
    fast = fast_cpus(allowed, system)
    by_node = nodes(fast, system)
    node_of_rank = [number * len(by_node) // ranks for number in range(ranks)]
    node = max(by_node, key=len) if ranks == 1 else by_node[node_of_rank[rank]]
    ranks_on_node = node_of_rank.count(node_of_rank[rank])
    needed = threads or 0
    if needed <= len(node):
        return node, ranks_on_node
    return (fast, ranks) if needed <= len(fast) else (allowed, ranks)


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text("ascii").strip()
    return ""
