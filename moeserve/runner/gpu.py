"""The model runner for CUDA devices.

The host launches a step and continues; nothing in `launch` waits for the device. Results are copied
back on a separate stream. Importing this module does not initialize CUDA.
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
from moeserve.runner.base import ModelRunnerBase
from moeserve.runner.dummy import dummy_plan, kernel_variants, largest_step
from moeserve.runner.graphs import MAX_RECORDED_TOKENS
from moeserve.runner.limits import DeviceProperties, MemoryFacts, workspace_bytes
from moeserve.runner.recorder import CudaRecorder
from moeserve.runner.tables import HostRows, Tables

logger = logging.getLogger(__name__)
FP32_BYTES = 4
MAX_TABLE_ENTRIES = 1 << 30
_ALIGN = 16  # bytes; alignment of the arrays in an upload, enough for any dtype
UPLOADS_PER_STEP = 16  # more than a step needs: the host would wait for a buffer in use


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
        num_ranks = -(-self.world.ranks_on_host // torch.cuda.device_count())
        self.properties = DeviceProperties(name, self._memory, exclusive=True, num_ranks=num_ranks)
        # Copies results to the host.
        self._copy_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.ubatches.take_transfers = comm_stream(self.device).take_transfers

    def _memory(self) -> MemoryFacts:
        free, total = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        # Memory that torch has reserved, but not allocated to tensors.
        reserve = torch.cuda.memory_reserved(self.device) - allocated
        # On a shared device, only the memory of this rank counts against its share.
        used = total - free - reserve if self.properties.num_ranks == 1 else allocated
        return MemoryFacts(limit=total, used=used, free=free + reserve)

    def profile_run(self) -> int:
        """Return the bytes that a step needs: the largest step (measured or estimated, whichever is
        more), the request tables, the workspace of attention, and the memory of the largest graph.
        """
        estimated_bytes = super().profile_run()
        step_bytes, table_bytes = self._measure_step()
        logger.info("a step takes %d MiB, %d by estimate", step_bytes >> 20, estimated_bytes >> 20)
        needed_bytes = max(estimated_bytes, step_bytes) + table_bytes
        if self.uses_triton:
            from moeserve.kernels.paged_attention import MAX_SPACE_FLOATS

            needed_bytes += FP32_BYTES * MAX_SPACE_FLOATS * len(self.groups)
        if self.graphs_unsupported is not None:
            return needed_bytes
        # The largest graph needs memory like a step with so many tokens.
        tokens = min(MAX_RECORDED_TOKENS, limits.step_tokens(self.config))
        scheduler = replace(self.config.scheduler, max_num_batched_tokens=tokens)
        inflow = self.inflow
        if inflow is not None:
            inflow = replace(inflow, rows=min(inflow.rows, self.peers.caps.recorded_rows), moving=0)
        return needed_bytes + workspace_bytes(
            self.spec, replace(self.config, scheduler=scheduler), self.dtype, inflow
        )

    def profile_estimate(self) -> int:
        """Return an estimate of `profile_run` before the model is loaded, without graphs."""
        return super().profile_run()

    def _measure_step(self) -> tuple[int, int]:
        """Run the largest step. Return its peak memory (without weights and tables), and the size
        of the tables.
        """
        config = self.config
        max_len = config.model.max_model_len or self.spec.max_position
        self.limits = Limits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=limits.step_tokens(config),
            prefill_chunk=limits.chunk_tokens(config),
            # The final max_model_len may be less; tables for a huge one might not fit.
            max_model_len=min(max_len, MAX_TABLE_ENTRIES // config.scheduler.max_num_seqs),
            block_size=config.cache.block_size,
            num_blocks=1,
        )
        bytes_before = torch.cuda.memory_allocated(self.device)
        self.initialize_kv_cache()
        table_bytes = torch.cuda.memory_allocated(self.device) - bytes_before
        # A first step, for memory that is allocated once, such as workspaces of libraries.
        self.execute(dummy_plan(len(self.groups), 0, [1]))
        torch.cuda.reset_peak_memory_stats(self.device)
        self.execute(largest_step(len(self.groups), self.limits))
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        # Delete everything that refers to the tables.
        del self.kv, self.tables, self.sampler, self.sampling, self.tasks, self.limits
        self.__dict__.pop("fixed_inputs", None)
        torch.cuda.empty_cache()
        return peak_bytes - bytes_before - table_bytes, table_bytes

    def warm_up(self) -> None:
        """Run warm-up steps that compile all Triton kernels, so that no request waits for that."""
        super().warm_up()
        if self.uses_triton:
            for plan in kernel_variants(len(self.groups), self.limits):
                self.execute(plan)
            self.kv.clear_null_block()

    def capture_model(self) -> None:
        self.record_graphs(lambda: CudaRecorder(self.device, warm=not self.computes_with_others))
        # Compiles the kernels that fill the inputs of graphs.
        self.execute(dummy_plan(len(self.groups), 0, [1]))

    @property
    def uses_triton(self) -> bool:
        """Whether Triton kernels are used."""
        return self.config.device.kernels != "torch" and find_spec("triton") is not None

    def make_tables(self) -> Tables:
        """Return empty request tables. With Triton, a kernel writes them."""
        if not self.uses_triton:
            return super().make_tables()
        from moeserve.runner.triton_inputs import scatter  # slow to import

        return Tables(
            self.limits.max_num_seqs,
            self.limits.max_model_len,
            self.groups,
            self.device,
            self.upload,
            scatter,
        )

    def step_inputs(self, plan: StepPlan, rows: HostRows) -> StepInputs:
        return (
            self.fixed_inputs.exact(plan, rows)
            if self.uses_triton and not self.spec.num_earlier_ids
            else super().step_inputs(plan, rows)
        )

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._index())

    def _index(self) -> int:
        """Return the device index: the ranks of a host use the visible devices round-robin."""
        return self.world.host_rank % torch.cuda.device_count()

    def _fetch(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        computed.record()
        on_host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(computed)
            for host, tensor in zip(on_host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copy_stream)  # so that torch does not reuse it too early
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


class RingUpload:
    """An `Upload` that copies all arrays of a call at once, from a ring of host buffers.

    depth: the number of buffers. It should be more than the number of unfinished copies, because
        the host waits for a buffer that is still being copied.
    pinned: whether the buffers are page-locked. If not, copies are synchronous, for tests on CPUs.
    """

    def __init__(self, device: torch.device, depth: int, *, pinned: bool) -> None:
        self.device = device
        self.pinned = pinned
        self._buffers = [self._new_buffer(1 << 16) for _ in range(depth)]
        self._copied: list[torch.cuda.Event | None] = [None] * depth
        self._next_buffer = 0

    def __call__(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        """Return the arrays as tensors on the device. The copy runs on the current stream."""
        index = self._next_buffer
        self._next_buffer = (index + 1) % len(self._buffers)
        # The offset of each array in the buffer, and the size of all.
        *starts, size = accumulate(
            (-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays), initial=0
        )
        host = self._writable(index, size)
        view = host.numpy()
        for array, start in zip(arrays, starts, strict=True):
            view[start : start + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        on_device = torch.empty(size, dtype=torch.uint8, device=self.device)
        on_device.copy_(host[:size], non_blocking=self.pinned)
        event = self._copied[index]
        if event is not None:
            event.record()
        return tuple(
            _section(on_device, start, like=array)
            for array, start in zip(arrays, starts, strict=True)
        )

    def _writable(self, index: int, size: int) -> Tensor:
        """Return a buffer with room for `size` bytes, once its last copy has ended."""
        event = self._copied[index]
        if event is not None:
            event.synchronize()
        elif self.pinned:
            self._copied[index] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if len(self._buffers[index]) < size:
            self._buffers[index] = self._new_buffer(2 * size)
        return self._buffers[index]

    def _new_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)


def _section(packed: Tensor, start: int, like: NDArray[Any]) -> Tensor:
    """Return the bytes from `start` on as a tensor with the dtype and shape of `like`."""
    dtype = torch.from_numpy(np.empty(0, dtype=like.dtype)).dtype
    return packed[start : start + like.nbytes].view(dtype).view(like.shape)
