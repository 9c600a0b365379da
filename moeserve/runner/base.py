"""The model runner, without the parts that depend on the device.

It loads one rank's part of the model, computes how many KV blocks and state slots fit into the
remaining memory, allocates them, and warms up. step.py then executes the plans.

Each device has a subclass (cpu.py, gpu.py):

- It must override `_cache_device_properties`, `capture_model` and `enter_thread`.
- It may override `load_model` (the CPU does, to check itself), `profile_run`, `warm_up`,
  `make_tables`, `step_inputs`, `_fetch`, `_mark` and `_elapsed_us` (the GPU does).
- Its sampler is chosen in runner/sampling.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from moeserve.comm.members import Members
from moeserve.comm.world import World
from moeserve.config import Config, Limits
from moeserve.engine.blocks import groups_of
from moeserve.engine.plan import NewRequest
from moeserve.errors import ConfigError, IncompressibleWeights
from moeserve.logits_processors import ProcessorFactories
from moeserve.messages import SAMPLE, PlacementResult, PlacementTable
from moeserve.models.spec import ModelSpec
from moeserve.models.workspace import Inflow
from moeserve.moe.all2all.registry import make_backends, most_rows
from moeserve.moe.all2all.wire_format import wire_of
from moeserve.moe.placement.placement import Placement
from moeserve.ops.quantized import QuantizeTo
from moeserve.runner import limits as limits_of
from moeserve.runner.dummy import dummy_plan
from moeserve.runner.experts import ReadExpert
from moeserve.runner.graphs import GraphManager, GroupGraphs, common_sizes, sizes_of
from moeserve.runner.kv_cache import KVCache
from moeserve.runner.kv_transport import HostTransport
from moeserve.runner.limits import (
    DeviceProperties,
    MemoryFacts,
    check_block_size,
    check_diffusion,
    kv_budget,
    workspace_bytes,
)
from moeserve.runner.load import (
    READ_FROM,
    Loaded,
    LoadSetup,
    Progress,
    Shard,
    load_model,
)
from moeserve.runner.memory_plan import fitted, limits_in
from moeserve.runner.peers import Peers, make_tensor
from moeserve.runner.recorder import Recorder
from moeserve.runner.sampling.constraints import Constraints
from moeserve.runner.sampling.diffusion import BlockTask
from moeserve.runner.sampling.pick import make_sampler
from moeserve.runner.sampling.task import SampleTask
from moeserve.runner.speculation.base import Drafter, ProposerFacts
from moeserve.runner.speculation.drafters import load_drafter, with_drafter
from moeserve.runner.step import StepExecutor
from moeserve.runner.tables import Tables
from moeserve.runner.ubatches import UBatchRunner
from moeserve.sampling import TokenSampling
from moeserve.speculation import PROPOSERS, SpeculationSpec
from moeserve.version import __version__

if TYPE_CHECKING:
    from moeserve.runner.triton_inputs import FixedInputs

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SINGLE_RANK = World()
MAX_COPIES = 5  # copies of received activations that an all-to-all keeps at most (moe/all2all)


class ModelRunnerBase(StepExecutor, ABC):
    """Loads one rank's part of a model and executes step plans with it.

    `prepare` is called once, then `launch` for each plan. A rank of a tensor-parallel engine is
    prepared in three calls instead, because its limits depend on the other ranks: `load`, `resolve`
    and `allocate` (runner/group.py).

    grouped: whether the rank computes in a group: with the other ranks of its engine, or with other
        engines, which may also join later.
    folder: the private directory of this server on this machine; "": none.
    """

    device: torch.device
    busy_tokens: int  # tokens of a step that use the device fully
    warm_up_tokens = limits_of.TILE
    device_is_async = False  # whether `launch` returns before the step is done
    properties: DeviceProperties
    limits: Limits
    max_step_s = 0.0  # upper estimate of the time of the longest step
    mapped_bytes = 0  # weights in memory-mapped files
    drafter: Drafter | None = None  # the draft model, if there is one
    constraints: Constraints

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        model_dir: Path,
        world: World = SINGLE_RANK,
        placement: Placement | None = None,
        *,
        grouped: bool = False,
        folder: str = "",
    ) -> None:
        super().__init__()
        self.speculation = None
        if config.scheduler.speculate is not None:
            speculation = SpeculationSpec.parse(config.scheduler.speculate)
            self.speculation = speculation.resolve(has_mtp=spec.mtp is not None)
            spec = with_drafter(spec, model_dir, self.speculation)
        limits_of.check(config, spec)
        if spec.diffusion is not None:
            check_diffusion(config, spec, on_cpu=not self.device_is_async)
        self.processors = ProcessorFactories(config.model.logits_processors)
        check_block_size(config, spec)
        block = 1 if spec.diffusion is None else spec.diffusion.block
        self.given_config = limits_of.with_step_tokens(config, self.busy_tokens, block)
        self.config = self.given_config  # `fit` may change it
        self.spec = spec
        self.model_dir = model_dir
        self.world = world
        self.placement = placement or first_placement(config, spec, world)
        self.dtype = DTYPES[spec.dtype if config.model.dtype == "auto" else config.model.dtype]
        self.kv_dtype = self.kv_dtype_of(config)
        self.quantize_to: QuantizeTo | None = (
            None if config.model.quantization == "none" else config.model.quantization
        )
        self.groups = groups_of(spec.kv_rules, config.cache.block_size, len(spec.draft_layers))
        # A group of one rank counts as well, because ranks may be added to it later.
        self.shards_experts = (
            self.placement is not None and world.ep and (grouped or world.size > 1)
        )
        if self.shards_experts and config.model.expert_memory:
            raise ConfigError(
                "expert_memory keeps experts in a file, and these cannot be moved to other ranks. "
                "Use --ep off, so that each rank has all experts in its own file, or omit "
                "expert_memory."
            )
        num_ubatches = 2 if self.shards_experts and config.parallel.dbo != "off" else 1
        self.ubatches = UBatchRunner(num_ubatches, world.tp_size)
        self.tp = make_tensor(world, num_ubatches, self.device_is_async)
        self.notes: list[str] = []  # warnings for the user
        self.folder = folder
        self._setup: LoadSetup | None = None
        self.read_expert: ReadExpert | None = None  # reads one expert from the checkpoint
        self.fingerprint = ""  # fingerprint of the checkpoint
        self.on_placement_result: Callable[[PlacementResult], object] = lambda result: None

    @abstractmethod
    def _cache_device_properties(self) -> None:
        """Set `device`, `properties`, `upload`, and what else the device needs before the model is
        loaded.
        """

    def fit(self, *, again: bool = False) -> LoadSetup:
        """Set up loading. Change the configuration if the model does not fit (runner/fit.py).

        again: the choices of an earlier call have failed.

        Raises ConfigError (CheckpointError, DoesNotFit).
        """
        if not hasattr(self, "properties"):
            self._cache_device_properties()
        if self._setup is None or again:
            self.config, self._setup, notes = fitted(self, self.given_config, again=again)
            self.kv_dtype = self.kv_dtype_of(self.config)
            self.notes = list(notes)
        return self._setup

    def kv_dtype_of(self, config: Config) -> torch.dtype:
        return torch.int8 if config.cache.kv_cache_dtype == "int8" else self.dtype

    def available_memory(self) -> MemoryFacts:
        """Return the memory that this rank may use, measured now."""
        properties = self.properties
        memory = properties.share(properties.memory(), properties.num_ranks)
        return replace(memory, free=max(0, memory.free - properties.reserve))

    def _memory_to_load(self) -> MemoryFacts:
        # Of a device of our own, ranks that share it have loaded their weights, or not yet.
        return self.properties.memory() if self.properties.exclusive else self.available_memory()

    def load_model(self, progress: Progress) -> None:
        """Set `model`, `fingerprint`, `mapped_bytes`, `expert_cache` and `read_expert`."""
        try:
            loaded = self._load(self.fit(), progress)
        except IncompressibleWeights as error:
            if self.given_config.model.lossless_compression != "auto":
                raise
            logger.warning("%s", error)
            loaded = self._load(self.fit(again=True), progress)
        self.model = loaded.model
        self.mapped_bytes = loaded.mapped_bytes
        self.expert_cache = loaded.expert_cache
        self.read_expert = loaded.files.read
        self.fingerprint = loaded.files.fingerprint()

    def _load(self, setup: LoadSetup, progress: Progress) -> Loaded:
        return load_model(
            spec=self.spec,
            model_dir=self.model_dir,
            device=self.device,
            dtype=self.dtype,
            config=self.config,
            quantize_to=self.quantize_to,
            shard=self.shard(),
            memory=self._memory_to_load(),
            progress=progress,
            setup=setup,
        )

    @property
    def numerics(self) -> dict[str, str]:
        """Everything besides the request and the weights that determines the bits of its logits and
        tokens. For receipts.

        Empty if the bits also depend on other requests or on the placement of experts.
        """
        ops = self.model.ops
        config = self.config
        if not ops.exact or config.parallel.wire != "auto":
            return {}
        return {
            "moeserve": __version__,
            "torch": str(torch.__version__),
            "device": "cpu" if self.device.type == "cpu" else self.properties.name,
            "vectors": torch.backends.cpu.get_cpu_capability(),  # used by torch when it samples
            "kernels": ops.description,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": config.model.quantization,
            "activations": config.model.activations,
            "kv_cache_dtype": str(self.kv_dtype).removeprefix("torch."),
        }

    def profile_run(self) -> int:
        """Return the bytes that one step needs in addition to weights and KV blocks."""
        return workspace_bytes(self.spec, self.config, self.dtype, self.inflow)

    def profile_estimate(self) -> int:
        """Return an upper bound of `profile_run` before the model is loaded."""
        return self.profile_run()

    def context_bytes(self, max_len: int) -> int:
        """Return the bytes that contexts of up to `max_len` tokens need in addition to their KV
        blocks, as far as `profile_run` does not count them.
        """
        return 0

    @abstractmethod
    def capture_model(self) -> None:
        """Set `graphs`, once the KV cache is allocated. Devices without graphs do nothing."""

    def record_graphs(self, recorder: Callable[[], Recorder]) -> None:
        """Set `graphs`, unless graphs are unsupported.

        If all steps run on this rank alone, the graphs are recorded now. Otherwise each graph is
        recorded in the first step of its size, by all ranks together.
        """
        if self.graphs_unsupported is not None:
            logger.info("all steps run without graphs: %s", self.graphs_unsupported)
            return
        choose_sizes = common_sizes if self.shards_experts else sizes_of
        sizes = choose_sizes(self.config.device.graphs, self.limits)
        num_drafts = self.limits.num_drafts
        if self.computes_with_others:
            graphs = GroupGraphs(
                forward=self._forward,
                fixed_inputs=self.fixed_inputs,
                recorder=recorder(),
                ubatches=self.ubatches.ubatches,
                sizes=sizes,
                peers=self.peers,
                shards_experts=self.shards_experts,
                num_drafts=num_drafts,
            )
            self.graphs = graphs
            if self.shards_experts:
                self.ubatches.round_up = graphs.round_up
            # Recorded steps use kernels that read the number of tokens from the device. Steps
            # without graphs never run these kernels, so the kernels are not compiled yet. Nothing
            # may be compiled during a recording, so run the kernels once now.
            self._forward(self.fixed_inputs.largest(1, 1))
            return
        self.graphs = GraphManager(
            forward=self._forward,
            fixed_inputs=self.fixed_inputs,
            recorder=recorder(),
            ubatches=self.ubatches.ubatches,
            sizes=sizes,
            num_drafts=num_drafts,
        )
        self.graphs.capture()

    @cached_property
    def fixed_inputs(self) -> "FixedInputs":
        """The input buffers of recorded steps. A Triton kernel fills them."""
        from moeserve.runner.triton_inputs import FixedInputs  # imports triton

        return FixedInputs(
            self.tables, self.groups, self.upload, self.limits.max_num_batched_tokens
        )

    @property
    def graphs_unsupported(self) -> str | None:
        """The reason why no step can be recorded; None if steps can be recorded."""
        if self.config.device.graphs == "off":
            return "graphs: off"
        if self.spec.diffusion is not None:
            return f"{self.spec.architecture} decodes blocks"
        if self.tp.why_not_recordable:
            return self.tp.why_not_recordable
        if self.shards_experts:
            return self.peers.why_not_recordable or self.model.why_mixers_not_recordable
        return self.model.why_not_recordable

    @property
    def computes_with_others(self) -> bool:
        """Whether a step of this rank needs other ranks."""
        return self.shards_experts or self.tp.size > 1

    @abstractmethod
    def enter_thread(self) -> None:
        """Set up the thread that calls `prepare` and `launch`. Called first in that thread."""

    def prepare(self, progress: Progress = lambda phase, percent: None) -> Limits:
        """Load the model, size and allocate the memory, and run warm-up steps.

        Raises ConfigError (CheckpointError, DoesNotFit) with a remedy.
        """
        limits = self.resolve(self.load(progress))
        self.allocate(limits, progress)
        return limits

    @torch.inference_mode()
    def load(self, progress: Progress) -> int:
        """Load this rank's part of the model. Return the bytes left for its KV blocks."""
        if not hasattr(self, "properties"):  # unless `fit` was called first
            self._cache_device_properties()
        progress("reading the checkpoint", READ_FROM)
        self.load_model(progress)
        if self.speculation is not None and self.spec.draft_layers:
            self.drafter = load_drafter(
                spec=self.spec,
                model_dir=self.model_dir,
                speculation=self.speculation,
                model=self.model,
                config=self.config,
                quantize_to=self.quantize_to,
                shard=self.shard(),
                memory=self._memory_to_load(),
            )
        self.peers = Peers(
            layers=self.model.moe_layers,
            tp=self.tp,
            rank=self.world.expert_rank,
            placement=self.placement,
            wire=wire_of(self.config.parallel.wire, self.dtype),
            read=self.read_expert if self.shards_experts else None,
            num_ubatches=len(self.ubatches.ubatches),
            on_placement_result=lambda result: self.on_placement_result(result),
        )
        return kv_budget(
            self.available_memory(),
            self.config.cache.memory_utilization,
            self.profile_run(),
            self.mapped_bytes,
        )

    def resolve(self, budget: int) -> Limits:
        """Return the limits for a budget of bytes for KV blocks.

        An engine with several ranks passes the smallest of their budgets.
        """
        limits, notes = limits_in(self, self.config, budget)
        if self.speculation is not None:
            limits = replace(
                limits,
                num_drafts=self.speculation.num_drafts,
                auto_drafts=self.speculation.auto,
                draft_model=self.drafter is not None,
            )
        if self.spec.diffusion is not None:
            limits = limits_of.in_blocks(limits, self.spec.diffusion.block)
        self.notes += notes
        for note in notes:
            logger.warning("%s", note)
        return limits

    @torch.inference_mode()
    def allocate(self, limits: Limits, progress: Progress) -> None:
        """Allocate the memory for `limits`, and run warm-up steps."""
        self.limits = limits
        progress("allocating the KV cache", 90)
        self.initialize_kv_cache()
        progress("warming up", 95)
        self.warm_up()
        self.capture_model()

    def shard(self) -> Shard:
        """Return this rank's part of the model, and its connections to other ranks."""
        spec = self.spec
        placement = self.placement
        backends = []
        if placement is not None:
            backends = make_backends(
                self.config.parallel,
                hidden_size=spec.hidden_size,
                dtype=self.dtype,
                top_k=spec.experts_per_token,
                max_tokens=self.max_tokens,
                experts_per_rank=placement.experts_per_rank,
                num_ranks=max(2, placement.num_ranks) if self.shards_experts else 1,
                device=self.device.type,
            )
        return Shard(
            world=self.world,
            placement=placement,
            tp=self.tp,
            backends=backends,
            ubatches=len(self.ubatches.ubatches),
            max_tokens=self.max_tokens,
        )

    @property
    def max_tokens(self) -> int:
        """The most tokens that this rank sends to experts in one step.

        The ranks of an engine divide the tokens of a step among themselves (moe/layer.py).
        """
        return -(-limits_of.step_tokens(self.config) // self.world.tp_size)

    @property
    def inflow(self) -> Inflow | None:
        """The memory for what other ranks may send to this one; None if experts are not sharded.
        Before `load` it is an upper bound.
        """
        if not self.shards_experts:
            return None
        assert self.placement is not None
        peers: Peers | None = getattr(self, "peers", None)
        row_bytes = self.spec.hidden_size * self.dtype.itemsize
        return Inflow(
            rows=most_rows(
                self.max_tokens, self.spec.experts_per_token, row_bytes, self.device.type
            ),
            ubatches=len(self.ubatches.ubatches),
            copies=MAX_COPIES if peers is None else peers.caps.copies,
            # The new experts of one layer, and three copies of the expert that is being read: two
            # as read, one as packed.
            moving=self.placement.experts_per_rank + 3,
        )

    def join(self, members: Members, table: PlacementTable | None) -> None:
        """Connect to the other members of the group. Blocks.

        Raises PeerLost if a member does not join, and ConfigError if a member has other sizes of
        recorded steps (`GroupGraphs.round_up`).
        """
        sizes: Sequence[int] = ()
        if isinstance(self.graphs, GroupGraphs):
            # The sizes of the mode with the most sizes; other modes have the first ones of these.
            sizes = max(self.graphs.sizes.values(), key=len)
        terms = (
            f"{len(sizes)} sizes of recorded steps (none without Triton) up to "
            f"{max(sizes, default=0)} tokens"
        )
        self.peers.join(replace(members, terms=terms), table)

    def leave(self) -> None:
        """Close all connections to other ranks. May be called from any thread.

        A step that waits for another rank then raises PeerLost. It can run again after the next
        `join`.
        """
        if isinstance(self.graphs, GroupGraphs):
            self.graphs.forget()
        if (peers := getattr(self, "peers", None)) is not None:
            peers.leave()

    def initialize_kv_cache(self) -> None:
        """Allocate KV blocks and request tables for `limits`."""
        limits = self.limits
        self.kv = KVCache(
            self.groups,
            self.spec,
            limits.num_blocks,
            self.kv_dtype,
            self.device,
            self.world.tp_size,
            num_states=limits.num_states,
        )
        num_entries = {0: limits.num_store_blocks, 1: limits.num_store_states}
        self.transport = HostTransport(num_entries, self.device, self.upload)
        self.transport.register(self.kv.pools)
        self.tables = self.make_tables()
        kernels = self.config.device.kernels
        is_async = self.device_is_async
        vocab_size = self.spec.vocab_size
        self.sampler = make_sampler(
            vocab_size, self.tables, self.upload, kernels, is_async=is_async
        )
        self.sampler.factories = self.processors
        # The engine uses the results of rank 0 alone, so other ranks need no digests.
        self.sampler.digests = self.world.tp_rank == 0
        self.constraints = Constraints(self.model_dir, vocab_size, self.spec.eos_token_ids)
        self.sampling = SampleTask(
            self.model, self.sampler, self.constraints, self.tables, self.upload
        )
        self.tasks = {SAMPLE: self.sampling}
        if (diffusion := self.spec.diffusion) is not None:
            self.tasks = {
                SAMPLE: BlockTask(self.model, diffusion, vocab_size, self.tables, self.upload)
            }
        if self.speculation is None:
            return
        drafter = self.drafter and replace(self.drafter, caches=self.kv.draft_layers)
        self.proposer = PROPOSERS[self.speculation.kind](
            ProposerFacts(
                spec=self.speculation,
                slots=limits.max_num_seqs,
                upload=self.upload,
                groups=self.groups,
                tables=self.tables,
                sampler=self.sampler,
                drafter=drafter,
            )
        )

    def make_tables(self) -> Tables:
        """Return empty request tables for `limits`."""
        limits = self.limits
        return Tables(
            limits.max_num_seqs, limits.max_model_len, self.groups, self.device, self.upload
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a prefill and a decode of one request, so that every kernel has run. Both write their
        K and V to the null block.

        Set `max_step_s` from the time of the prefill, so that slow steps are not mistaken for a
        hang. Caches are cold, so that time is an upper estimate.
        """
        unit = self.limits.diffusion_block or 1
        length = min(self.warm_up_tokens, self.limits.prefill_chunk, self.limits.max_model_len - 1)
        length = max(unit, length // unit * unit)
        sampling = TokenSampling(seed=0, max_tokens=2, top_k=2, top_p=0.9)
        tokens = np.arange(length, dtype=np.int32) % self.spec.vocab_size
        began_at_s = time.perf_counter()
        self.execute(
            dummy_plan(len(self.groups), 0, [length], (NewRequest(0, tokens, length, sampling),))
        )
        # The longest step has as many tokens as this number of prefills.
        num_prefills = -(-self.limits.max_num_batched_tokens // length)
        self.max_step_s = (time.perf_counter() - began_at_s) * num_prefills
        if length < self.limits.max_model_len:
            self.execute(dummy_plan(len(self.groups), length, [unit]))
        self.kv.clear_null_block()

    def close(self) -> None:
        """End the threads of this runner."""
        if (constraints := getattr(self, "constraints", None)) is not None:
            constraints.close()
        self.ubatches.close()
        if (peers := getattr(self, "peers", None)) is not None:
            peers.close()


def first_placement(config: Config, spec: ModelSpec, world: World) -> Placement | None:
    """Return the initial placement of the experts; None for a model without experts."""
    if spec.moe is None:
        return None
    redundant = config.parallel.redundant_experts if world.ep else 0
    return Placement.initial(
        len(spec.moe_layers), spec.num_experts, world.num_expert_ranks, redundant
    )
