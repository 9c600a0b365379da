"""KV blocks: the groups of layers that share a block table, and the pools that groups take blocks
from.

Groups with a cache entry per token share one pool. A group of recurrent layers has a pool of its
own: its blocks hold states, which are far larger, and a request needs two of them however long it
is.

A block is free (no content), idle (no request holds it, but its content can be found by key) or
held (by one or more requests). Block 0 is null: it pads tables and is never given out. Free blocks
are reused first, the most recently freed one first because it is warm; idle ones are evicted in the
order in which they were freed, those released as `cold` before all others.
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
    """Layers with one rule, which share a block table."""

    rule: KVRule
    block_size: int
    layers: tuple[int, ...]

    @property
    def has_states(self) -> bool:
        """Whether its blocks hold states of recurrent layers."""
        return self.rule.tile is not None

    def num_blocks(self, positions: Any) -> Any:
        """Return how many entries of the block table so many positions (or an array) fill or
        touch.
        """
        return (self.rule.length(positions) + (self.block_size - 1)) // self.block_size

    @property
    def pool(self) -> int:
        """The number of the pool that its blocks are from."""
        return int(self.has_states)


STATES_HELD = (
    2  # blocks that a request needs of a group with states: the open tile's and the one before
)


def groups_of(
    rules: Sequence[KVRule], block_size: int, num_drafting: int = 0
) -> tuple[KVGroup, ...]:
    """Returns one group per distinct rule, in order of first appearance. rules[i] is layer i's.
    num_drafting: layers of a drafter behind these, which are in the group with full attention.

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
    """Returns the most blocks that a request of num_tokens holds at once if it computes at most
    `chunk` per step.

    window 4, block_size 2, 100 tokens one at a time: 4 tokens lie in at most 3 blocks -> 3
    """
    assert not group.has_states, group
    whole = int(group.num_blocks(num_tokens))
    if group.rule.is_full:
        return whole
    span = (group.rule.window or group.rule.chunk or 0) - 1 + chunk
    return min(whole, -(-(span - 1) // group.block_size) + 1)


def longest_hit(group: KVGroup, is_cached: Callable[[int], bool], limit: int) -> int:
    """Returns the largest n <= limit such that the request can continue at block n with cached
    blocks alone.

    is_cached(i): whether block i of the request's prefix is cached. A full group needs blocks
    0..n-1; any other group needs only those that the first token of block n reads, so the search
    goes from right to left.
    """
    if group.rule.is_full:
        needed = min(limit, int(group.num_blocks(limit * group.block_size)))
        return next((i for i in range(needed) if not is_cached(i)), limit)
    n = limit
    while n > 0:
        first = int(group.rule.first_live(n * group.block_size)) // group.block_size
        missing = next((i for i in range(n - 1, first - 1, -1) if not is_cached(i)), None)
        if missing is None:
            return n
        n = missing  # any hit that needs block `missing` fails as well
    return 0


Key = tuple[bytes, int]  # (chained content hash, KV group)


class BlockPool:
    """num_blocks blocks, the null block included. `on_evict(key, block)` is called before content
    is lost, unless it is cold."""

    def __init__(self, num_blocks: int, on_evict: Callable[[Key, int], None] | None = None) -> None:
        assert num_blocks > 1, num_blocks
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = np.arange(
            num_blocks - 1, -1, -1, dtype=np.int32
        )  # a stack, its top is at _num_free
        self._num_free = num_blocks - 1
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._cold: OrderedDict[int, None] = OrderedDict()  # likewise
        self._refs = np.zeros(num_blocks, np.int32)
        self._keyed = np.zeros(num_blocks, np.bool_)
        self._keys: dict[int, Key] = {}
        self._by_key: dict[Key, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that `take` can give: free and idle ones."""
        return self.num_spare + len(self._idle)

    @property
    def num_spare(self) -> int:
        """Number of blocks that `take` gives before it evicts anything but cold ones."""
        return self._num_free + len(self._cold)

    @property
    def num_cached(self) -> int:
        """Number of blocks whose content can be found by key, held or idle."""
        return len(self._by_key)

    def take(self, count: int) -> I32:
        """Returns `count` blocks with undefined content, held once. The caller has checked
        `num_free`.
        """
        assert count <= self.num_free, (count, self.num_free)
        if count > self._num_free:
            self._evict(count - self._num_free)
        self._num_free -= count
        blocks = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._refs[blocks] = 1
        return blocks

    def touch(self, block: int) -> None:
        """Adds one holder to a cached block."""
        if self._refs[block] == 0:
            del (self._cold if block in self._cold else self._idle)[block]
        self._refs[block] += 1

    def release(self, blocks: I32, *, cold: bool = False) -> None:
        """Removes one holder from each of these distinct blocks, in table order: the last is
        evicted first.
        """
        self._refs[blocks] -= 1
        gone = blocks[self._refs[blocks] == 0]
        keyed = self._keyed[gone]
        idle = self._cold if cold else self._idle
        for block in gone[keyed][::-1].tolist():
            idle[block] = None
        self._push(gone[~keyed][::-1])

    def num_shared(self, blocks: list[int]) -> int:
        """Returns how many of these blocks are held."""
        return int(np.count_nonzero(self._refs[blocks]))

    def num_exclusive(self, blocks: I32) -> int:
        """Returns how many of these held blocks would be freed if one holder released them."""
        return int(np.count_nonzero(self._refs[blocks] == 1))

    def find(self, key: Key) -> int | None:
        """Returns the block with that content, held or idle."""
        return self._by_key.get(key)

    def cache(self, block: int, key: Key) -> None:
        """Makes a held block findable, unless another block with the same content is."""
        if key in self._by_key or block in self._keys:
            return
        self._by_key[key] = block
        self._keys[block] = key
        self._keyed[block] = True

    def forget(self) -> None:
        """Drops every key: idle blocks become free, and held ones stay with their holders."""
        idle = self._all_idle()
        self._idle.clear()
        self._cold.clear()
        self._keys.clear()
        self._by_key.clear()
        self._keyed[:] = False
        self._push(idle)

    def audit(self) -> None:
        """Raises AssertionError unless each block is in exactly one state and each key leads to its
        block and back.
        """
        free = self._free[: self._num_free]
        idle = self._all_idle()
        times = np.bincount(np.concatenate((free, idle)), minlength=self.num_blocks) + (
            self._refs > 0
        )
        assert int(self._refs[0]) + int(times[0]) == 0, "the null block was given out"
        assert (times[1:] == 1).all(), (
            f"blocks not in exactly one state: {np.flatnonzero(times != 1)[:8]}"
        )
        assert (self._refs >= 0).all(), "a block was released more often than it was taken"
        assert self._keyed[idle].all(), "an idle block has no key"
        assert not self._keyed[free].any(), "a free block has a key"
        assert len(self._keys) == int(self._keyed.sum()), "a block lost its key"
        assert self._by_key == {key: block for block, key in self._keys.items()}, (
            "a key leads elsewhere"
        )

    def check_holds(self, holds: I32) -> None:
        """Raises AssertionError unless holds[b], how often the tables name block b, is its
        reference count.
        """
        wrong = np.flatnonzero(holds[1:] != self._refs[1:]) + 1
        assert not len(wrong), (
            f"blocks {wrong[:8]}: tables {holds[wrong[:8]]}, pool {self._refs[wrong[:8]]}"
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
        self._keyed[blocks] = False
        self._push(np.array(blocks[::-1], np.int32))

    def _push(self, blocks: I32) -> None:
        self._free[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)
