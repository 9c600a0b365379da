"""Which CPUs of this machine a rank computes on: fast ones of a hybrid processor, of one NUMA node.
A step ends when the slowest thread does, and weights lie in the memory of the node whose thread has
read them."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SYSTEM = Path("/sys/devices")
FAST = 0.75  # of the fastest core's capacity or clock: favoured cores of one kind differ by less


def cpu_list(text: str) -> set[int]:
    """Parses the kernel's lists: 0-2,5 -> {0, 1, 2, 5}"""
    ends = (part.partition("-") for part in text.strip().split(",") if part.strip())
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


def shown(cpus: set[int]) -> str:
    """Return the kernel's list of these: {0, 1, 2, 5} -> 0-2,5"""
    starts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    ends = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    return ",".join(
        f"{first}-{last}" if first < last else f"{first}"
        for first, last in zip(starts, ends, strict=True)
    )


def fast_cpus(allowed: set[int], system: Path = SYSTEM) -> set[int]:
    """Return the performance cores among these; all where the kernel tells no difference."""
    if (system / "cpu_atom/cpus").is_file():  # Intel
        return (allowed & cpu_list(_read(system / "cpu_core/cpus"))) or allowed
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = {cpu: int(_read(system / f"system/cpu/cpu{cpu}" / name) or 0) for cpu in allowed}
        if (most := max(speeds.values())) > min(speeds.values()):
            return {cpu for cpu, speed in speeds.items() if speed >= FAST * most}
    return allowed


def nodes(allowed: set[int], system: Path = SYSTEM) -> list[set[int]]:
    """Return the CPUs among these of each NUMA node that has any."""
    folders = sorted(
        (system / "system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])
    )
    found = [allowed & cpu_list(_read(folder / "cpulist")) for folder in folders]
    return [node for node in found if node] or [allowed]


def num_cores(cpus: Iterable[int], system: Path = SYSTEM) -> int:
    """Return the physical cores of these CPUs: two threads of one core share its vector units."""
    files = (system / f"system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in cpus)
    return len({_read(file) or str(file) for file in files})


def place(
    allowed: set[int], rank: int, ranks: int, threads: int | None = None, system: Path = SYSTEM
) -> tuple[set[int], int]:
    """Return the CPUs of one of `ranks` ranks on this machine, and how many ranks share them.
    threads: that were asked for; if one node has too few fast cores for them, those of all nodes
    serve, and then all CPUs."""
    fast = fast_cpus(allowed, system)
    parts = nodes(fast, system)
    own = [number * len(parts) // ranks for number in range(ranks)]
    node = max(parts, key=len) if ranks == 1 else parts[own[rank]]
    choices = (node, own.count(own[rank])), (fast, ranks)
    return next(
        (choice for choice in choices if (threads or 0) <= len(choice[0])), (allowed, ranks)
    )


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text("ascii").strip()
    return ""
