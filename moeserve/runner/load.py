"""Loads this rank's part of a model: the loader reads weights, the family builds layers, the ops
table computes.
"""

import logging
import math
import threading
from collections import defaultdict
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
from moeserve.loader.dummy import RandomReader, imagined, rounded_format
from moeserve.loader.expert_memory import ExpertMemory
from moeserve.loader.experts import ExpertFiles
from moeserve.loader.fresh_memory import FreshMemory
from moeserve.loader.load_plan import LoadPlan, Param, Piece, is_expert, is_packed
from moeserve.loader.packed_cache import LEAST, CachedParams, PackedCache, folder_of, key_of
from moeserve.loader.stored_format import StoredFormat
from moeserve.loader.weights import Params, Reader, format_of
from moeserve.models.build import build_decoder
from moeserve.models.decoder import Decoder
from moeserve.models.load_plan import expert_load_plan, load_plan
from moeserve.models.spec import ModelSpec
from moeserve.moe.all2all.base import All2All
from moeserve.moe.experts.registry import EXPERT_KERNELS
from moeserve.moe.placement.placement import Placement
from moeserve.ops.native_layer import BYTES_IN_12_BITS, new_room
from moeserve.ops.pick import pick_ops
from moeserve.ops.quantised import QuantizeTo
from moeserve.ops.table import Ops
from moeserve.ops.traced import traced
from moeserve.runner.experts import BYTES_PER_S, SHARE, Pace
from moeserve.runner.limits import MemoryFacts, check_weights_fit

log = logging.getLogger(__name__)
_DUMMY = "load_format=dummy is for one rank"
Progress = Callable[[str, int], None]  # description of the phase, percent of the whole
# percent of start-up that reading the weights takes
READ_FROM = 5
READ_TO = 85


class Shard(NamedTuple):
    """The part of the model that a rank holds, and its connections to other ranks.

    placement: the experts of each rank; None for a model without any. backends: in order of
    preference. max_tokens: of one step on one rank.
    """

    world: World
    placement: Placement | None
    tp: TensorParallel
    backends: Sequence[All2All]
    ubatches: int
    max_tokens: int


class Loaded(NamedTuple):
    """A model and what stays of loading it."""

    model: Decoder
    files: ExpertFiles  # single experts can be read from them
    mapped_bytes: int  # of weights that lie in a file
    expert_cache: Any  # the native one, where experts are on disk; else None


def load_model(
    spec: ModelSpec,
    model_dir: Path,
    device: torch.device,
    dtype: torch.dtype,
    config: Config,
    asked: QuantizeTo | None,
    shard: Shard,
    memory: MemoryFacts,
    progress: Progress,
) -> Loaded:
    """Load this rank's part of a model.

    asked: how to quantise linear layers. memory: of the device.

    Raises ConfigError (CheckpointError, DoesNotFit) with what is wrong and where.
    """
    dummy = config.model.load_format == "dummy"
    expert_memory = config.model.expert_memory
    if dummy and shard.world.size > 1:
        raise ConfigError(_DUMMY)
    checkpoint = Checkpoint(model_dir, {}) if dummy else open_checkpoint(model_dir, spec.stored)
    names = checkpoint.names
    plan = load_plan(spec, names, shard.world, shard.placement)
    ops = _with_attention(_ops(device, dtype, config, spec), config, spec)
    ops = ops.compressing(config.model.lossless_compression)
    if config.device.compile:
        ops = traced(ops)
    checkpoint = _for_kernels(checkpoint, ops, config)
    described = checkpoint
    if dummy:
        described = _for_kernels(imagined(model_dir, plan, spec.stored, asked), ops, config)
    num_bytes = weight_bytes(described, plan, ops, asked)
    check_weights_fit(num_bytes - _on_disk(described, plan, ops, asked, expert_memory), memory)
    folder = _folder(config, ops, num_bytes)
    _check_kernels(ops, described, plan, asked, folder, expert_memory, ops.lossless)
    _log_activations(ops, spec, checkpoint, shard)
    files = ExpertFiles(
        checkpoint,
        lambda layer, expert: expert_load_plan(spec, names, layer, [expert]),
        dtype,
        device,
        asked,
    )
    percent = _Percent(progress)
    if not (shard.world.size > 1 or expert_memory):
        ops = _with_room(ops, described, plan, asked)
    cache = None
    # A later placement would leave a file that no start looks for again.
    if folder and not (shard.placement and shard.placement.version):
        forms = f"{asked} {checkpoint.activations} {ops.lossless}"
        forms += f" {dict(_quantised(described, plan, asked))}"
        identity = f"{dummy} {files.identity()}"
        cache = PackedCache(
            folder,
            key_of(identity, plan, shard.world, dtype, forms),
            percent.mapping,
            config.model.packed_cache_bytes,
            shard.world.ranks_on_host,
            num_bytes if expert_memory else 0,
            ops.room,
        )
    on_disk = None
    if cache and expert_memory:
        on_disk = ExpertMemory(cache, expert_memory, spec.experts_per_token)
    if cache:
        ops = ops.packing_into(cache.room, on_disk.keep if on_disk else None)
    params_of: Callable[..., Params] = partial(CachedParams, cache) if cache else Params
    reader = RandomReader if dummy else Reader
    with params_of(
        described, plan, dtype, device=device, asked=asked, progress=percent.read, reader=reader
    ) as params:
        longest = config.model.max_model_len or spec.max_position
        model = build_decoder(spec, params, ops, max_position=longest, **shard._asdict())
    files.check()
    if on_disk:
        on_disk.open(model.moe_layers)
    if cache:
        cache.finish(lambda: Pace(threading.Event(), SHARE, BYTES_PER_S))
    return Loaded(
        model, files, cache.mapped_bytes if cache else 0, on_disk.native if on_disk else None
    )


class _Percent:
    """Reports each new percent of the weights that were read."""

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
    """Log how a checkpoint's quantised activations are computed here, once per engine group."""
    quantised = any(form.activations or form.layout == "ggml" for form in spec.stored)
    if quantised and not shard.world.rank:
        log.info(
            "the checkpoint quantises activations, too: %s",
            _activations(ops, spec, checkpoint.activations),
        )


@contextmanager
def draft_params(
    spec: ModelSpec,
    model_dir: Path,
    model: Decoder,
    config: Config,
    asked: QuantizeTo | None,
    memory: MemoryFacts,
    plan_of: Callable[[Collection[str]], LoadPlan],
) -> Iterator[tuple[Params, Ops]]:
    """Open the checkpoint of a drafter of `model`. plan_of: the plan for its tensors."""
    dummy = config.model.load_format == "dummy"
    device = model.ops.device
    dtype = model.ops.dtype
    checkpoint = Checkpoint(model_dir, {}) if dummy else open_checkpoint(model_dir, spec.stored)
    plan = plan_of(checkpoint.names)
    ops = (
        model.ops.packing_into(new_room) if model.ops.native else model.ops
    )  # not into a file of packed weights
    described = imagined(model_dir, plan, spec.stored, asked) if dummy else checkpoint
    described = _for_kernels(described, ops, config)
    check_weights_fit(weight_bytes(described, plan, ops, asked), memory)
    _check_kernels(ops, described, plan, asked)
    reader = RandomReader if dummy else Reader
    with Params(described, plan, dtype, device=device, asked=asked, reader=reader) as params:
        yield params, ops


def _ops(device: torch.device, dtype: torch.dtype, config: Config, spec: ModelSpec) -> Ops:
    """Return the kernels that the settings choose; a plugin's for experts are beside the best."""
    asked = config.device.kernels
    is_plugin = asked in EXPERT_KERNELS.plugins
    table: Any = "auto" if is_plugin else asked
    ops = pick_ops(device, dtype, table, obstacle=spec.obstacle, exact=config.device.exact)
    return replace(ops, asked=asked) if is_plugin else ops


def _with_attention(ops: Ops, config: Config, spec: ModelSpec) -> Ops:
    """Return the table with the attention that the settings choose. Raises ConfigError if it
    cannot serve.
    """
    asked = config.device.attention_backend
    if not ops.triton and asked != "auto":
        raise ConfigError(
            f"attention_backend={asked} needs Triton's kernels, and here serve "
            f"{ops.chosen}; choose auto"
        )
    if not ops.triton or asked == "triton":
        return ops
    from moeserve.ops.triton_ops import with_flash_attention  # slow to import: only where it serves

    return with_flash_attention(
        ops, config.cache, asked=asked == "fa3", misfit=spec.obstacle("fa3")
    )


def _for_kernels(checkpoint: Checkpoint, ops: Ops, config: Config) -> Checkpoint:
    """Return the checkpoint with what these kernels make of it. Others than native ones widen all
    of a GGUF file that has minima: Triton's take gate, up and down quantised, or none of them."""
    asked = config.model.activations
    obstacle = ops.weight_obstacle
    rows = "float" if asked == "auto" and not ops.native else asked
    if obstacle is None or (
        not ops.native and any(weight.form.mins for weight in checkpoint.stored.values())
    ):
        return replace(checkpoint, activations=rows, obstacle=lambda *weight: "no kernels")
    return replace(checkpoint, activations=rows, obstacle=obstacle)


def _folder(config: Config, ops: Ops, num_bytes: int) -> str | None:
    """Return the folder for packed weights of so many bytes, None if they are not cached."""
    asked = config.model.packed_cache
    needed = config.model.expert_memory is not None
    large = config.model.load_format != "dummy" and num_bytes >= LEAST
    if asked == "off" or (asked is None and not (ops.native and (large or needed))):
        return None
    folder = folder_of(asked)
    if folder is None and needed:
        raise ConfigError(
            "expert_memory keeps experts in a file of packed weights, and this user has no home "
            "directory for it; set HOME, or name a folder by packed_cache"
        )
    return folder


def _with_room(ops: Ops, checkpoint: Checkpoint, plan: LoadPlan, asked: QuantizeTo | None) -> Ops:
    """Return the table, which packs large weights into memory whose pages are made ahead."""
    packed = replace(plan, params=tuple(param for param in plan.params if is_packed(param.name)))
    num_bytes = weight_bytes(checkpoint, packed, ops, asked)
    return (
        ops.packing_into(FreshMemory(num_bytes).room) if ops.native and num_bytes >= LEAST else ops
    )


def _on_disk(
    checkpoint: Checkpoint, plan: LoadPlan, ops: Ops, asked: QuantizeTo | None, expert_memory: int | None
) -> int:
    """Return the bytes of the experts that are not in memory."""
    if expert_memory is None:
        return 0
    experts = replace(plan, params=tuple(param for param in plan.params if is_expert(param.name)))
    return max(0, weight_bytes(checkpoint, experts, ops, asked) - expert_memory)


def _check_kernels(
    ops: Ops,
    checkpoint: Checkpoint,
    plan: LoadPlan,
    asked: QuantizeTo | None,
    packed_cache: str | None = None,
    expert_memory: int | None = None,
    lossless: Lossless = "off",
) -> None:
    """Raises ConfigError for weights that these kernels do not support, before any is read, and for
    a setting that none heeds. lossless: what is to be compressed here, whatever drafters have."""
    here = f"here {ops.device.type} serves by {ops.chosen}"
    native = "--device cpu with kernels: native"
    for name, value in (("expert_memory", expert_memory), ("packed_cache", packed_cache)):
        if value and not ops.native:
            raise ConfigError(
                f"{name} needs the native kernels for CPUs, and {here}; use no {name}, or {native}"
            )
    if checkpoint.activations == "int8" and not ops.native:
        raise ConfigError(
            f"activations=int8 needs the native kernels, and {here}; use "
            f"activations=auto, or {native}"
        )
    quantised = [param.name for param, _ in _quantised(checkpoint, plan, asked)]
    if lossless != "off" and not _compressed(ops, plan, quantised):
        which = "experts" if lossless == "experts" else "linear layers"
        raise ConfigError(
            f"lossless_compression={lossless}, but no {which} of this model have "
            "16-bit weights, and a multiple of 8 "
            "inputs; use lossless_compression=off"
        )
    instead = "--quantization none" if asked else "the float16 or bfloat16 checkpoint"
    for param, form in _quantised(checkpoint, plan, asked):
        if ops.weight_obstacle is None:
            raise ConfigError(
                "quantised weights need the native kernels for CPUs or Triton's for "
                f"GPUs, and {here}; use {instead}, "
                f"or {native}"
            )
        if (
            form.rows_as(checkpoint.activations) == "int8"
            and ops.native
            and (why := form.rows_obstacle(param.shape[-1]))
        ):
            raise ConfigError(f"{why}, and {param.name} is {form.described}; use activations=float")
        if why := ops.weight_obstacle(form.kind, form.group, param.shape[-1]):
            what = f"{param.name} has {param.shape[-1]}" + (
                f", in groups of {form.group}" if form.group else ""
            )
            raise ConfigError(f"{why}, and {what}, {here}; use {instead}, or {native}")


def _quantised(
    checkpoint: Checkpoint, plan: LoadPlan, asked: QuantizeTo | None
) -> Iterator[tuple[Param, StoredFormat]]:
    """Yield each parameter in 4 or 8 bits, and its format."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in plan.pieces:
        pieces[piece.param].append(piece)
    for param in plan.params:
        if form := format_of(checkpoint, param, pieces[param.name]):
            yield param, form
        elif asked and param.quantised_on_load:
            yield param, rounded_format(asked, param.shape[-1])


def _activations(ops: Ops, spec: ModelSpec, asked: Activations) -> str:
    """Return how quantised activations are computed here, for the log."""
    if ops.triton and spec.moe:
        from moeserve.ops.triton_weights import (
            multiplies_e4m3,
        )  # slow to import: only where it serves

        sizes = spec.hidden_size, spec.expert_size
        if any(multiplies_e4m3(form.kind, form.rows, form.group, *sizes) for form in spec.stored):
            return (
                "experts' rows become e4m3 with a scale for every 128 elements, all "
                f"others stay {ops.dtype} here"
            )
    if ops.native and any(form.rows_as(asked) == "int8" for form in spec.stored):
        return "rows become int8 with a scale for every 32 elements (activations: float keeps them)"
    return f"they stay {ops.dtype} here, weights alone are quantised"


def weight_bytes(checkpoint: Checkpoint, plan: LoadPlan, ops: Ops, asked: QuantizeTo | None) -> int:
    """Return about the bytes of the parameters that a rank loads, as they are in memory."""
    narrow = {
        param.name: form.bytes_per_weight for param, form in _quantised(checkpoint, plan, asked)
    }
    narrow |= dict.fromkeys(_compressed(ops, plan, narrow), BYTES_IN_12_BITS)
    return sum(
        int(math.prod(param.shape) * narrow.get(param.name, ops.dtype.itemsize))
        for param in plan.params
    )


def _compressed(ops: Ops, plan: LoadPlan, quantised: Collection[str]) -> list[str]:
    """Return the names of the parameters that are kept in 12 bits, of a drafter perhaps none."""
    if ops.lossless == "off":
        return []
    asked = is_packed if ops.lossless == "all" else is_expert
    fit = (
        param
        for param in plan.params
        if asked(param.name) and not param.fp32 and param.shape[-1] % 8 == 0
    )
    return [param.name for param in fit if param.name not in quantised]
