"""The model runner for CPUs, and the cores that this process may use."""

import logging
import math
import os
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from moeserve.actor.control_groups import MEMBERSHIP, ROOT, control_groups, number, read
from moeserve.models.spec import model_size
from moeserve.runner.base import ModelRunnerBase
from moeserve.runner.cores import assign_cpus, format_cpus, num_cores
from moeserve.runner.host_memory import host_memory, share_of_host, trim_heap
from moeserve.runner.limits import DeviceProperties, MemoryFacts, workspace_bytes
from moeserve.runner.load import Progress
from moeserve.runner.recorder import Recorder
from moeserve.runner.sampling import noise
from moeserve.runner.tables import host_upload

logger = logging.getLogger(__name__)
# With fewer active parameters per thread, starting and joining threads costs more than they save.
ACTIVE_PARAMS_PER_THREAD = 4_000_000
# Memory that the server's other processes, and threads of this one, take while the model is loaded
# and afterwards: the same for all models, and for each token of the vocabulary (tokenizers).
RESERVE_BYTES = 128 << 20
RESERVE_PER_TOKEN = 512
INT32_BYTES = 4


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
            name,
            host_memory,
            exclusive=False,
            num_ranks=self.world.ranks_on_host,
            share=share_of_host,
            reserve=RESERVE_BYTES + RESERVE_PER_TOKEN * self.spec.vocab_size,
        )

    def available_memory(self) -> MemoryFacts:
        """Return the memory that this rank may use, after giving back what it has freed."""
        trim_heap()
        return super().available_memory()

    def load_model(self, progress: Progress) -> None:
        """Load the model, and check that sampling noise is batch-invariant on this machine."""
        super().load_model(progress)
        # Checked only now, with the number of threads that the kernels have left to torch.
        if not noise.is_invariant():
            logger.warning(
                "sampling noise depends on the batch on this machine: the sampled tokens of a "
                "request may depend on other requests in the batch (greedy requests are safe)"
            )

    def profile_run(self) -> int:
        """Return the bytes of a step, with contexts of one token. `context_bytes` has the rest."""
        return self._step_bytes(max_len=1)

    def context_bytes(self, max_len: int) -> int:
        """Return the bytes of a step and of request tables that depend on the context length.

        Each request has a row of its tokens and of its block table, in the runner's tables and in
        the scheduler's (engine/requests.py).
        """
        num_blocks = sum(-(-max_len // group.block_size) for group in self.groups)
        row_bytes = 2 * INT32_BYTES * (max_len + num_blocks)
        rows_bytes = self.config.scheduler.max_num_seqs * row_bytes
        return rows_bytes + self._step_bytes(max_len) - self._step_bytes(max_len=1)

    def _step_bytes(self, max_len: int) -> int:
        model = replace(self.config.model, max_model_len=max_len)
        config = replace(self.config, model=model)
        return workspace_bytes(self.spec, config, self.dtype, self.inflow)

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


def useful_threads(num_active_params: int, cores: int) -> int:
    """Return the number of threads for a model with this many active parameters.

    3.4 million on 8 cores -> 1; 380 million on 8 cores -> 8
    """
    return max(1, min(cores, num_active_params // ACTIVE_PARAMS_PER_THREAD))


def allowed_cores(cgroups: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return the number of physical cores in the affinity mask, limited by the CPU quota of the
    control groups (version 2), rounded up.
    """
    try:
        cores = num_cores(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = psutil.cpu_count(logical=False) or 1
    for folder, is_v2 in control_groups(cgroups, membership, "cpu"):
        limit, _, period = read(folder / "cpu.max").partition(" ")
        quota_us = number(limit)
        period_us = number(period)
        if is_v2 and quota_us is not None and period_us:
            cores = min(cores, math.ceil(quota_us / period_us))
    return max(1, cores)
