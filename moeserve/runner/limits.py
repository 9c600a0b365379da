"""Resolves the configuration to the limits that scheduler and runner obey, given the model and the
memory: whether the weights fit, how many KV blocks fit beside them, and how long a context. And
numbers of states of recurrent layers: those that requests need, and those that the prefix cache
keeps.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moeserve.config import INT4_GROUPS, Config, Limits
from moeserve.engine.blocks import STATES_HELD, KVGroup, blocks_needed
from moeserve.errors import ConfigError, DoesNotFit
from moeserve.models import workspace as model_workspace
from moeserve.models.spec import ModelSpec
from moeserve.runner.sampling.logprobs import PROMPT_ELEMENTS
from moeserve.runner.sampling.reference import CHUNK_ELEMENTS

_F32 = 4  # bytes
ROOM = 256  # tokens of prompts in a step in which all requests that may run decode, at least
# tokens per request that the default KV size on a shared host provides for, and its states
USUAL_LEN = 4096
# tokens: attention works on tiles of this many, so that blocks must divide them or be made of them
TILE = 64


def check(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError for settings that are wrong whatever memory there is; to be called before
    loading weights.
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
            f"(max_position_embeddings in config.json). Ask for at most {spec.max_position}."
        )
    if config.model.packed_cache == "":
        raise ConfigError("packed_cache is '' and names no folder; name one, or leave it out")
    if (asked_bytes := config.model.expert_memory) is not None:
        if config.model.packed_cache == "off":
            raise ConfigError(
                f"expert_memory={asked_bytes} keeps experts in a file of packed weights, "
                "and packed_cache is 'off'; "
                "let it name a folder, or leave it out"
            )
        if spec.moe is None:
            raise ConfigError(
                f"expert_memory={asked_bytes}, but this model has no experts; leave it out"
            )
    _check_quantization(config.model.quantization, spec)
    if (
        config.model.activations == "int8"
        and config.model.quantization == "none"
        and not spec.stored
    ):
        raise ConfigError(
            "activations=int8 is for weights of 4 and 8 bits, and the checkpoint's "
            f"are {spec.dtype}; use "
            "quantization=int8 or int4, too, or activations=auto"
        )
    kv_dtype = config.cache.kv_cache_dtype
    for why in (layer.mixer.cache_obstacle(kv_dtype) for layer in spec.cached_layers):
        if why:
            raise ConfigError(f"kv_cache_dtype={kv_dtype}: {why}; use kv_cache_dtype=auto")


def _check_quantization(asked: str, spec: ModelSpec) -> None:
    if asked == "none":
        return
    if spec.stored:
        kinds = " and ".join(dict.fromkeys(form.kind for form in spec.stored))
        raise ConfigError(
            f"quantization={asked}, but the checkpoint's weights are {kinds} already; "
            "leave it at none"
        )
    widths = {inputs for _, inputs in spec.products()} | {spec.hidden_size, spec.expert_size}
    odd = sorted(width for width in widths if width % INT4_GROUPS[-1])
    if asked == "int4" and odd:
        raise ConfigError(
            f"quantization=int4 has a scale for every {INT4_GROUPS[-1]} inputs or "
            "more, and this model has layers with "
            f"{', '.join(map(str, odd))} inputs, which no multiple of "
            f"{INT4_GROUPS[-1]} is; use quantization=int8"
        )


def with_step_tokens(config: Config, least: int) -> Config:
    """Return the config with the number of tokens per step filled in. least: tokens that keep the
    device busy; more would only delay requests that decode in the same step."""
    if config.scheduler.max_num_batched_tokens is not None:
        return config
    tokens = max(least, config.scheduler.max_num_seqs + ROOM)
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
    """Bytes. limit: what may be used in all; used: what counts against the limit now; free: what
    could be had now.
    """

    limit: int
    used: int
    free: int

    def shared(self, ranks: int) -> "MemoryFacts":
        """Return the share of one of several ranks: an equal part of the limit and of what is
        free.
        """
        return MemoryFacts(self.limit // ranks, self.used, self.free // ranks)


def kv_budget(memory: MemoryFacts, utilization: float, workspace: int, mapped: int = 0) -> int:
    """Return the bytes for KV blocks, measured with the weights in place: the share of the limit
    that is left beside everything used and the work space of a step, and never more than that share
    of what is free now. mapped: bytes of files that the weights are in, which the system counts as
    free."""
    free = int(utilization * (memory.free - mapped))
    return max(0, min(int(utilization * memory.limit) - memory.used, free) - workspace)


def check_weights_fit(weight_bytes: int, memory: MemoryFacts) -> None:
    """Raises DoesNotFit before a load that could only end with the kernel killing this process."""
    if weight_bytes > memory.free:
        raise DoesNotFit(
            f"the weights that this process loads take {_mib(weight_bytes)} and "
            f"{_mib(memory.free)} of memory are free "
            f"(limit {_mib(memory.limit)}). Free some memory, raise the limit, choose "
            "a smaller model or dtype, "
            "shard the experts over more machines, or keep some on disk (expert_memory, on CPUs)."
        )


def blocks_for(groups: Sequence[KVGroup], num_tokens: int, chunk: int) -> int:
    """Return the most blocks that one request of this length holds at once, over all groups."""
    return sum(blocks_needed(group, num_tokens, chunk) for group in groups if not group.has_states)


def longest_context(groups: Sequence[KVGroup], usable_blocks: int, chunk: int, limit: int) -> int:
    """Return the longest request, up to `limit` tokens, that usable_blocks hold."""
    low = 0
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(groups, middle, chunk) <= usable_blocks:
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
) -> tuple[Limits, tuple[str, ...]]:
    """Return the limits and notes about them for the user. budget: bytes for KV blocks, from
    `kv_budget`.

    fill: take the whole budget (a device of our own) rather than what the requests can use (a
    shared host). Raises DoesNotFit with the number that would fit when a length or a size was asked
    for and does not.
    """
    cache = config.cache
    chunk = chunk_tokens(config)
    asked_len = config.model.max_model_len
    wanted_len = spec.max_position if asked_len is None else asked_len
    num_blocks = _num_blocks(config, groups, bytes_per_block, budget, wanted_len, fill)
    watermark = int(config.scheduler.watermark * num_blocks)
    fits = longest_context(groups, num_blocks - 1 - watermark, chunk, wanted_len)
    notes: tuple[str, ...] = ()
    if fits < wanted_len:
        need = (blocks_for(groups, wanted_len, chunk) + 1 + watermark) * bytes_per_block
        have = num_blocks * bytes_per_block
        if fits < cache.block_size:
            one = blocks_for(groups, cache.block_size, chunk)
            least = next(
                n
                for n in itertools.count(one + 1)
                if n - 1 - int(config.scheduler.watermark * n) >= one
            )
            raise DoesNotFit(
                f"{have:,} bytes for KV blocks of {bytes_per_block:,} bytes cannot hold "
                "even one block of a request: "
                f"{least * bytes_per_block:,} is the least. Free some memory, raise "
                "--memory-utilization or "
                "--kv-cache-bytes, or choose a smaller model."
            )
        if asked_len is not None:
            raise DoesNotFit(
                f"max_model_len={wanted_len} needs {_mib(need)} for KV blocks, "
                f"{_mib(have)} are available. "
                f"max_model_len={fits} would fit; or give more memory "
                "(--memory-utilization, --kv-cache-bytes)."
            )
        notes = (
            f"max_model_len reduced from {wanted_len} to {fits}: the model's whole "
            f"context needs {_mib(need)} for KV "
            f"blocks, {_mib(have)} are available",
        )
    limits = Limits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=step_tokens(config),
        prefill_chunk=chunk,
        max_model_len=fits,
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
    affordable = budget // bytes_per_block
    asked_bytes = config.cache.kv_cache_bytes
    chunk = chunk_tokens(config)
    if asked_bytes is not None:
        if asked_bytes > budget:
            raise DoesNotFit(
                f"kv_cache_bytes={asked_bytes} ({_mib(asked_bytes)}) was asked for, but "
                f"only {_mib(budget)} are left "
                f"beside weights and work space: ask for at most {budget}."
            )
        return asked_bytes // bytes_per_block
    if fill:
        return affordable
    usual = blocks_for(groups, min(wanted_len, USUAL_LEN), chunk)
    useful = max(config.scheduler.max_num_seqs * usual, blocks_for(groups, wanted_len, chunk)) + 1
    # One more block for each that the watermark keeps free.
    return min(affordable, int(useful / (1 - config.scheduler.watermark)) + 1)


def workspace_bytes(
    spec: ModelSpec,
    config: Config,
    dtype: torch.dtype,
    inflow: model_workspace.Inflow | None = None,
) -> int:
    """Return the bytes of a forward pass of a full step, all requests' logits in fp32 with one
    copy, and the sampler's chunks.

    inflow: what other ranks send here, None where experts compute for this rank alone.
    """
    tokens = step_tokens(config)
    rows = min(config.scheduler.max_num_seqs, tokens)
    max_len = config.model.max_model_len or spec.max_position
    forward = model_workspace.workspace_bytes(
        spec, tokens, rows, max_len, dtype, config.parallel.tp, inflow
    )
    logits = 2 * max(rows * spec.vocab_size, PROMPT_ELEMENTS)
    return forward + _F32 * (logits + 8 * 4 * CHUNK_ELEMENTS)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


@dataclass(frozen=True, slots=True)
class StateRoom:
    """Blocks of states, the null block included, and of those that the host store can hold; the
    memory that both leave to other blocks, as a config and a budget; and a note for the user."""

    num_states: int
    num_stored: int
    config: Config
    budget: int
    notes: tuple[str, ...] = ()


def check_block_size(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError if blocks are no whole number of tiles, or if no layer has entries per
    token.
    """
    tiles = {rule.tile for rule in spec.kv_rules if rule.tile is not None}
    size = config.cache.block_size
    if wrong := sorted(tile for tile in tiles if size % tile):
        raise ConfigError(
            f"block_size={size}: the recurrent layers of {spec.architecture} work on "
            f"tiles of {wrong[0]} tokens, of "
            "which a block must be a whole number; use block_size=16, 32 or 64"
        )
    if tiles and all(rule.tile is not None for rule in spec.kv_rules):
        raise ConfigError(
            f"{spec.architecture}: every layer is recurrent, and one with a cache per "
            "token is needed"
        )


def state_room(config: Config, state_bytes: int, budget: int, *, fill: bool) -> StateRoom:
    """Share out the budget. state_bytes: of a block of states over all layers; 0: the model has
    none.

    fill: take the whole share rather than what the requests can use. Fewer requests run at once
    where their states do not fit. Raises DoesNotFit if not even one's do.
    """
    if not state_bytes:
        return StateRoom(0, 0, config, budget)
    asked = config.cache.kv_cache_bytes
    total = budget if asked is None else min(asked, budget)
    room = int(config.cache.state_share * total)
    affordable = room // state_bytes
    fits = (affordable - 1) // STATES_HELD
    if fits < 1:
        raise DoesNotFit(
            f"states of recurrent layers take {state_bytes:,} bytes a block, a "
            f"request needs {STATES_HELD}, and "
            f"{room:,} bytes are there for them. Raise --memory-utilization, "
            "--kv-cache-bytes or state_share."
        )
    running = config.scheduler.max_num_seqs
    notes: tuple[str, ...] = ()
    if fits < running:
        notes = (
            f"max_num_seqs reduced from {running} to {fits}: the states of more "
            "requests do not fit",
        )
    running = min(fits, running)
    useful = running * (STATES_HELD + USUAL_LEN // config.cache.block_size) + 1
    number = affordable if fill or asked is not None else min(affordable, useful)
    left = replace(
        config,
        scheduler=replace(config.scheduler, max_num_seqs=running),
        cache=replace(
            config.cache, kv_cache_bytes=None if asked is None else asked - number * state_bytes
        ),
    )
    stored = int(config.cache.state_share * config.cache.host_store_bytes) // state_bytes
    left = replace(
        left,
        cache=replace(
            left.cache, host_store_bytes=left.cache.host_store_bytes - stored * state_bytes
        ),
    )
    return StateRoom(number, stored, left, budget - number * state_bytes, notes)
