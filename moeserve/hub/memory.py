"""The memory that a model may use, to choose a quantization that fits."""

from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory_limit(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return the bytes of memory of this machine, or of the control group if that has less."""
    limit = int(psutil.virtual_memory().total)
    try:
        groups = membership.read_text().splitlines()
    except OSError:
        return limit
    for line in groups:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base = cgroups / "memory" if controllers else cgroups
        inner = base / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(base):
                limit = _limit_in(folder, limit)
    return limit


def _limit_in(folder: Path, default: int) -> int:
    """Return the limit of a control group of version 2 or 1, at most `default`.

    Above memory.high, processes are slowed down.
    """
    limit = default
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max": no limit
            limit = min(limit, int(text))
    return limit
