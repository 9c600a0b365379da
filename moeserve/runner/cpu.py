"""The model runner for CPUs, and the memory and the cores that this process may use."""

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from moeserve.models.spec import model_size
from moeserve.runner.base import DeviceProperties, ModelRunnerBase
from moeserve.runner.cores import assign_cpus, format_cpus, num_cores
from moeserve.runner.limits import MemoryFacts
from moeserve.runner.load import Progress
from moeserve.runner.recorder import Recorder
from moeserve.runner.sampling import noise
from moeserve.runner.tables import host_upload

logger = logging.getLogger(__name__)
# With fewer active parameters per thread, starting and joining threads costs more than they save.
ACTIVE_PARAMS_PER_THREAD = 4_000_000
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


class CPUModelRunner(ModelRunnerBase):
    """Executes plans on CPU cores. It is deterministic to the bit, whatever the setting
    `determinism` is.
    """

    busy_tokens = 512  # 2,048 are no faster (benchmarks/LOG.md)
    warm_up_tokens = 16  # with 64, the warm-up would take three times as long

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cpu")
        self.upload = host_upload
        threads = torch.get_num_threads()
        name = f"cpu ({threads} thread{'s' * (threads != 1)})"
        self.properties = DeviceProperties(
            name, host_memory, exclusive=False, num_ranks=self.world.ranks_on_host
        )

    def load_model(self, progress: Progress) -> None:
        """Load the model, and check that sampling noise is batch-invariant on this machine."""
        super().load_model(progress)
        # Checked only now, with the number of threads that the kernels have left to torch.
        if not noise.is_invariant():
            logger.warning(
                "sampling noise depends on the batch on this machine: the sampled tokens of a "
                "request may depend on other requests in the batch (greedy requests are safe)"
            )

    def capture_model(self) -> None:
        # A stand-in for CUDA graphs, for tests. By default, steps run without it.
        if self.config.device.graphs in ("full", "piecewise"):
            self.record_graphs(Recorder)

    def enter_thread(self) -> None:
        """Move this thread to the CPUs of the rank, and set the number of threads.

        The threads of the kernels inherit the CPUs. OpenMP keeps their number per calling thread.
        """
        world = self.world
        configured = self.config.device.threads
        ranks = world.ranks_on_host
        if hasattr(os, "sched_setaffinity"):  # Linux
            allowed = os.sched_getaffinity(0)
            cpus, ranks = assign_cpus(allowed, world.host_rank, ranks, configured)
            if cpus != allowed:
                os.sched_setaffinity(0, cpus)
                logger.info(
                    "rank %d computes on CPUs %s of %s",
                    world.rank,
                    format_cpus(cpus),
                    format_cpus(allowed),
                )
        cores = allowed_cores()
        threads = configured or useful_threads(
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
    """Return the memory of this process: physical memory, or less if a control group (version 1 or
    2) limits it.
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
            # The page cache does not count as used. Its inactive and active files are both
            # subtracted, because pages that several processes have mapped in turn are active.
            stat = folder / "memory.stat"
            prefix = "" if is_v2 else "total_"
            cached = _stat(stat, prefix + "inactive_file") + _stat(stat, prefix + "active_file")
            limit = min(limit, group_limit)
            free = min(free, max(0, group_limit - max(0, used - cached)))
    return MemoryFacts(limit=limit, used=psutil.Process().memory_info().rss, free=free)


def useful_threads(num_active_params: int, cores: int) -> int:
    """Return the number of threads for a model with this many active parameters.

    3.4 million on 8 cores -> 1; 380 million on 8 cores -> 8
    """
    return max(1, min(cores, num_active_params // ACTIVE_PARAMS_PER_THREAD))


def allowed_cores(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return the number of physical cores in the affinity mask, limited by the CPU quota of the
    control groups (version 2), rounded up.
    """
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
    """Yield the folder of each control group of this process, and whether its version is 2."""
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
