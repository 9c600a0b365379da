"""The runner for CUDA: the host launches a step and continues; results come back on a stream of
their own.

No call in `launch` waits for the device. Importing this file does not touch CUDA.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.config import Limits
from moeserve.engine.plan import StepPlan
from moeserve.kernels.configs import add_folder, user_folder
from moeserve.moe.streams import comm_stream
from moeserve.ops.inputs import StepInputs
from moeserve.runner import limits
from moeserve.runner.base import DeviceProperties, ModelRunnerBase
from moeserve.runner.dummy import dummy_plan, every_way, largest_step
from moeserve.runner.graphs import MOST_TOKENS
from moeserve.runner.limits import MemoryFacts, workspace_bytes
from moeserve.runner.recorder import CudaRecorder
from moeserve.runner.tables import HostRows, Tables

logger = logging.getLogger(__name__)
FP32 = 4
MOST_TABLE_ENTRIES = 1 << 30
_ALIGN = 16  # bytes: every section of an upload starts where any dtype may
UPLOADS_PER_STEP = 16  # roomy: an entry that is still being copied is waited for, never overwritten


class GPUModelRunner(ModelRunnerBase):
    """Executes plans on one CUDA device."""

    busy_tokens = 2048
    device_is_async = True

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cuda", self._index())
        add_folder(user_folder())
        self.upload = RingUpload(
            self.device, UPLOADS_PER_STEP * (self.config.scheduler.depth + 1), pinned=True
        )
        name = torch.cuda.get_device_name(self.device)
        sharers = -(-self.world.ranks_on_host // torch.cuda.device_count())
        self.properties = DeviceProperties(name, self._memory, own=True, sharers=sharers)
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.ubatches.take_transfers = comm_stream(self.device).take_transfers

    def _memory(self) -> MemoryFacts:
        free, total = torch.cuda.mem_get_info(self.device)
        own = torch.cuda.memory_allocated(self.device)
        reserve = torch.cuda.memory_reserved(self.device) - own  # can be had as well
        # On a shared device only what this rank allocated counts against its part.
        used = total - free - reserve if self.properties.sharers == 1 else own
        return MemoryFacts(limit=total, used=used, free=free + reserve)

    def profile_run(self) -> int:
        """Return the bytes of the largest step, measured or estimated, whichever is more; plus the
        request tables, the work space of attention to long contexts, and what the largest graph
        keeps."""
        estimated, (step_bytes, table_bytes) = super().profile_run(), self._measured()
        logger.info("a step takes %d MiB, %d by estimate", step_bytes >> 20, estimated >> 20)
        needed = max(estimated, step_bytes) + table_bytes
        tokens = min(MOST_TOKENS, limits.step_tokens(self.config))
        if self.by_triton:
            from moeserve.kernels.paged_attention import MOST_SPACE

            needed += FP32 * MOST_SPACE * len(self.groups)
        if self.graph_obstacle is not None:
            return needed
        scheduler = replace(self.config.scheduler, max_num_batched_tokens=tokens)
        inflow = self.inflow
        if inflow is not None:
            inflow = replace(inflow, rows=min(inflow.rows, self.peers.caps.recorded_rows), moving=0)
        return needed + workspace_bytes(
            self.spec, replace(self.config, scheduler=scheduler), self.dtype, inflow
        )

    def _measured(self) -> tuple[int, int]:
        """Return the bytes of the largest step at its peak, beside weights and tables, and those
        of the tables.
        """
        config = self.config
        max_len = config.model.max_model_len or self.spec.max_position
        self.limits = Limits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=limits.step_tokens(config),
            prefill_chunk=limits.chunk_tokens(config),
            max_model_len=min(
                max_len, MOST_TABLE_ENTRIES // config.scheduler.max_num_seqs
            ),  # memory may allow less
            block_size=config.cache.block_size,
            num_blocks=1,
        )
        before = torch.cuda.memory_allocated(self.device)
        self.initialize_kv_cache()
        tables = torch.cuda.memory_allocated(self.device) - before
        self.execute(
            dummy_plan(len(self.groups), 0, [1])
        )  # for what is allocated once, such as a library's work space
        torch.cuda.reset_peak_memory_stats(self.device)
        self.execute(largest_step(len(self.groups), self.limits))
        step = torch.cuda.max_memory_allocated(self.device) - before - tables
        # Everything that holds the tables.
        del self.kv, self.tables, self.sampler, self.sampling, self.tasks, self.limits
        self.__dict__.pop("fixed_inputs", None)
        torch.cuda.empty_cache()
        return step, tables

    def warm_up(self) -> None:
        """Run warm-up steps; they compile every Triton kernel, so no request waits for that."""
        super().warm_up()
        if self.by_triton:
            for plan in every_way(len(self.groups), self.limits):
                self.execute(plan)
            self.kv.clear_null_block()

    def capture_model(self) -> None:
        """Record CUDA graphs of common sizes, if nothing is in the way."""
        self.record_graphs(lambda: CudaRecorder(self.device, warm=not self.computes_with_others))
        self.execute(dummy_plan(len(self.groups), 0, [1]))  # compiles what fills their inputs

    @property
    def by_triton(self) -> bool:
        """Whether Triton kernels serve."""
        return self.config.device.kernels != "torch" and find_spec("triton") is not None

    def make_tables(self) -> Tables:
        """Return empty request tables, written by a Triton kernel where Triton serves."""
        if not self.by_triton:
            return super().make_tables()
        from moeserve.runner.triton_inputs import scatter  # slow to import, as all that uses triton

        size = self.limits.max_num_seqs, self.limits.max_model_len
        return Tables(*size, self.groups, self.device, self.upload, scatter)

    def step_inputs(self, plan: StepPlan, host: HostRows) -> StepInputs:
        """Return the inputs of a step that is not replayed."""
        return (
            self.fixed_inputs.exact(plan, host)
            if self.by_triton
            else super().step_inputs(plan, host)
        )

    def enter_thread(self) -> None:
        """Make this rank's device the thread's current one."""
        torch.cuda.set_device(self._index())

    def _index(self) -> int:
        """Return the device of this rank: the ranks of a host take the visible devices in turn."""
        return self.world.host_rank % torch.cuda.device_count()

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
            """Return the copies on the host, once they are complete."""
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


class RingUpload:
    """Copies all arrays of a call in one piece, from a ring of host buffers.

    depth: more than the calls whose copies may be unfinished at once. With `pinned` the copies are
    asynchronous and each entry waits for its own last copy before it is written again; without,
    they are not (tests on CPU).
    """

    def __init__(self, device: torch.device, depth: int, *, pinned: bool) -> None:
        self.device = device
        self.pinned = pinned
        self._buffers = [self._new_buffer(1 << 16) for _ in range(depth)]
        self._copied: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def __call__(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        """Return tensors on the device; the copy runs on the current stream."""
        entry = self._next
        self._next = (self._next + 1) % len(self._buffers)
        *starts, size = accumulate(
            (-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays), initial=0
        )
        host = self._writable(entry, size)
        view = host.numpy()
        for array, start in zip(arrays, starts, strict=True):
            view[start : start + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        on_device = torch.empty(size, dtype=torch.uint8, device=self.device)
        on_device.copy_(host[:size], non_blocking=self.pinned)
        event = self._copied[entry]
        if event is not None:
            event.record()
        return tuple(_section(on_device, start, a) for a, start in zip(arrays, starts, strict=True))

    def _writable(self, entry: int, size: int) -> Tensor:
        event = self._copied[entry]
        if event is not None:
            event.synchronize()
        elif self.pinned:
            self._copied[entry] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if len(self._buffers[entry]) < size:
            self._buffers[entry] = self._new_buffer(2 * size)
        return self._buffers[entry]

    def _new_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)


def _section(packed: Tensor, start: int, like: NDArray[Any]) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, dtype=like.dtype)).dtype
    return packed[start : start + like.nbytes].view(dtype).view(like.shape)
