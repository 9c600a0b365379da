"""The runner for CUDA, eager: the host launches a step and goes on; results come back on a stream of their own.

No call in `launch` waits for the device, except storing KV blocks into host memory. Importing this file does not
touch CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moeserve.runner.base import DeviceProperties, ModelRunnerBase
from moeserve.runner.memory import MemoryFacts
from moeserve.runner.upload import RingUpload

UPLOADS_PER_STEP = 16  # roomy: an entry that is still being copied is waited for, never overwritten


class GPUModelRunner(ModelRunnerBase):
    busy_tokens = 2048
    device_is_async = True

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cuda", self._index())
        self.upload = RingUpload(self.device, UPLOADS_PER_STEP * (self.config.scheduler.depth + 1), pinned=True)
        name = torch.cuda.get_device_name(self.device)
        sharers = -(-self.world.ranks_on_host // torch.cuda.device_count())
        self.properties = DeviceProperties(name, self._memory, own=True, sharers=sharers)
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def _memory(self) -> MemoryFacts:
        free, total = torch.cuda.mem_get_info(self.device)
        # What torch holds in reserve can be had as well.
        reserve = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return MemoryFacts(limit=total, used=total - free - reserve, free=free + reserve)

    def capture_model(self) -> None:
        """Eager: `graphs` stays as it is."""

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
