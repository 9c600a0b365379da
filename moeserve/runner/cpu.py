"""The runner for CPUs, whose host memory is device memory."""

from __future__ import annotations

import logging

import torch

from moeserve.loader.spec import model_size
from moeserve.runner.base import DeviceProperties, ModelRunnerBase
from moeserve.runner.host import allowed_cores, cores_of_rank, host_memory, useful_threads
from moeserve.runner.load import Progress
from moeserve.runner.recorder import HostRecorder
from moeserve.runner.sampling import noise
from moeserve.runner.tables import HostUpload

logger = logging.getLogger(__name__)


class CPUModelRunner(ModelRunnerBase):
    """Executes plans on CPU cores. Always deterministic to the bit, whatever `determinism` is set to."""

    busy_tokens = 512  # 2,048 are no faster (benchmarks/LOG.md)

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cpu")
        self.upload = HostUpload()
        threads = torch.get_num_threads()
        name = f"cpu ({threads} thread{'s' * (threads != 1)})"
        self.properties = DeviceProperties(name, host_memory, own=False, sharers=self.world.ranks_on_host)

    def load_model(self, progress: Progress) -> None:
        """Loads the model and checks that sampling noise is batch-invariant on this machine."""
        super().load_model(progress)
        if not noise.is_invariant():  # checked here, with as many threads as the kernels have left to torch
            logger.warning(
                "sampling noise depends on the batch on this machine: a request's sampled tokens may depend on what "
                "else is in the batch (greedy requests are safe)"
            )

    def capture_model(self) -> None:
        """Sets up the stand-in for graphs if a mode is asked for; by default steps run without."""
        if self.config.device.graphs in ("full", "piecewise"):
            self.record_graphs(HostRecorder)

    def enter_thread(self) -> None:
        """Sets the number of threads, which OpenMP keeps per calling thread."""
        cores, ranks = allowed_cores(), self.world.ranks_on_host
        useful = useful_threads(model_size(self.spec).active // self.world.tp_size, cores_of_rank(cores, ranks))
        threads = self.config.device.threads or useful
        torch.set_num_threads(threads)
        if ranks > 1:
            logger.info(
                "rank %d computes on %d of %d cores, %d ranks share them", self.world.rank, threads, cores, ranks
            )
