"""Load this rank's part of a model.

The checkpoint gives the tensors, the model family's load plan says which of them belong to this
rank, the ops table packs them for its kernels, and `build_decoder` builds the layers.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moeserve.comm.tensor import TensorParallel
from moeserve.comm.world import World
from moeserve.config import Activations, Config, Lossless
from moeserve.errors import ConfigError
from moeserve.loader.checkpoint import Checkpoint, open_checkpoint
from moeserve.loader.dummy import RandomReader, dummy_checkpoint
from moeserve.loader.expert_memory import ExpertMemory
from moeserve.loader.experts import ExpertFiles
from moeserve.loader.fresh_memory import FreshMemory
from moeserve.loader.load_plan import LoadPlan, is_packed
from moeserve.loader.packed_cache import (
    MIN_MODEL_BYTES,
    CachedParams,
    PackedCache,
    folder_of,
    key_of,
)
from moeserve.loader.weights import Params, Reader
from moeserve.models.build import build_decoder
from moeserve.models.decoder import Decoder
from moeserve.models.load_plan import expert_load_plan, load_plan
from moeserve.models.spec import ModelSpec
from moeserve.moe.all2all.base import All2All
from moeserve.moe.experts.registry import EXPERT_KERNELS
from moeserve.moe.placement.placement import Placement
from moeserve.ops.native_layer import allocate_new
from moeserve.ops.pick import pick_ops
from moeserve.ops.quantized import QuantizeTo
from moeserve.ops.table import Ops
from moeserve.ops.traced import traced
from moeserve.runner.experts import BYTES_PER_S, CPU_SHARE, Pace
from moeserve.runner.limits import MemoryFacts, check_weights_fit
from moeserve.runner.weight_sizes import (
    WeightSizes,
    bytes_in_memory,
    compressed_names,
    loading_bytes,
    quantized_params,
    weight_bytes,
    weight_sizes,
)

log = logging.getLogger(__name__)
_DUMMY_NEEDS_ONE_RANK = "load_format=dummy is for one rank"
Progress = Callable[[str, int], None]  # description of the phase, percent of the whole
# Percent of the start at which reading the weights begins and ends.
READ_FROM = 5
READ_TO = 85


class Shard(NamedTuple):
    """The part of the model that a rank holds, and its connections to other ranks."""

    world: World
    placement: Placement | None  # placement of the experts; None for a model without experts
    tp: TensorParallel
    backends: Sequence[All2All]  # all-to-all backends in order of preference
    ubatches: int  # number of micro-batches
    max_tokens: int  # most tokens of one step on one rank


class Loaded(NamedTuple):
    """A loaded model."""

    model: Decoder
    files: ExpertFiles  # reads single experts later, when experts move to this rank
    mapped_bytes: int  # bytes of weights in memory-mapped files
    expert_cache: Any  # the native cache of experts, if experts are on disk; otherwise None


class LoadSetup(NamedTuple):
    """How a model is loaded: decided and checked before weights are read."""

    checkpoint: Checkpoint
    described: Checkpoint  # describes the weights; for dummy weights, made up from the load plan
    plan: LoadPlan
    ops: Ops
    sizes: WeightSizes
    cache_folder: str | None  # None: packed weights are not cached on disk


def load_model(
    spec: ModelSpec,
    model_dir: Path,
    device: torch.device,
    dtype: torch.dtype,
    config: Config,
    quantize_to: QuantizeTo | None,
    shard: Shard,
    memory: MemoryFacts,
    progress: Progress,
    setup: LoadSetup,
) -> Loaded:
    """Load this rank's part of a model.

    quantize_to: the dtype to which linear layers are quantized at load time; None: as stored.
    memory: the memory of the device.
    setup: from `set_up_loading` with the same arguments.

    Raises ConfigError (CheckpointError, DoesNotFit).
    """
    check_weights_fit(
        bytes_in_memory(setup.sizes, config.model.expert_memory),
        memory,
        loading_bytes(setup.sizes, config.model.expert_memory),
    )
    _log_activations(setup.ops, spec, setup.checkpoint, shard)
    checkpoint = setup.checkpoint
    described = setup.described
    plan = setup.plan
    ops = setup.ops
    is_dummy = config.model.load_format == "dummy"
    expert_memory = config.model.expert_memory

    # Choose where packed weights are: in fresh memory, or in a file, with experts that stay there.
    files = ExpertFiles(
        checkpoint,
        lambda layer, expert: expert_load_plan(spec, checkpoint.names, layer, [expert]),
        dtype,
        device,
        quantize_to,
    )
    percent = _Percent(progress)
    if not (shard.world.size > 1 or expert_memory):
        ops = _with_fresh_memory(ops, described, plan, quantize_to)
    cache = None
    # Only for the initial placement: no later start would use the file of another one.
    if setup.cache_folder and not (shard.placement and shard.placement.version):
        quantized = dict(quantized_params(described, plan, quantize_to))
        forms = f"{quantize_to} {checkpoint.activations} {ops.lossless} {quantized}"
        cache = PackedCache(
            setup.cache_folder,
            key_of(f"{is_dummy} {files.identity()}", plan, shard.world, dtype, forms),
            percent.mapping,
            limit_bytes=config.model.packed_cache_bytes,
            num_sharers=shard.world.ranks_on_host,
            num_bytes_on_disk=setup.sizes.total if expert_memory else 0,
            allocate=ops.allocate,
        )
    experts_on_disk = None
    if cache and expert_memory:
        experts_on_disk = ExpertMemory(cache, expert_memory, spec.experts_per_token)
    if cache:
        register = experts_on_disk.register if experts_on_disk else None
        ops = ops.packing_into(cache.allocate, register)

    # Read, pack and build.
    params_of: Callable[..., Params] = partial(CachedParams, cache) if cache else Params
    reader = RandomReader if is_dummy else Reader
    with params_of(
        described,
        plan,
        dtype,
        device=device,
        quantize_to=quantize_to,
        progress=percent.read,
        reader=reader,
    ) as params:
        longest = config.model.max_model_len or spec.max_position
        model = build_decoder(spec, params, ops, max_position=longest, **shard._asdict())
    files.check()  # raises CheckpointError if the files have changed since they were opened
    if experts_on_disk:
        experts_on_disk.open(model.moe_layers)
    if cache:
        cache.finish(lambda: Pace(threading.Event(), CPU_SHARE, BYTES_PER_S))
    return Loaded(
        model=model,
        files=files,
        mapped_bytes=cache.mapped_bytes if cache else 0,
        expert_cache=experts_on_disk.native if experts_on_disk else None,
    )


def set_up_loading(
    spec: ModelSpec,
    model_dir: Path,
    device: torch.device,
    dtype: torch.dtype,
    config: Config,
    quantize_to: QuantizeTo | None,
    world: World,
    placement: Placement | None,
    checkpoint: Checkpoint | None = None,
) -> LoadSetup:
    """Plan which tensors to load, and choose the kernels. See `load_model`.

    checkpoint: of an earlier setup with other settings; None: open it.

    Raises ConfigError if the kernels do not support the weights.
    """
    is_dummy = config.model.load_format == "dummy"
    expert_memory = config.model.expert_memory
    if is_dummy and world.size > 1:
        raise ConfigError(_DUMMY_NEEDS_ONE_RANK)
    if checkpoint is None:
        checkpoint = (
            Checkpoint(model_dir, {}) if is_dummy else open_checkpoint(model_dir, spec.stored)
        )
    plan = load_plan(spec, checkpoint.names, world, placement)
    ops = _ops_for(spec, device, dtype, config)
    checkpoint = _for_kernels(checkpoint, ops, config)
    described = checkpoint
    if is_dummy:
        described = _for_kernels(
            dummy_checkpoint(model_dir, plan, spec.stored, quantize_to), ops, config
        )
    sizes = weight_sizes(described, plan, ops, quantize_to)
    folder = cache_folder(config, ops, sizes.total)
    _check_kernels(
        ops,
        described,
        plan,
        quantize_to,
        packed_cache=folder,
        expert_memory=expert_memory,
        lossless=ops.lossless,
    )
    return LoadSetup(checkpoint, described, plan, ops, sizes, folder)


def _ops_for(spec: ModelSpec, device: torch.device, dtype: torch.dtype, config: Config) -> Ops:
    ops = _with_attention(_pick_ops(device, dtype, config, spec), config, spec)
    ops = ops.with_lossless(config.model.lossless_compression)
    return traced(ops) if config.device.compile else ops


class _Percent:
    """Reports the progress of reading, once per percent."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._last = READ_FROM

    def read(self, done: int, total: int) -> None:
        percent = READ_FROM + (READ_TO - READ_FROM) * done // max(1, total)
        if percent > self._last:
            self._last = percent
            self._progress("reading and packing the weights", percent)

    def mapping(self) -> None:
        self._progress("mapping packed weights", self._last)


def _log_activations(ops: Ops, spec: ModelSpec, checkpoint: Checkpoint, shard: Shard) -> None:
    """Log how the activations of a checkpoint that quantizes them are computed. Once per group."""
    quantized = any(form.activations or form.layout == "ggml" for form in spec.stored)
    if quantized and not shard.world.rank:
        log.info(
            "the checkpoint quantizes activations, too: %s",
            _describe_activations(ops, spec, checkpoint.activations),
        )


@contextmanager
def draft_params(
    spec: ModelSpec,
    model_dir: Path,
    model: Decoder,
    config: Config,
    quantize_to: QuantizeTo | None,
    memory: MemoryFacts,
    plan_of: Callable[[Collection[str]], LoadPlan],
) -> Iterator[tuple[Params, Ops]]:
    """Open the checkpoint of a draft model for the target `model`.

    plan_of: returns the load plan for the names of its tensors.
    """
    is_dummy = config.model.load_format == "dummy"
    device = model.ops.device
    dtype = model.ops.dtype
    checkpoint = Checkpoint(model_dir, {}) if is_dummy else open_checkpoint(model_dir, spec.stored)
    plan = plan_of(checkpoint.names)
    # The draft model is not packed into the target's file of packed weights.
    ops = model.ops.packing_into(allocate_new) if model.ops.native else model.ops
    described = (
        dummy_checkpoint(model_dir, plan, spec.stored, quantize_to) if is_dummy else checkpoint
    )
    described = _for_kernels(described, ops, config)
    check_weights_fit(weight_bytes(described, plan, ops, quantize_to), memory)
    _check_kernels(ops, described, plan, quantize_to)
    reader = RandomReader if is_dummy else Reader
    with Params(
        described, plan, dtype, device=device, quantize_to=quantize_to, reader=reader
    ) as params:
        yield params, ops


def _pick_ops(device: torch.device, dtype: torch.dtype, config: Config, spec: ModelSpec) -> Ops:
    """Return the ops table for the setting `kernels`. A plugin for experts is used together with
    the best built-in kernels.
    """
    kernels = config.device.kernels
    is_plugin = kernels in EXPERT_KERNELS.plugins
    table: Any = "auto" if is_plugin else kernels
    ops = pick_ops(device, dtype, table, obstacle=spec.obstacle, exact=config.device.exact)
    return replace(ops, kernels_setting=kernels) if is_plugin else ops


def _with_attention(ops: Ops, config: Config, spec: ModelSpec) -> Ops:
    """Return the ops table with the configured attention backend. Raises ConfigError if it is
    unsupported.
    """
    backend = config.device.attention_backend
    if not ops.triton and backend != "auto":
        raise ConfigError(
            f"attention_backend={backend} needs Triton kernels, but the kernels here are "
            f"{ops.description}; use attention_backend=auto"
        )
    if not ops.triton or backend == "triton":
        return ops
    from moeserve.ops.triton_ops import with_flash_attention  # slow to import

    return with_flash_attention(
        ops, config.cache, required=backend == "fa3", misfit=spec.obstacle("fa3")
    )


def _for_kernels(checkpoint: Checkpoint, ops: Ops, config: Config) -> Checkpoint:
    """Return the checkpoint with the form in which these kernels will use its weights.

    Of a GGUF file with minima (k-quants), only the native kernels keep weights quantized. All
    weights are widened for other kernels, because Triton needs gate, up and down all quantized or
    none.
    """
    activations = config.model.activations
    obstacle = ops.weight_obstacle
    rows = "float" if activations == "auto" and not ops.native else activations
    if obstacle is None or (
        not ops.native and any(weight.format.mins for weight in checkpoint.stored.values())
    ):
        return replace(checkpoint, activations=rows, obstacle=lambda *weight: "no kernels")
    return replace(checkpoint, activations=rows, obstacle=obstacle)


def cache_folder(config: Config, ops: Ops, num_bytes: int) -> str | None:
    """Return the folder for the file of packed weights; None if they are not cached."""
    packed_cache = config.model.packed_cache
    needed = config.model.expert_memory is not None
    large = config.model.load_format != "dummy" and num_bytes >= MIN_MODEL_BYTES
    if packed_cache == "off" or (packed_cache is None and not (ops.native and (large or needed))):
        return None
    folder = folder_of(packed_cache)
    if folder is None and needed:
        raise ConfigError(
            "expert_memory keeps experts in a file of packed weights, but this user has no home "
            "directory for it; set HOME, or set packed_cache to a folder"
        )
    return folder


def _with_fresh_memory(
    ops: Ops, checkpoint: Checkpoint, plan: LoadPlan, quantize_to: QuantizeTo | None
) -> Ops:
    """Return the ops table, set to pack large weights into memory whose pages are prepared ahead of
    time.
    """
    packed = replace(plan, params=tuple(param for param in plan.params if is_packed(param.name)))
    num_bytes = weight_bytes(checkpoint, packed, ops, quantize_to)
    return (
        ops.packing_into(FreshMemory(num_bytes).allocate)
        if ops.native and num_bytes >= MIN_MODEL_BYTES
        else ops
    )


def _check_kernels(
    ops: Ops,
    checkpoint: Checkpoint,
    plan: LoadPlan,
    quantize_to: QuantizeTo | None,
    packed_cache: str | None = None,
    expert_memory: int | None = None,
    lossless: Lossless = "off",
) -> None:
    """Raise ConfigError for weights that these kernels do not support, and for settings without
    effect. Called before the weights are read.

    lossless: the setting lossless_compression; "off" for a draft model, which need not have weights
    to compress.
    """
    our_kernels = f"the kernels here are {ops.description} on {ops.device.type}"
    native = "--device cpu with kernels: native"
    for name, value in (("expert_memory", expert_memory), ("packed_cache", packed_cache)):
        if value and not ops.native:
            raise ConfigError(
                f"{name} needs the native kernels for CPUs, but {our_kernels}; omit {name}, or use "
                f"{native}"
            )
    if checkpoint.activations == "int8" and not ops.native:
        raise ConfigError(
            f"activations=int8 needs the native kernels, but {our_kernels}; use activations=auto, "
            f"or {native}"
        )
    quantized = [param.name for param, _ in quantized_params(checkpoint, plan, quantize_to)]
    if lossless != "off" and not compressed_names(ops, plan, quantized):
        which = "experts" if lossless == "experts" else "linear layers"
        raise ConfigError(
            f"lossless_compression={lossless}, but no {which} of this model have 16-bit weights "
            "and a multiple of 8 inputs; use lossless_compression=off"
        )
    remedy = "--quantization none" if quantize_to else "the float16 or bfloat16 checkpoint"
    for param, form in quantized_params(checkpoint, plan, quantize_to):
        if ops.weight_obstacle is None:
            raise ConfigError(
                "quantized weights need the native kernels for CPUs or Triton kernels for GPUs, "
                f"but {our_kernels}; use {remedy}, or {native}"
            )
        if (
            form.activation_format(checkpoint.activations) == "int8"
            and ops.native
            and (why := form.int8_activations_obstacle(param.shape[-1]))
        ):
            raise ConfigError(
                f"{why}, and {param.name} is {form.description}; use activations=float"
            )
        if why := ops.weight_obstacle(form.kind, form.group, param.shape[-1]):
            what = f"{param.name} has {param.shape[-1]}" + (
                f", in groups of {form.group}" if form.group else ""
            )
            raise ConfigError(f"{why}, and {what}, {our_kernels}; use {remedy}, or {native}")


def _describe_activations(ops: Ops, spec: ModelSpec, activations: Activations) -> str:
    """Return how quantized activations are computed here, for the log."""
    if ops.triton and spec.moe:
        from moeserve.ops.triton_weights import multiplies_e4m3  # slow to import

        sizes = spec.hidden_size, spec.expert_size
        if any(multiplies_e4m3(form.kind, form.rows, form.group, *sizes) for form in spec.stored):
            return (
                "here those of experts become e4m3 with a scale for every 128 elements, all others "
                f"stay {ops.dtype}"
            )
    if ops.native and any(form.activation_format(activations) == "int8" for form in spec.stored):
        return "here they become int8 with a scale for every 32 elements, unless activations=float"
    return f"here they stay {ops.dtype}, only weights are quantized"
