"""The host store's index: least recently used out first, never a host block that the same plan
uses.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moeserve.engine.blocks import Key
from moeserve.engine.connector import Lookup, When
from moeserve.engine.store import HostBlocks, HostStore


def key(i: int) -> Key:
    return (bytes([i]), 0)


def stored(store: HostBlocks, *names: int) -> list[int | None]:
    host_blocks = [store.save(key(i)) for i in names]
    store.end_plan()
    return host_blocks


def test_the_least_recently_used_content_goes_first() -> None:
    store = HostBlocks(2)
    first, _ = stored(store, 1, 2)
    store.load(key(1))
    store.end_plan()
    stored(store, 3)
    assert [key(i) in store for i in (1, 2, 3)] == [True, False, True]
    assert store.load(key(1)) == first


def test_content_that_is_there_is_not_copied_again() -> None:
    store = HostBlocks(2)
    stored(store, 1)
    assert store.save(key(1)) is None


def test_a_host_block_is_not_reused_by_the_plan_that_loads_or_stores_it() -> None:
    store = HostBlocks(2)
    stored(store, 1, 2)
    store.load(key(1))
    assert store.save(key(3)) is not None, "key 2 is not leased"
    assert store.save(key(4)) is None, "both host blocks belong to this plan"
    assert key(1) in store
    store.end_plan()
    assert store.save(key(4)) is not None


def test_clear_forgets_everything() -> None:
    store = HostBlocks(2)
    stored(store, 1, 2)
    store.clear()
    assert key(1) not in store
    assert None not in stored(store, 3, 4)
    store.audit()


def test_each_pool_has_its_own_host_blocks() -> None:
    store = HostStore([1, 2, 0], [0, 1, 2])
    assert [store.save((b"a", 0)), store.save((b"a", 1)), store.save((b"b", 1))] == [0, 0, 1]
    assert store.save((b"a", 2)) is None
    store.end_plan()
    assert store.lookup([(b"a", 0), (b"b", 1), (b"b", 0), (b"a", 1)]) == Lookup(2, When.NOW)
    assert store.lookup([(b"a", 2)]) == Lookup(0, When.NOW)
    assert store.contents(1) == {(b"a", 1): 0, (b"b", 1): 1}
    store.clear()
    assert store.contents(1) == {}
    store.audit()


def test_audit_finds_a_lost_host_block() -> None:
    store = HostBlocks(2)
    store._free.pop()
    with pytest.raises(AssertionError, match="do not add up"):
        store.audit()


class StoreMachine(RuleBasedStateMachine):
    """Cells hold what was last copied into them; a load must find its own content, at the time of
    the copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = HostBlocks(3)
        self.host_blocks: dict[int, Key] = {}
        self.stores: list[tuple[int, Key]] = []
        self.loads: list[tuple[int, Key]] = []

    @rule(i=st.integers(0, 6))
    def evict(self, i: int) -> None:
        if (host_block := self.store.save(key(i))) is not None:
            self.stores.append((host_block, key(i)))

    @rule(i=st.integers(0, 6))
    def load(self, i: int) -> None:
        if key(i) in self.store:
            self.loads.append((self.store.load(key(i)), key(i)))

    @rule()
    def end_of_plan(self) -> None:
        assert len({host_block for host_block, _ in self.stores}) == len(self.stores), (
            "a host block is written twice in one plan"
        )
        self.host_blocks.update(self.stores)
        for host_block, content in self.loads:
            assert self.host_blocks[host_block] == content
        self.stores.clear()
        self.loads.clear()
        self.store.end_plan()
        self.store.audit()

    @invariant()
    def never_more_than_cells(self) -> None:
        assert sum(key(i) in self.store for i in range(7)) <= 3


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
