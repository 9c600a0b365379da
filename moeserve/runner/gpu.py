"""The runner for CUDA: the host launches a step and goes on; results come back on a stream of their own.

No call in `launch` waits for the device. Importing this file does not touch CUDA.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
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
from moeserve.runner.inputs import HostRows
from moeserve.runner.memory import MemoryFacts
from moeserve.runner.recorder import CudaRecorder
from moeserve.runner.sampler import Sampler
from moeserve.runner.tables import Tables
from moeserve.runner.upload import RingUpload
from moeserve.runner.workspace import workspace_bytes

logger = logging.getLogger(__name__)
FP32 = 4
MOST_TABLE_ENTRIES = 1 << 30
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
        self.ubatches.comm = comm_stream(self.device)

    def _memory(self) -> MemoryFacts:
        free, total = torch.cuda.mem_get_info(self.device)
        own = torch.cuda.memory_allocated(self.device)
        reserve = torch.cuda.memory_reserved(self.device) - own  # can be had as well
        # Against a part of a device counts what this rank takes, not what the others do, whoever was here first.
        used = total - free - reserve if self.properties.sharers == 1 else own
        return MemoryFacts(limit=total, used=used, free=free + reserve)

    def profile_run(self) -> int:
        """What the largest step really takes, or more where the estimate says so; the request tables; what attention to
        long contexts needs; and graphs, which keep memory of their own: what the largest of them needs."""
        estimated, (step_bytes, table_bytes) = super().profile_run(), self._measured()
        logger.info("a step takes %d MiB, %d by estimate", step_bytes >> 20, estimated >> 20)
        needed, tokens = max(estimated, step_bytes) + table_bytes, min(MOST_TOKENS, limits.step_tokens(self.config))
        if self.by_triton:
            from moeserve.kernels.paged_attention import MOST_SPACE

            needed += FP32 * MOST_SPACE * len(self.groups)
        if self.graph_obstacle is not None:
            return needed
        scheduler = replace(self.config.scheduler, max_num_batched_tokens=tokens)
        return needed + workspace_bytes(self.spec, replace(self.config, scheduler=scheduler), self.dtype)

    def _measured(self) -> tuple[int, int]:
        """Bytes that the largest step takes at its peak beside weights and tables, and those of the tables."""
        config = self.config
        max_len = config.model.max_model_len or self.spec.max_position
        self.limits = Limits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=limits.step_tokens(config),
            prefill_chunk=limits.chunk_tokens(config),
            max_model_len=min(max_len, MOST_TABLE_ENTRIES // config.scheduler.max_num_seqs),  # memory may allow less
            block_size=config.cache.block_size,
            num_blocks=1,
        )
        before = torch.cuda.memory_allocated(self.device)
        self.initialize_kv_cache()
        tables = torch.cuda.memory_allocated(self.device) - before
        self.execute(dummy_plan(len(self.groups), 0, [1]))  # for what is allocated once, such as a library's work space
        torch.cuda.reset_peak_memory_stats(self.device)
        self.execute(largest_step(len(self.groups), self.limits))
        step = torch.cuda.max_memory_allocated(self.device) - before - tables
        del self.kv, self.tables, self.sampler, self.limits
        self.__dict__.pop("fixed_inputs", None)
        torch.cuda.empty_cache()
        return step, tables

    def warm_up(self) -> None:
        super().warm_up()
        if self.by_triton:  # compiled when first met, which no step of a request should wait for
            for plan in every_way(len(self.groups), self.limits):
                self.execute(plan)
            self.kv.clear_null_block()

    def capture_model(self) -> None:
        self.record_graphs(lambda: CudaRecorder(self.device, warm=not self.deals_experts))
        self.execute(dummy_plan(len(self.groups), 0, [1]))  # compiles what fills their inputs

    @property
    def by_triton(self) -> bool:
        return self.config.device.kernels != "torch" and find_spec("triton") is not None

    def make_tables(self) -> Tables:
        if not self.by_triton:
            return super().make_tables()
        from moeserve.runner.triton_inputs import scatter  # slow to import, as all that uses triton

        size = self.limits.max_num_seqs, self.limits.max_model_len
        return Tables(*size, self.groups, self.device, self.upload, scatter)

    def step_inputs(self, plan: StepPlan, host: HostRows) -> StepInputs:
        return self.fixed_inputs.exact(plan) if self.by_triton else super().step_inputs(plan, host)

    def make_sampler(self) -> Sampler:
        if not self.by_triton:
            return super().make_sampler()
        from moeserve.runner.triton_sampler import TritonSampler

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
