"""The control groups of this process, and their limits: version 2, or 1."""

from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def control_groups(root: Path, membership: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each control group of this process, and whether its version is 2."""
    for line in read(membership).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        is_v2 = controllers == ""
        if is_v2 or controller in controllers.split(","):
            base = root if is_v2 else root / controller
            inner = base / path.lstrip("/")
            yield from (
                (folder, is_v2) for folder in (inner, *inner.parents) if folder.is_relative_to(base)
            )


def memory_limit(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return the bytes of memory of this machine, or of a control group if that has less."""
    limits = [limit_of(*group) for group in control_groups(root, membership, "memory")]
    found = [limit for limit in limits if limit is not None]
    return min([psutil.virtual_memory().total, *found])


def limit_of(group: Path, is_v2: bool) -> int | None:
    """Return the bytes from which the kernel kills processes, or slows them down (memory.high).

    None: there is no limit.
    """
    names = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
    limits = [limit for name in names if (limit := number(read(group / name))) is not None]
    return min(limits, default=None)


def read(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def number(text: str) -> int | None:
    """Return the number of a control group's file; None for "max", which is no limit."""
    return int(text) if text.strip().isdigit() else None
