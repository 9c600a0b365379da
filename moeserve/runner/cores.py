"""CPU cores: how many this process may use, and how many a model can use."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

# Below this much work per thread, waking and joining threads costs more than they compute.
ACTIVE_PARAMS_PER_THREAD = 4_000_000


def useful_threads(num_active_params: int, cores: int) -> int:
    """Returns the number of threads for a model that multiplies each token with so many parameters.

    3.4 million on 8 cores -> 1; 380 million on 8 cores -> 8
    """
    return max(1, min(cores, num_active_params // ACTIVE_PARAMS_PER_THREAD))


def cores_of_rank(cores: int, ranks: int) -> int:
    """Returns the cores for each of several ranks on one host, which must not share a core.

    8 cores, 3 ranks -> 2
    """
    return max(1, cores // ranks)


def allowed_cores(cgroup: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the cores of the affinity mask, at most the physical ones (two threads of one core share its vector
    units) and at most the control group's quota, rounded up."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    cores = min(cores, psutil.cpu_count(logical=False) or cores)
    quota = _quota(cgroup, membership)
    return max(1, min(cores, math.ceil(quota)) if quota is not None else cores)


def _quota(root: Path, membership: Path) -> float | None:
    """Returns the smallest CPU quota, in cores, of the control groups (version 2) around this process."""
    found: list[float] = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if not line.startswith("0::"):
            continue
        inner = root / line[3:].lstrip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit, period = (folder / "cpu.max").read_text().split()
            except (OSError, ValueError):
                continue
            if limit.isdigit() and period.isdigit() and int(period):
                found.append(int(limit) / int(period))
    return min(found) if found else None
