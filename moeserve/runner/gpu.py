"""The runner for CUDA: the host launches a step and goes on; results come back on a stream of their own.

No call in `launch` waits for the device, except storing KV blocks into host memory. Importing this file does not
touch CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from moeserve.kernels.configs import add_folder, user_folder
from moeserve.moe.streams import comm_stream
from moeserve.runner import limits
from moeserve.runner.base import DeviceProperties, ModelRunnerBase, dummy_plan
from moeserve.runner.graphs import MOST_TOKENS
from moeserve.runner.memory import MemoryFacts
from moeserve.runner.recorder import CudaRecorder
from moeserve.runner.sampler import Sampler
from moeserve.runner.upload import RingUpload
from moeserve.runner.workspace import workspace_bytes

UPLOADS_PER_STEP = 16  # roomy: an entry that is still being copied is waited for, never overwritten


class GPUModelRunner(ModelRunnerBase):
    busy_tokens = 2048
    device_is_async = True

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cuda", self._index())
        add_folder(user_folder())
        self.upload = RingUpload(self.device, UPLOADS_PER_STEP * (self.config.scheduler.depth + 1), pinned=True)
        name = torch.cuda.get_device_name(self.device)
        sharers = -(-self.world.ranks_on_host // torch.cuda.device_count())
        self.properties = DeviceProperties(name, self._memory, own=True, sharers=sharers)
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.lanes.comm = comm_stream(self.device)

    def _memory(self) -> MemoryFacts:
        free, total = torch.cuda.mem_get_info(self.device)
        # What torch holds in reserve can be had as well.
        reserve = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return MemoryFacts(limit=total, used=total - free - reserve, free=free + reserve)

    def profile_run(self) -> int:
        """Graphs keep memory of their own: what the largest of them needs."""
        bytes_needed, tokens = super().profile_run(), min(MOST_TOKENS, limits.step_tokens(self.config))
        if self.graph_obstacle is not None:
            return bytes_needed
        scheduler = replace(self.config.scheduler, max_num_batched_tokens=tokens)
        return bytes_needed + workspace_bytes(self.spec, replace(self.config, scheduler=scheduler), self.dtype)

    def capture_model(self) -> None:
        self.record_graphs(lambda: CudaRecorder(self.device))
        self.execute(dummy_plan(len(self.groups), 0, 1))  # compiles what fills their inputs

    def make_sampler(self) -> Sampler:
        if self.config.device.kernels == "torch" or find_spec("triton") is None:
            return super().make_sampler()
        from moeserve.runner.triton_sampler import TritonSampler  # slow to import: only where it serves

        return TritonSampler(self.spec.vocab_size, self.tables, self.upload)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._index())

    def _index(self) -> int:
        """Ranks of a host take the devices that CUDA_VISIBLE_DEVICES leaves in turn."""
        return self.world.rank % self.world.ranks_on_host % torch.cuda.device_count()

    def _fetch(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        computed.record()
        on_host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(computed)
            for host, tensor in zip(on_host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copies)
            copied.record()

        def wait() -> Sequence[Tensor]:
            copied.synchronize()
            return on_host

        return wait

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        end.synchronize()
        return int(start.elapsed_time(end) * 1000)
