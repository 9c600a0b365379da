"""Compute the limits for scheduler and runner from the configuration, the model and the memory.

Do the weights fit? How many KV blocks and recurrent states fit beside them? How long may a context
be? Settings that do not fit are rejected with the number that would.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from moeserve.config import INT4_GROUPS, Config, Limits
from moeserve.engine.blocks import STATES_HELD, KVGroup, blocks_needed
from moeserve.errors import ConfigError, DoesNotFit
from moeserve.models import workspace as model_workspace
from moeserve.models.spec import ModelSpec
from moeserve.runner.sampling.logprobs import PROMPT_ELEMENTS
from moeserve.runner.sampling.reference import CHUNK_ELEMENTS

_F32_BYTES = 4
MIN_PROMPT_TOKENS = 256  # per step, when all slots decode
# Tokens per request for which the default sizes of KV cache and states on a shared host suffice.
TYPICAL_LEN = 4096
TILE = 64  # tokens in a tile of attention; the block size must divide 64 or be a multiple of it


def check(config: Config, spec: ModelSpec) -> None:
    """Raise ConfigError for settings that are wrong however much memory there is.

    To be called before the weights are loaded.
    """
    size = config.cache.block_size
    asked_len = config.model.max_model_len
    if TILE % size and size % TILE:
        raise ConfigError(
            f"block_size={size} must divide {TILE} or be a multiple of it, e.g. 16, 32 or 64"
        )
    if asked_len is not None and asked_len > spec.max_position:
        raise ConfigError(
            f"max_model_len={asked_len} is more than the model's own limit of "
            f"{spec.max_position} positions "
            f"(max_position_embeddings in config.json). Use at most {spec.max_position}."
        )
    if config.model.packed_cache == "":
        raise ConfigError("packed_cache is '' and names no folder; name one, or omit it")
    if (expert_memory := config.model.expert_memory) is not None:
        if config.model.packed_cache == "off":
            raise ConfigError(
                f"expert_memory={expert_memory} keeps experts in a file of packed weights, "
                "but packed_cache is 'off'; set it to a folder, or omit it"
            )
        if spec.moe is None:
            raise ConfigError(
                f"expert_memory={expert_memory}, but this model has no experts; omit it"
            )
    _check_quantization(config.model.quantization, spec)
    if (
        config.model.activations == "int8"
        and config.model.quantization == "none"
        and not spec.stored
    ):
        raise ConfigError(
            "activations=int8 needs weights of 4 or 8 bits, but the checkpoint's are "
            f"{spec.dtype}; also use quantization=int8 or int4, or use activations=auto"
        )
    kv_dtype = config.cache.kv_cache_dtype
    for layer in spec.cached_layers:
        if obstacle := layer.mixer.cache_obstacle(kv_dtype):
            raise ConfigError(f"kv_cache_dtype={kv_dtype}: {obstacle}; use kv_cache_dtype=auto")


def _check_quantization(quantization: str, spec: ModelSpec) -> None:
    if quantization == "none":
        return
    if spec.stored:
        kinds = " and ".join(dict.fromkeys(form.kind for form in spec.stored))
        raise ConfigError(
            f"quantization={quantization}, but the checkpoint's weights are {kinds} already; "
            "use quantization=none"
        )
    widths = {inputs for _, inputs in spec.products()} | {spec.hidden_size, spec.expert_size}
    odd = sorted(width for width in widths if width % INT4_GROUPS[-1])
    if quantization == "int4" and odd:
        raise ConfigError(
            f"quantization=int4 needs layers whose number of inputs is a multiple of "
            f"{INT4_GROUPS[-1]}, but this model has layers with {', '.join(map(str, odd))} inputs; "
            "use quantization=int8"
        )


def with_step_tokens(config: Config, min_tokens: int, decoded_tokens: int = 1) -> Config:
    """Return the config with max_num_batched_tokens set, if it was None.

    min_tokens: tokens of a step that use the device fully. More would only delay requests that
    decode in the same step.
    decoded_tokens: tokens per step of a request that decodes.
    """
    if config.scheduler.max_num_batched_tokens is not None:
        return config
    decoded = config.scheduler.max_num_seqs * decoded_tokens
    tokens = max(min_tokens, decoded + MIN_PROMPT_TOKENS)
    return replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=tokens))


def step_tokens(config: Config) -> int:
    """Return the most tokens per step."""
    tokens = config.scheduler.max_num_batched_tokens
    assert tokens is not None, "with_step_tokens first"
    return tokens


def chunk_tokens(config: Config) -> int:
    """Return the most tokens of one request per step."""
    return min(config.scheduler.prefill_chunk or step_tokens(config), step_tokens(config))


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """The memory of a device, in bytes."""

    limit: int  # total memory that may be used
    used: int  # part of the limit that is in use
    free: int  # memory that could be allocated now

    def shared(self, num_ranks: int) -> "MemoryFacts":
        """Return the memory of one of several ranks, with an equal share of `limit` and `free`."""
        return MemoryFacts(self.limit // num_ranks, self.used, self.free // num_ranks)


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """A device and its memory."""

    name: str  # name for log messages
    memory: Callable[[], MemoryFacts]  # measures the memory at each call
    exclusive: bool  # no other programs are expected on the device
    num_ranks: int = 1  # ranks of this server that share the device
    # Returns the part of one of so many ranks.
    share: Callable[[MemoryFacts, int], MemoryFacts] = MemoryFacts.shared
    reserve: int = 0  # bytes that other processes of this server will take


def kv_budget(memory: MemoryFacts, utilization: float, workspace: int, mapped: int = 0) -> int:
    """Return the bytes for KV blocks.

    They are the smaller of two numbers: `utilization` times the limit, less the memory in use, and
    `utilization` times the free memory. The workspace of a step is subtracted from both.

    memory: measured after the weights were loaded.
    mapped: bytes of memory-mapped weights, which count as free and not as used.
    """
    of_limit = int(utilization * memory.limit) - memory.used - mapped
    free = int(utilization * (memory.free - mapped))
    return max(0, min(of_limit, free) - workspace)


def check_weights_fit(weight_bytes: int, memory: MemoryFacts, while_loading: int = 0) -> None:
    """Raise DoesNotFit if loading would end with the out-of-memory killer.

    while_loading: bytes in addition, until all weights are loaded.
    """
    if weight_bytes + while_loading > memory.free:
        more = f" and {mib(while_loading)} more until they are loaded" if while_loading else ""
        raise DoesNotFit(
            f"the weights that this process loads take {mib(weight_bytes)}{more}, but only "
            f"{mib(memory.free)} of memory are free (limit {mib(memory.limit)}). Free some "
            "memory, raise the limit, choose a smaller model or dtype, shard the experts over more "
            "machines, or keep some on disk (expert_memory, on CPUs)."
        )


def blocks_for(groups: Sequence[KVGroup], num_tokens: int, chunk: int) -> int:
    """Return the most blocks that one request of this length holds at once, over all groups."""
    return sum(blocks_needed(group, num_tokens, chunk) for group in groups if not group.has_states)


def longest_context(groups: Sequence[KVGroup], usable_blocks: int, chunk: int, limit: int) -> int:
    """Return the length of the longest request, up to `limit`, that fits in usable_blocks."""
    return _largest(limit, lambda length: blocks_for(groups, length, chunk) <= usable_blocks)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `limit` that fits; 0 if none does. Smaller ones fit, too."""
    low = 0
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def resolve(
    config: Config,
    spec: ModelSpec,
    groups: Sequence[KVGroup],
    bytes_per_block: int,
    budget: int,
    *,
    fill: bool,
    beside: Callable[[int], int] = lambda num_tokens: 0,
) -> tuple[Limits, tuple[str, ...]]:
    """Return the limits, and notes about them for the user.

    budget: bytes for KV blocks, from `kv_budget`.
    fill: whether to use the whole budget (on a GPU), or only the part that requests are likely to
        use (on a host with other programs).
    beside: returns the bytes that contexts of this length need in addition to KV blocks.

    Raises DoesNotFit if a configured length or size does not fit, with the number that would.
    """
    cache = config.cache
    chunk = chunk_tokens(config)
    asked_len = config.model.max_model_len
    wanted_len = spec.max_position if asked_len is None else asked_len
    asked_bytes = cache.kv_cache_bytes
    most_bytes = max(0, budget - beside(1))
    if asked_bytes is not None and asked_bytes > most_bytes:
        raise DoesNotFit(
            f"kv_cache_bytes={asked_bytes} ({mib(asked_bytes)}) does not fit: only "
            f"{mib(most_bytes)} are left beside weights and workspace. Use at most {most_bytes}."
        )

    def room(length: int) -> tuple[int, int]:
        """Return the blocks that fit beside contexts of this length, and the longest context."""
        left = max(0, budget - beside(length))
        if asked_bytes is not None and asked_bytes > left:
            return 0, 0
        num_blocks = _num_blocks(config, groups, bytes_per_block, left, wanted_len, fill)
        usable = num_blocks - 1 - int(config.scheduler.watermark * num_blocks)
        return num_blocks, longest_context(groups, usable, chunk, length)

    max_len = _largest(wanted_len, lambda length: room(length)[1] >= length)
    num_blocks = room(max_len)[0]
    watermark = int(config.scheduler.watermark * num_blocks)
    notes: tuple[str, ...] = ()
    if max_len < wanted_len:
        needed_bytes = (blocks_for(groups, wanted_len, chunk) + 1 + watermark) * bytes_per_block
        available_bytes = num_blocks * bytes_per_block
        if max_len < cache.block_size:
            num_needed = blocks_for(groups, cache.block_size, chunk)
            min_blocks = next(
                n
                for n in itertools.count(num_needed + 1)
                if n - 1 - int(config.scheduler.watermark * n) >= num_needed
            )
            raise DoesNotFit(
                f"{available_bytes:,} bytes for KV blocks of {bytes_per_block:,} bytes cannot hold "
                f"even one block of a request: {min_blocks * bytes_per_block:,} is the least. Free "
                "some memory, raise --memory-utilization or --kv-cache-bytes, or choose a smaller "
                "model."
            )
        if asked_len is not None:
            raise DoesNotFit(
                f"max_model_len={wanted_len} needs {mib(needed_bytes)} for KV blocks, but "
                f"{mib(available_bytes)} are available. max_model_len={max_len} would fit. Or "
                "provide more memory (--memory-utilization, --kv-cache-bytes)."
            )
        notes = (
            f"max_model_len reduced from {wanted_len} to {max_len}: the model's whole context "
            f"needs {mib(needed_bytes)} for KV blocks, but {mib(available_bytes)} are available",
        )
    limits = Limits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=step_tokens(config),
        prefill_chunk=chunk,
        max_model_len=max_len,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        watermark_blocks=watermark,
        depth=config.scheduler.depth,
        itl_target_us=1000 * config.scheduler.itl_target_ms,
        enable_prefix_caching=cache.enable_prefix_caching,
        num_store_blocks=cache.host_store_bytes // bytes_per_block,
    )
    return limits, notes


def _num_blocks(
    config: Config,
    groups: Sequence[KVGroup],
    bytes_per_block: int,
    budget: int,
    wanted_len: int,
    fill: bool,
) -> int:
    max_blocks = budget // bytes_per_block
    asked_bytes = config.cache.kv_cache_bytes
    chunk = chunk_tokens(config)
    if asked_bytes is not None:
        return asked_bytes // bytes_per_block
    if fill:
        return max_blocks
    num_typical = config.scheduler.max_num_seqs * blocks_for(
        groups, min(wanted_len, TYPICAL_LEN), chunk
    )
    num_useful = max(num_typical, blocks_for(groups, wanted_len, chunk)) + 1
    # Add the blocks that the watermark keeps free.
    return min(max_blocks, int(num_useful / (1 - config.scheduler.watermark)) + 1)


def workspace_bytes(
    spec: ModelSpec,
    config: Config,
    dtype: torch.dtype,
    inflow: model_workspace.Inflow | None = None,
) -> int:
    """Return the workspace of a step of maximum size.

    The workspace is the sum of the forward pass, the fp32 logits of all requests with one copy, and
    the temporaries of the sampler.

    inflow: the memory for what other ranks send; None if experts compute for this rank only.
    """
    tokens = step_tokens(config)
    num_rows = min(config.scheduler.max_num_seqs, tokens)
    max_len = config.model.max_model_len or spec.max_position
    forward = model_workspace.workspace_bytes(
        spec, tokens, num_rows, max_len, dtype, config.parallel.tp, inflow
    )
    # Elements of the logits and of their copy.
    logits = 2 * max(num_rows * spec.vocab_size, PROMPT_ELEMENTS)
    # Elements of eight temporaries of a chunk. The largest chunks have 4 * CHUNK_ELEMENTS.
    chunks = 8 * 4 * CHUNK_ELEMENTS
    return forward + _F32_BYTES * (logits + chunks)


def mib(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / 2**20:,.2f} MiB"


@dataclass(frozen=True, slots=True)
class StateMemory:
    """The memory for states of recurrent layers, and the rest."""

    num_states: int  # blocks of states, the null block included
    num_stored: int  # blocks of states in the host store
    config: Config  # the configuration for the remaining memory, with fewer slots if needed
    budget: int  # remaining bytes for KV blocks
    notes: tuple[str, ...] = ()  # messages for the user


def check_block_size(config: Config, spec: ModelSpec) -> None:
    """Raise ConfigError if a block is not a whole number of tiles, or if all layers are
    recurrent.
    """
    tiles = {rule.tile for rule in spec.kv_rules if rule.tile is not None}
    size = config.cache.block_size
    if wrong := sorted(tile for tile in tiles if size % tile):
        raise ConfigError(
            f"block_size={size} must be a multiple of {wrong[0]}, the tokens in a tile of the "
            f"recurrent layers of {spec.architecture}; use block_size=16, 32 or 64"
        )
    if tiles and all(rule.tile is not None for rule in spec.kv_rules):
        raise ConfigError(
            f"{spec.architecture}: all layers are recurrent, but at least one layer with a KV "
            "cache is needed"
        )


def check_diffusion(config: Config, spec: ModelSpec, *, on_cpu: bool) -> None:
    """Raise ConfigError for settings that a model that decodes blocks does not support."""
    assert spec.diffusion is not None
    block = spec.diffusion.block
    size = config.cache.block_size
    why = f"{spec.architecture} decodes blocks of {block} tokens (docs/diffusion.md)"
    if not on_cpu:
        raise ConfigError(f"{why}, which runs on CPUs only so far; use --device cpu")
    if config.scheduler.speculate is not None:
        raise ConfigError(
            f"{why}, so that no token follows from the one before it; omit "
            f"speculate={config.scheduler.speculate}"
        )
    if config.scheduler.itl_target_ms:
        raise ConfigError(f"{why}; omit itl_target_ms={config.scheduler.itl_target_ms}")
    if size % block:
        sizes = [choice for choice in (16, 32, 64) if choice % block == 0]
        remedy = f"use block_size={sizes[0]}" if sizes else f"{block} must divide 64"
        raise ConfigError(f"{why}; block_size={size} must be a multiple of {block}: {remedy}")
    asked = {
        "max_model_len": (config.model.max_model_len, block),
        "prefill_chunk": (config.scheduler.prefill_chunk, block),
        "max_num_batched_tokens": (config.scheduler.max_num_batched_tokens, 2 * block),
    }
    for name, (value, least) in asked.items():
        if value is not None and value < least:
            raise ConfigError(f"{why}; {name}={value} must be at least {least}")


def in_blocks(limits: Limits, block: int) -> Limits:
    """Return the limits of a model that decodes blocks: multiples of a block."""
    return replace(
        limits,
        diffusion_block=block,
        max_model_len=limits.max_model_len // block * block,
        prefill_chunk=limits.prefill_chunk // block * block,
        max_num_batched_tokens=limits.max_num_batched_tokens // block * block,
    )


def state_memory(config: Config, state_bytes: int, budget: int, *, fill: bool) -> StateMemory:
    """Divide the budget between states and KV blocks. Reduce max_num_seqs if the states of so many
    requests do not fit.

    state_bytes: size of a block of states of all layers; 0: the model has none.
    fill: whether to use the whole share of states, or only the part that requests are likely to
        use.

    Raises DoesNotFit if the states of one request do not fit.
    """
    if not state_bytes:
        return StateMemory(num_states=0, num_stored=0, config=config, budget=budget)
    kv_cache_bytes = config.cache.kv_cache_bytes
    total = budget if kv_cache_bytes is None else min(kv_cache_bytes, budget)
    states_budget = int(config.cache.state_share * total)
    max_states = states_budget // state_bytes
    max_requests = (max_states - 1) // STATES_HELD
    if max_requests < 1:
        raise DoesNotFit(
            f"a request needs {STATES_HELD} blocks of {state_bytes:,} bytes for the states of "
            f"recurrent layers, but only {states_budget:,} bytes are available for them. Raise "
            "--memory-utilization, --kv-cache-bytes or state_share."
        )
    max_num_seqs = config.scheduler.max_num_seqs
    notes: tuple[str, ...] = ()
    if max_requests < max_num_seqs:
        notes = (
            f"max_num_seqs reduced from {max_num_seqs} to {max_requests}: the states of more "
            "requests do not fit",
        )
    max_num_seqs = min(max_requests, max_num_seqs)
    num_useful = max_num_seqs * (STATES_HELD + TYPICAL_LEN // config.cache.block_size) + 1
    num_states = max_states if fill or kv_cache_bytes is not None else min(max_states, num_useful)
    num_stored = int(config.cache.state_share * config.cache.host_store_bytes) // state_bytes
    cache = replace(
        config.cache,
        kv_cache_bytes=(
            None if kv_cache_bytes is None else kv_cache_bytes - num_states * state_bytes
        ),
        host_store_bytes=config.cache.host_store_bytes - num_stored * state_bytes,
    )
    scheduler = replace(config.scheduler, max_num_seqs=max_num_seqs)
    return StateMemory(
        num_states=num_states,
        num_stored=num_stored,
        config=replace(config, scheduler=scheduler, cache=cache),
        budget=budget - num_states * state_bytes,
        notes=notes,
    )
