"""The host store's index: least recently used out first, never a host block that the same plan
uses.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moeserve.engine.blocks import Key
from moeserve.engine.store import HostStore


def key(i: int) -> Key:
    return (bytes([i]), 0)


def stored(store: HostStore, *names: int) -> list[int | None]:
    host_blocks = [store.store(key(i)) for i in names]
    store.release()
    return host_blocks


def test_the_least_recently_used_content_goes_first() -> None:
    store = HostStore(2)
    first, _ = stored(store, 1, 2)
    store.load(key(1))
    store.release()
    stored(store, 3)
    assert [store.lookup(key(i)) for i in (1, 2, 3)] == [True, False, True]
    assert store.load(key(1)) == first


def test_content_that_is_there_is_not_copied_again() -> None:
    store = HostStore(2)
    stored(store, 1)
    assert store.store(key(1)) is None


def test_a_host_block_is_not_reused_by_the_plan_that_loads_or_stores_it() -> None:
    store = HostStore(2)
    stored(store, 1, 2)
    store.load(key(1))
    assert store.store(key(3)) is not None, "key 2 is not leased"
    assert store.store(key(4)) is None, "both host blocks belong to this plan"
    assert store.lookup(key(1))
    store.release()
    assert store.store(key(4)) is not None


def test_clear_forgets_everything() -> None:
    store = HostStore(2)
    stored(store, 1, 2)
    store.clear()
    assert not store.lookup(key(1))
    assert None not in stored(store, 3, 4)
    store.audit()


def test_audit_finds_a_lost_host_block() -> None:
    store = HostStore(2)
    store._free.pop()
    with pytest.raises(AssertionError, match="do not add up"):
        store.audit()


class StoreMachine(RuleBasedStateMachine):
    """Cells hold what was last copied into them; a load must find its own content, at the time of
    the copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = HostStore(3)
        self.host_blocks: dict[int, Key] = {}
        self.stores: list[tuple[int, Key]] = []
        self.loads: list[tuple[int, Key]] = []

    @rule(i=st.integers(0, 6))
    def evict(self, i: int) -> None:
        if (host_block := self.store.store(key(i))) is not None:
            self.stores.append((host_block, key(i)))

    @rule(i=st.integers(0, 6))
    def load(self, i: int) -> None:
        if self.store.lookup(key(i)):
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
        self.store.release()
        self.store.audit()

    @invariant()
    def never_more_than_cells(self) -> None:
        assert sum(self.store.lookup(key(i)) for i in range(7)) <= 3


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
