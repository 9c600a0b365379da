"""Fit the model of a rank into memory: its memory plan, from settings, device and headers."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from moeserve.comm.world import World
from moeserve.config import Config, Limits, Lossless
from moeserve.engine.blocks import KVGroup
from moeserve.errors import ConfigError
from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.packed_cache import folder_limit
from moeserve.models.spec import ModelSpec
from moeserve.moe.placement.placement import Placement
from moeserve.ops.quantized import QuantizeTo
from moeserve.runner.fit import (
    EXPERTS_ON_DISK,
    IN_12_BITS,
    INT8_KV,
    Alternatives,
    MemoryPlan,
    decide_once,
)
from moeserve.runner.kv_cache import block_bytes
from moeserve.runner.limits import DeviceProperties, MemoryFacts, mib, resolve, state_memory
from moeserve.runner.load import LoadSetup, cache_folder, set_up_loading
from moeserve.runner.speculation.drafters import drafter_bytes
from moeserve.runner.weight_sizes import (
    WeightSizes,
    compressed_names,
    quantized_params,
    weight_sizes,
)
from moeserve.speculation import SpeculationSpec

log = logging.getLogger(__name__)


class FittedRunner(Protocol):
    """The part of a model runner (runner/base.py) that decides how much memory its model needs."""

    spec: ModelSpec
    model_dir: Path
    device: torch.device
    dtype: torch.dtype
    quantize_to: QuantizeTo | None
    world: World
    placement: Placement | None
    groups: tuple[KVGroup, ...]
    speculation: SpeculationSpec | None
    shards_experts: bool
    properties: DeviceProperties
    folder: str

    def kv_dtype_of(self, config: Config) -> torch.dtype: ...

    def available_memory(self) -> MemoryFacts: ...

    def profile_estimate(self) -> int: ...

    def context_bytes(self, max_len: int) -> int: ...


class Fitted(NamedTuple):
    """Settings with which a model fits, and how it is loaded with them."""

    config: Config
    setup: LoadSetup
    notes: tuple[str, ...]  # what was chosen, for people


def fitted(runner: FittedRunner, config: Config, *, again: bool = False) -> Fitted:
    """Set up loading for a runner, and choose settings if its model does not fit into memory.

    config: the settings of the user. again: earlier choices failed, because the weights cannot be
    compressed to 12 bits.

    Raises ConfigError (CheckpointError, DoesNotFit).
    """
    setup = _set_up(runner, config)
    properties = runner.properties
    shares_gpu = properties.exclusive and properties.num_ranks > 1  # in tests
    if config.model.fit == "off" or config.parallel.nnodes > 1 or shares_gpu:
        return Fitted(config, setup, ())
    plan = _memory_plan(runner, config, setup, can_compress=not again)
    choices = decide_once(runner.folder, plan.choose, again=again)
    for note in choices.notes:
        log.warning("%s", note)
    config = choices.apply(config)
    if choices.notes:
        setup = _set_up(runner, config, setup.checkpoint)
    return Fitted(config, setup, choices.notes)


def limits_in(runner: FittedRunner, config: Config, budget: int) -> tuple[Limits, tuple[str, ...]]:
    """Return the limits with these settings for a budget of bytes, and notes about them.

    Raises DoesNotFit.
    """
    kv_dtype = runner.kv_dtype_of(config)
    bytes_per_block, bytes_per_state = (
        block_bytes(runner.groups, runner.spec, kv_dtype, runner.world.tp_size, pool=pool)
        for pool in (0, 1)
    )
    # Whether to use all the memory that is left, or only what requests are likely to use.
    fill = runner.properties.exclusive
    states = state_memory(config, bytes_per_state, budget, fill=fill)
    limits, notes = resolve(
        states.config,
        runner.spec,
        runner.groups,
        bytes_per_block,
        states.budget,
        fill=fill,
        beside=runner.context_bytes,
    )
    limits = replace(limits, num_states=states.num_states, num_store_states=states.num_stored)
    return limits, (*states.notes, *notes)


def _set_up(
    runner: FittedRunner, config: Config, checkpoint: Checkpoint | None = None
) -> LoadSetup:
    return set_up_loading(
        spec=runner.spec,
        model_dir=runner.model_dir,
        device=runner.device,
        dtype=runner.dtype,
        config=config,
        quantize_to=runner.quantize_to,
        world=runner.world,
        placement=runner.placement,
        checkpoint=checkpoint,
    )


def _memory_plan(
    runner: FittedRunner, config: Config, setup: LoadSetup, *, can_compress: bool
) -> MemoryPlan:
    return MemoryPlan(
        config=config,
        max_position=runner.spec.max_position,
        memory=runner.available_memory(),
        sizes=setup.sizes,
        other_weights=_drafter_bytes(runner, config, setup),
        workspace=runner.profile_estimate(),
        experts_per_token=runner.spec.experts_per_token,
        longest=lambda config, budget: limits_in(runner, config, budget)[0].max_model_len,
        find_alternatives=lambda: _alternatives(runner, config, setup, can_compress),
    )


def _alternatives(
    runner: FittedRunner, config: Config, setup: LoadSetup, can_compress: bool
) -> Alternatives:
    compression: Lossless = "all" if runner.spec.moe is None else "experts"
    in_12_bits = _sizes_in_12_bits(runner, setup, compression)
    obstacles = {
        INT8_KV: _int8_obstacle(runner, config),
        EXPERTS_ON_DISK: _disk_obstacle(runner, config, setup),
        IN_12_BITS: _compression_obstacle(config, setup, in_12_bits, can_compress),
    }
    return Alternatives(
        obstacles={name: why for name, why in obstacles.items() if why},
        compression=compression,
        sizes_in_12_bits=in_12_bits or setup.sizes,
    )


def _sizes_in_12_bits(
    runner: FittedRunner, setup: LoadSetup, compression: Lossless
) -> WeightSizes | None:
    """Return the sizes with compressed weights; None if no weight can be compressed."""
    if not setup.ops.supports_lossless:
        return None
    ops = replace(setup.ops, lossless=compression)
    quantize_to = runner.quantize_to
    quantized = quantized_params(setup.described, setup.plan, quantize_to)
    if not compressed_names(ops, setup.plan, [param.name for param, _ in quantized]):
        return None
    return weight_sizes(setup.described, setup.plan, ops, quantize_to)


def _drafter_bytes(runner: FittedRunner, config: Config, setup: LoadSetup) -> int:
    if runner.speculation is None or not runner.spec.draft_layers:
        return 0
    return drafter_bytes(
        runner.spec, runner.speculation, setup.described, setup.ops, config, runner.quantize_to
    )


def _int8_obstacle(runner: FittedRunner, config: Config) -> str:
    if config.cache.kv_cache_dtype != "auto":
        return f"kv_cache_dtype={config.cache.kv_cache_dtype} is set"
    if config.cache.kv_cache_bytes is not None:
        return "kv_cache_bytes is set"
    for layer in runner.spec.cached_layers:
        if obstacle := layer.mixer.cache_obstacle("int8"):
            return obstacle
    return ""


def _disk_obstacle(runner: FittedRunner, config: Config, setup: LoadSetup) -> str:
    if config.model.expert_memory is not None:
        return f"expert_memory={config.model.expert_memory} is set"
    if runner.spec.moe is None:
        return "this model has no experts"
    if not setup.ops.native:
        return "only the native kernels for CPUs support it"
    if runner.shards_experts:
        return "experts are sharded over ranks; --ep off gives each rank all of them"
    if config.model.packed_cache == "off":
        return "packed_cache=off is set"
    try:
        # The folder of the packed cache, if experts were on disk.
        model = replace(config.model, expert_memory=1)
        folder = cache_folder(replace(config, model=model), setup.ops, setup.sizes.total)
    except ConfigError as error:
        return str(error)
    assert folder is not None
    limit = folder_limit(Path(folder), config.model.packed_cache_bytes)
    needed = setup.sizes.total * runner.world.ranks_on_host
    if needed > limit:
        return f"{folder} may hold {mib(max(0, limit))}, but {mib(needed)} are needed"
    return ""


def _compression_obstacle(
    config: Config, setup: LoadSetup, in_12_bits: WeightSizes | None, can_compress: bool
) -> str:
    if config.model.lossless_compression != "auto":
        return f"lossless_compression={config.model.lossless_compression} is set"
    if not setup.ops.supports_lossless:
        return "it needs bfloat16 on a CPU with AVX512-BF16"
    if in_12_bits is None:
        return "the weights are quantized already"
    return "" if can_compress else "the values of the weights do not allow it"
