"""The runner for CPUs, whose host memory is device memory; and how much of it and how many cores
there are.
"""

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from moeserve.models.spec import model_size
from moeserve.runner.base import DeviceProperties, ModelRunnerBase
from moeserve.runner.cores import num_cores, place, shown
from moeserve.runner.limits import MemoryFacts
from moeserve.runner.load import Progress
from moeserve.runner.recorder import Recorder
from moeserve.runner.sampling import noise
from moeserve.runner.tables import host_upload

logger = logging.getLogger(__name__)
# Below this much work per thread, waking and joining threads costs more than they compute.
ACTIVE_PARAMS_PER_THREAD = 4_000_000
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


class CPUModelRunner(ModelRunnerBase):
    """Executes plans on CPU cores. Always deterministic to the bit, whatever `determinism` is set
    to.
    """

    busy_tokens = 512  # 2,048 are no faster (benchmarks/LOG.md)
    warm_up_tokens = 16  # of 64, a start would wait three times as long

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cpu")
        self.upload = host_upload
        threads = torch.get_num_threads()
        name = f"cpu ({threads} thread{'s' * (threads != 1)})"
        self.properties = DeviceProperties(
            name, host_memory, own=False, sharers=self.world.ranks_on_host
        )

    def load_model(self, progress: Progress) -> None:
        """Load the model and checks that sampling noise is batch-invariant on this machine."""
        super().load_model(progress)
        if (
            not noise.is_invariant()
        ):  # checked here, with as many threads as the kernels have left to torch
            logger.warning(
                "sampling noise depends on the batch on this machine: a request's "
                "sampled tokens may depend on what "
                "else is in the batch (greedy requests are safe)"
            )

    def capture_model(self) -> None:
        """Set up the stand-in for graphs if a mode is asked for; by default steps run without."""
        if self.config.device.graphs in ("full", "piecewise"):
            self.record_graphs(Recorder)

    def enter_thread(self) -> None:
        """Move this thread to the CPUs that the rank computes on, where the kernels' threads
        follow it, and sets their number, which OpenMP keeps per calling thread."""
        world = self.world
        asked = self.config.device.threads
        ranks = world.ranks_on_host
        if hasattr(os, "sched_setaffinity"):  # Linux
            allowed = os.sched_getaffinity(0)
            cpus, ranks = place(allowed, world.host_rank, ranks, asked)
            if cpus != allowed:
                os.sched_setaffinity(0, cpus)
                logger.info(
                    "rank %d computes on CPUs %s of %s", world.rank, shown(cpus), shown(allowed)
                )
        cores = allowed_cores()
        threads = asked or useful_threads(
            model_size(self.spec).active // world.tp_size, max(1, cores // ranks)
        )
        torch.set_num_threads(threads)
        if world.ranks_on_host > 1:
            logger.info(
                "rank %d computes on %d of %d cores, %d ranks share them",
                world.rank,
                threads,
                cores,
                ranks,
            )


def host_memory(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> MemoryFacts:
    """Return this process's facts: physical memory, or less where a control group (version 2 or 1)
    limits it.
    """
    host = psutil.virtual_memory()
    limit = host.total
    free = host.available
    for folder, is_v2 in _groups(cgroups, membership, "memory"):
        names = (
            ("memory.max", "memory.current")
            if is_v2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        group_limit, used = (_number(_read(folder / name)) for name in names)
        if group_limit is not None and used is not None:
            # Page cache does not count as used; pages that several processes have mapped in turn
            # count as active.
            stat = folder / "memory.stat"
            prefix = "" if is_v2 else "total_"
            cached = _stat(stat, prefix + "inactive_file") + _stat(stat, prefix + "active_file")
            limit = min(limit, group_limit)
            free = min(free, max(0, group_limit - max(0, used - cached)))
    return MemoryFacts(limit=limit, used=psutil.Process().memory_info().rss, free=free)


def useful_threads(num_active_params: int, cores: int) -> int:
    """Return the number of threads for a model that multiplies each token with so many parameters.

    3.4 million on 8 cores -> 1; 380 million on 8 cores -> 8
    """
    return max(1, min(cores, num_active_params // ACTIVE_PARAMS_PER_THREAD))


def allowed_cores(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return the physical cores of the affinity mask, at most the quota of the control groups
    (version 2), rounded up."""
    try:
        cores = num_cores(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = psutil.cpu_count(logical=False) or 1
    for folder, is_v2 in _groups(cgroups, membership, "cpu"):
        limit, _, period = _read(folder / "cpu.max").partition(" ")
        quota_us = _number(limit)
        period_us = _number(period)
        if is_v2 and quota_us is not None and period_us:
            cores = min(cores, math.ceil(quota_us / period_us))
    return max(1, cores)


def _groups(root: Path, membership: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of every control group around this process, and whether the group is of
    version 2.
    """
    for line in _read(membership).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        is_v2 = controllers == ""
        if is_v2 or controller in controllers.split(","):
            base = root if is_v2 else root / controller
            inner = base / path.lstrip("/")
            yield from (
                (folder, is_v2) for folder in (inner, *inner.parents) if folder.is_relative_to(base)
            )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None  # "max": no limit


def _stat(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return _number(value) or 0
    return 0
