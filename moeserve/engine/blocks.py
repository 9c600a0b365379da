"""KV groups (layers that share a block table) and the block pools from which they allocate.

Groups with a cache entry per token share one pool. A group of recurrent layers has its own pool:
its blocks hold states, which are far larger, and a request needs two of them, whatever its length.

A block is in one of three conditions:

    free   no content
    idle   no request holds it, but the prefix cache can find its content by key
    held   by one or more requests

Allocation uses free blocks first, the most recently freed first because it may still be in the CPU
cache. Then idle blocks are evicted: first those released as `cold`, then the others, both in the
order of their release. Block 0 is the null block: it pads tables and is never allocated.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.engine.plan import I32


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with the same rule, which share a block table."""

    rule: KVRule
    block_size: int
    layers: tuple[int, ...]

    @property
    def has_states(self) -> bool:
        """Whether the blocks hold states of recurrent layers."""
        return self.rule.tile is not None

    def num_blocks(self, positions: Any) -> Any:
        """Return how many block-table entries the first `positions` positions (or an array of such
        numbers) need.
        """
        return (self.rule.length(positions) + (self.block_size - 1)) // self.block_size

    @property
    def pool_index(self) -> int:
        """The index of the group's pool."""
        return int(self.has_states)


# Blocks that a request needs in a group with states: that of the current tile, and the one before.
STATES_HELD = 2


def groups_of(
    rules: Sequence[KVRule], block_size: int, num_drafting: int = 0
) -> tuple[KVGroup, ...]:
    """Return one group per distinct rule, in order of first appearance.

    rules: the rule of each layer.
    num_drafting: layers of a draft model. They follow the layers of the target, and belong to the
    group with full attention.

    (full, window 64, full, window 64) -> full group with layers (0, 2), window group with layers
    (1, 3)
    """
    by_rule: dict[KVRule, list[int]] = {}
    for layer, rule in enumerate(rules):
        by_rule.setdefault(rule, []).append(layer)
    if num_drafting:
        by_rule[FULL] += range(len(rules), len(rules) + num_drafting)
    return tuple(KVGroup(rule, block_size, tuple(layers)) for rule, layers in by_rule.items())


def blocks_needed(group: KVGroup, num_tokens: int, chunk: int) -> int:
    """Return the most blocks that a request of num_tokens tokens holds at once.

    chunk: the most tokens that it computes per step.

    For example window 4, block_size 2, 100 tokens, one per step: 4 tokens lie in at most 3 blocks
    -> 3
    """
    assert not group.has_states, group
    num_all = int(group.num_blocks(num_tokens))
    if group.rule.is_full:
        return num_all
    num_live_tokens = (group.rule.window or group.rule.chunk or 0) - 1 + chunk
    return min(num_all, -(-(num_live_tokens - 1) // group.block_size) + 1)


def longest_hit(group: KVGroup, is_cached: Callable[[int], bool], max_blocks: int) -> int:
    """Return the largest n <= max_blocks for which a request can continue at block n.

    That is the case if all blocks are cached that the first token of block n reads.

    In a full group these are blocks 0..n-1. In any other group they are the last few of these, so
    the search goes from right to left.

    is_cached(i): whether block i of the request's prefix is cached.
    """
    if group.rule.is_full:
        num_needed = min(max_blocks, int(group.num_blocks(max_blocks * group.block_size)))
        return next((i for i in range(num_needed) if not is_cached(i)), max_blocks)
    n = max_blocks
    while n > 0:
        first = int(group.rule.first_live(n * group.block_size)) // group.block_size
        missing = next((i for i in range(n - 1, first - 1, -1) if not is_cached(i)), None)
        if missing is None:
            return n
        n = missing  # any hit that needs block `missing` fails as well
    return 0


Key = tuple[bytes, int]  # (chained content hash, KV group)


class BlockPool:
    """A pool of num_blocks blocks, the null block included.

    on_evict(key, block): called before the content of a block is lost, unless it is cold.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[Key, int], None] | None = None) -> None:
        assert num_blocks > 1, num_blocks
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack of _num_free
        self._num_free = num_blocks - 1
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the order of their release
        self._cold: OrderedDict[int, None] = OrderedDict()  # idle, and evicted first
        self._refs = np.zeros(num_blocks, np.int32)  # holders of each block
        self._has_key = np.zeros(num_blocks, np.bool_)
        self._keys: dict[int, Key] = {}
        self._by_key: dict[Key, int] = {}

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated: free and idle ones."""
        return self.num_spare + len(self._idle)

    @property
    def num_spare(self) -> int:
        """The number of blocks that can be allocated without evicting any but cold ones."""
        return self._num_free + len(self._cold)

    @property
    def num_cached(self) -> int:
        """The number of blocks whose content can be found by key, held or idle."""
        return len(self._by_key)

    def allocate(self, count: int) -> I32:
        """Return `count` blocks with undefined content and one holder.

        The caller has checked `num_free`.
        """
        assert count <= self.num_free, (count, self.num_free)
        if count > self._num_free:
            self._evict(count - self._num_free)
        self._num_free -= count
        blocks = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._refs[blocks] = 1
        return blocks

    def touch(self, block: int) -> None:
        """Add one holder to a cached block."""
        if self._refs[block] == 0:
            del (self._cold if block in self._cold else self._idle)[block]
        self._refs[block] += 1

    def release(self, blocks: I32, *, cold: bool = False) -> None:
        """Remove one holder from each of these distinct blocks, given in table order.

        The last of them will be evicted first, because a hit with it needs all blocks before it.
        """
        self._refs[blocks] -= 1
        unheld = blocks[self._refs[blocks] == 0]
        has_key = self._has_key[unheld]
        idle = self._cold if cold else self._idle
        for block in unheld[has_key][::-1].tolist():
            idle[block] = None
        self._push(unheld[~has_key][::-1])

    def num_shared(self, blocks: list[int]) -> int:
        """Return how many of these blocks are held."""
        return int(np.count_nonzero(self._refs[blocks]))

    def num_exclusive(self, blocks: I32) -> int:
        """Return how many of these held blocks have only one holder."""
        return int(np.count_nonzero(self._refs[blocks] == 1))

    def find(self, key: Key) -> int | None:
        """Return the block with this content, held or idle."""
        return self._by_key.get(key)

    def cache(self, block: int, key: Key) -> None:
        """Register a held block under its key, unless another block has the same key."""
        if key in self._by_key or block in self._keys:
            return
        self._by_key[key] = block
        self._keys[block] = key
        self._has_key[block] = True

    def drop_keys(self) -> None:
        """Drop all keys: idle blocks become free, and held ones stay with their holders."""
        idle = self._all_idle()
        self._idle.clear()
        self._cold.clear()
        self._keys.clear()
        self._by_key.clear()
        self._has_key[:] = False
        self._push(idle)

    def audit(self) -> None:
        """Raise AssertionError unless each block is in exactly one condition, and each key leads to
        its block and back.
        """
        free = self._free[: self._num_free]
        idle = self._all_idle()
        num_conditions = np.bincount(np.concatenate((free, idle)), minlength=self.num_blocks)
        num_conditions += self._refs > 0
        assert int(self._refs[0]) + int(num_conditions[0]) == 0, "the null block was allocated"
        assert (num_conditions[1:] == 1).all(), (
            f"blocks not in exactly one condition: {np.flatnonzero(num_conditions != 1)[:8]}"
        )
        assert (self._refs >= 0).all(), "a block was released more often than it was allocated"
        assert self._has_key[idle].all(), "an idle block has no key"
        assert not self._has_key[free].any(), "a free block has a key"
        assert len(self._keys) == int(self._has_key.sum()), "a block lost its key"
        assert self._by_key == {key: block for block, key in self._keys.items()}, (
            "a key leads elsewhere"
        )

    def check_refs(self, refs: I32) -> None:
        """Raise AssertionError unless refs[b], the number of table entries with block b, is the
        block's reference count.
        """
        wrong = np.flatnonzero(refs[1:] != self._refs[1:]) + 1
        assert not len(wrong), (
            f"blocks {wrong[:8]}: tables {refs[wrong[:8]]}, pool {self._refs[wrong[:8]]}"
        )

    def _all_idle(self) -> I32:
        return np.array([*self._cold, *self._idle], np.int32)

    def _evict(self, count: int) -> None:
        num_cold = min(count, len(self._cold))
        blocks = [self._cold.popitem(last=False)[0] for _ in range(num_cold)]
        blocks += [self._idle.popitem(last=False)[0] for _ in range(count - num_cold)]
        for i, block in enumerate(blocks):
            key = self._keys.pop(block)
            del self._by_key[key]
            if self._on_evict is not None and i >= num_cold:
                self._on_evict(key, block)
        self._has_key[blocks] = False
        self._push(np.array(blocks[::-1], np.int32))

    def _push(self, blocks: I32) -> None:
        self._free[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)
