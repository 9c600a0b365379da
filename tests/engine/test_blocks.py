"""The block pool: order of reuse, and a state machine against a plain model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from moeserve.engine.blocks import BlockPool, Key

NUM_BLOCKS = 9


def key(i: int) -> Key:
    return (bytes([i]), 0)


def as_blocks(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, np.int32)


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4).tolist()) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, plain, other = pool.allocate(3).tolist()
    pool.cache(cached, key(1))
    pool.cache(other, key(2))
    for block in (cached, plain, other):
        pool.release(as_blocks([block]))
    assert [int(pool.allocate(1)[0]) for _ in range(3)] == [plain, cached, other]
    assert pool.num_cached == 0


def test_a_touched_block_becomes_the_youngest() -> None:
    evicted: list[tuple[Key, int]] = []
    pool = BlockPool(4, lambda k, b: evicted.append((k, b)))
    a, b, c = pool.allocate(3).tolist()
    for i, block in enumerate((a, b, c)):
        pool.cache(block, key(i))
        pool.release(as_blocks([block]))
    pool.touch(a)
    pool.release(as_blocks([a]))
    pool.allocate(2)
    assert evicted == [(key(1), b), (key(2), c)]
    assert pool.find(key(0)) == a


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    evicted: list[Key] = []
    pool = BlockPool(4, lambda k, _: evicted.append(k))
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks.tolist()):
        pool.cache(block, key(i))
    pool.release(blocks)
    pool.allocate(3)
    assert evicted == [key(2), key(1), key(0)]


def test_equal_content_keeps_its_first_block() -> None:
    pool = BlockPool(4)
    first, twin = pool.allocate(2).tolist()
    pool.cache(first, key(0))
    pool.cache(twin, key(0))
    assert pool.find(key(0)) == first
    pool.release(as_blocks([twin]))
    pool.audit()
    assert pool.num_free == 2
    pool.allocate(2)
    assert pool.find(key(0)) == first, (
        "the twin had no content to keep, and its end changed nothing"
    )


def test_forget_frees_idle_blocks_and_leaves_held_ones() -> None:
    pool = BlockPool(4)
    held, idle = pool.allocate(2).tolist()
    pool.cache(held, key(0))
    pool.cache(idle, key(1))
    pool.release(as_blocks([idle]))
    pool.drop_keys()
    pool.audit()
    assert (pool.num_cached, pool.num_free) == (0, 2)
    assert pool.find(key(0)) is None


def test_cold_blocks_go_first_and_nobody_is_told() -> None:
    evicted: list[Key] = []
    pool = BlockPool(5, lambda k, _: evicted.append(k))
    blocks = pool.allocate(4)
    for i, block in enumerate(blocks.tolist()):
        pool.cache(block, key(i))
    pool.release(blocks[:2])
    pool.release(blocks[2:], cold=True)
    assert (pool.num_spare, pool.num_free) == (2, 4)
    pool.touch(int(blocks[3]))
    pool.release(blocks[3:])  # found by another: no longer cold
    assert pool.allocate(3).tolist() == blocks[[2, 1, 0]].tolist()
    assert evicted == [key(1), key(0)]


@pytest.mark.parametrize("damage", ["leak", "double", "lost key"])
def test_audit_finds_damage(damage: str) -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    pool.cache(int(blocks[0]), key(0))
    pool.release(blocks[:1])
    pool.audit()
    if damage == "leak":
        pool._num_free -= 1
    elif damage == "double":
        pool._refs[pool._free[0]] = 1
    else:
        pool._by_key.clear()
    with pytest.raises(AssertionError):
        pool.audit()


class PoolMachine(RuleBasedStateMachine):
    """Holders allocate, share, cache and free blocks; a dictionary is the model for lookups."""

    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[tuple[Key, int]] = []
        self.pool = BlockPool(NUM_BLOCKS, lambda k, b: self.evicted.append((k, b)))
        self.refs: dict[int, int] = {}
        self.content: dict[Key, int] = {}
        self.idle: list[int] = []  # oldest first
        self.cold: list[int] = []

    @rule(target=holds, count=st.integers(0, 4))
    def take(self, count: int) -> object:
        if count > self.pool.num_free:
            return multiple()
        self.evicted.clear()
        blocks = self.pool.allocate(count).tolist()
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.refs)
        told = [block for _, block in self.evicted]
        lost = sorted(set(self.content.values()) & set(blocks) - set(told))
        assert lost == sorted(self.cold[: len(lost)]), "cold blocks go least recently freed first"
        assert not told or len(lost) == len(self.cold), "cold blocks go before others"
        assert told == self.idle[: len(told)], "eviction is least recently freed first"
        self.cold = self.cold[len(lost) :]
        self.idle = self.idle[len(told) :]
        self.content = {k: block for k, block in self.content.items() if block not in blocks}
        self.refs.update(dict.fromkeys(blocks, 1))
        return multiple(*blocks)

    @rule(block=holds, i=st.integers(0, 6))
    def cache(self, block: int, i: int) -> None:
        if (
            self.refs.get(block)
            and key(i) not in self.content
            and block not in self.content.values()
        ):
            self.content[key(i)] = block
        if self.refs.get(block):
            self.pool.cache(block, key(i))

    @rule(target=holds, i=st.integers(0, 6))
    def share(self, i: int) -> object:
        block = self.pool.find(key(i))
        assert block == self.content.get(key(i))
        if block is None:
            return multiple()
        self.pool.touch(block)
        self.refs[block] = self.refs.get(block, 0) + 1
        for idle in (self.idle, self.cold):
            if block in idle:
                idle.remove(block)
        return block

    @rule(block=consumes(holds), cold=st.booleans())
    def release(self, block: int, cold: bool) -> None:
        self.pool.release(as_blocks([block]), cold=cold)
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]
            if block in self.content.values():
                (self.cold if cold else self.idle).append(block)

    @rule()
    def forget(self) -> None:
        self.pool.drop_keys()
        self.content.clear()
        self.idle.clear()
        self.cold.clear()

    @invariant()
    def books_balance(self) -> None:
        self.pool.audit()
        holds = np.zeros(NUM_BLOCKS, np.int32)
        for block, count in self.refs.items():
            holds[block] = count
        self.pool.check_refs(holds)
        assert self.pool.num_free == NUM_BLOCKS - 1 - len(self.refs)
        assert self.pool.num_cached == len(self.content)
        assert self.pool.num_free - self.pool.num_spare == len(self.idle)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
