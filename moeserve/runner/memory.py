"""Plans memory: whether the weights fit, how many KV blocks fit beside them, and how long a context."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.engine.blocks import KVGroup, blocks_needed
from moeserve.errors import DoesNotFit
from moeserve.runner.host import MemoryFacts

USUAL_LEN = 4096  # tokens per request that the default KV size on a shared host provides for


def kv_budget(memory: MemoryFacts, utilization: float, workspace: int, mapped: int = 0) -> int:
    """Returns the bytes for KV blocks, measured with the weights in place: the share of the limit that is left beside
    everything used and the work space of a step, and never more than that share of what is free now. mapped: bytes of
    files that the weights are in, which the system counts as free."""
    free = int(utilization * (memory.free - mapped))
    return max(0, min(int(utilization * memory.limit) - memory.used, free) - workspace)


def check_weights_fit(weight_bytes: int, memory: MemoryFacts) -> None:
    """Raises DoesNotFit before a load that could only end with the kernel killing this process."""
    if weight_bytes > memory.free:
        raise DoesNotFit(
            f"the weights that this process loads take {_mib(weight_bytes)} and {_mib(memory.free)} of memory are free "
            f"(limit {_mib(memory.limit)}). Free some memory, raise the limit, choose a smaller model or dtype, "
            "or shard the experts over more machines."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVAsked:
    """The settings that `plan_kv` works from. Lengths in tokens; None: as much as fits, or as is useful."""

    kv_cache_bytes: int | None
    max_model_len: int | None
    max_num_seqs: int
    chunk: int  # most tokens of one request per step
    watermark: float  # share of the blocks that admission keeps free
    fill: bool  # take the whole budget (a device of our own), or what is useful (a shared host)


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The number of KV blocks to allocate and the longest context that they allow."""

    num_blocks: int  # null block included
    watermark_blocks: int
    max_model_len: int
    notes: tuple[str, ...]


def blocks_for(groups: Sequence[KVGroup], num_tokens: int, chunk: int) -> int:
    """Returns the most blocks that one request of this length holds at once, over all groups."""
    return sum(blocks_needed(group, num_tokens, chunk) for group in groups)


def longest_context(groups: Sequence[KVGroup], usable_blocks: int, chunk: int, limit: int) -> int:
    """Returns the longest request, up to `limit` tokens, that usable_blocks hold."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(groups, middle, chunk) <= usable_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def plan_kv(asked: KVAsked, groups: Sequence[KVGroup], bytes_per_block: int, budget: int, max_position: int) -> KVPlan:
    """Returns how many blocks to allocate and how long a request may be.

    budget: bytes from `kv_budget`. max_position: the model's own longest context. Raises DoesNotFit with the number
    that would fit when a length or a size was asked for and does not.
    """
    wanted_len = max_position if asked.max_model_len is None else asked.max_model_len
    num_blocks = _num_blocks(asked, groups, bytes_per_block, budget, wanted_len)
    watermark = int(asked.watermark * num_blocks)
    fits = longest_context(groups, num_blocks - 1 - watermark, asked.chunk, wanted_len)
    if fits == wanted_len:
        return KVPlan(num_blocks, watermark, fits, ())
    need = (blocks_for(groups, wanted_len, asked.chunk) + 1 + watermark) * bytes_per_block
    have = num_blocks * bytes_per_block
    if fits < groups[0].block_size:
        one = blocks_for(groups, groups[0].block_size, asked.chunk)
        least = next(n for n in itertools.count(one + 1) if n - 1 - int(asked.watermark * n) >= one)
        raise DoesNotFit(
            f"{have:,} bytes for KV blocks of {bytes_per_block:,} bytes cannot hold even one block of a request: "
            f"{least * bytes_per_block:,} is the least. Free some memory, raise --memory-utilization or "
            "--kv-cache-bytes, or choose a smaller model."
        )
    if asked.max_model_len is not None:
        raise DoesNotFit(
            f"max_model_len={wanted_len} needs {_mib(need)} for KV blocks, {_mib(have)} are available. "
            f"max_model_len={fits} would fit; or give more memory (--memory-utilization, --kv-cache-bytes)."
        )
    note = (
        f"max_model_len reduced from {wanted_len} to {fits}: the model's whole context needs {_mib(need)} for KV "
        f"blocks, {_mib(have)} are available"
    )
    return KVPlan(num_blocks, watermark, fits, (note,))


def _num_blocks(asked: KVAsked, groups: Sequence[KVGroup], bytes_per_block: int, budget: int, wanted_len: int) -> int:
    affordable = budget // bytes_per_block
    if asked.kv_cache_bytes is not None:
        if asked.kv_cache_bytes > budget:
            raise DoesNotFit(
                f"kv_cache_bytes={asked.kv_cache_bytes} ({_mib(asked.kv_cache_bytes)}) was asked for, but only "
                f"{_mib(budget)} are left beside weights and work space: ask for at most {budget}."
            )
        return asked.kv_cache_bytes // bytes_per_block
    if asked.fill:
        return affordable
    usual = blocks_for(groups, min(wanted_len, USUAL_LEN), asked.chunk)
    useful = max(asked.max_num_seqs * usual, blocks_for(groups, wanted_len, asked.chunk)) + 1
    # One more block for each that the watermark keeps free.
    return min(affordable, int(useful / (1 - asked.watermark)) + 1)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"
