"""The host store: a KVConnector that keeps the blocks evicted from the device in host memory.

This is the index. The runner owns the bytes, and copies them as a plan says (`StepPlan.stores`
before `StepPlan.loads`, both before the forward pass). All its blocks are near.
"""

from collections import OrderedDict
from collections.abc import Sequence

from moeserve.engine.blocks import Key
from moeserve.engine.connector import KVConnector, Lookup


class HostStore(KVConnector):
    """A pool of host blocks for each pool of the device.

    sizes: the number of host blocks of each pool.
    pool_of: the pool of each KV group.
    """

    def __init__(self, sizes: Sequence[int], pool_of: Sequence[int]) -> None:
        self._pools = [HostBlocks(size) for size in sizes]
        self._of_group = [self._pools[pool] for pool in pool_of]

    def lookup(self, keys: Sequence[Key]) -> Lookup:
        for count, key in enumerate(keys):
            if key not in self._of_group[key[1]]:
                return Lookup(count)
        return Lookup(len(keys))

    def load(self, key: Key) -> int:
        return self._of_group[key[1]].load(key)

    def save(self, key: Key) -> int | None:
        return self._of_group[key[1]].save(key)

    def end_plan(self) -> None:
        for pool in self._pools:
            pool.end_plan()

    def clear(self) -> None:
        for pool in self._pools:
            pool.clear()

    def contents(self, pool: int) -> dict[Key, int]:
        """Return the host block of each key in a pool."""
        return self._pools[pool].contents()

    def audit(self) -> None:
        for pool in self._pools:
            pool.audit()


class HostBlocks:
    """The host blocks of one pool, with LRU eviction."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._leased: dict[Key, None] = {}  # the keys that the current plan loads or saves

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def load(self, key: Key) -> int:
        """Return the host block to copy from. It is leased (not reused) until `end_plan`."""
        self._blocks.move_to_end(key)
        self._leased[key] = None
        return self._blocks[key]

    def save(self, key: Key) -> int | None:
        """Return the host block to copy to, leased until `end_plan`; None if the key is stored
        already, or if all host blocks are leased.
        """
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return None
        if not self._free:
            if not self._blocks:
                return None
            # Leased keys were used by the current plan, so they are the most recent: if the oldest
            # key is leased, all are.
            oldest = next(iter(self._blocks))
            if oldest in self._leased:
                return None
            self._free.append(self._blocks.pop(oldest))
        host_block = self._free.pop()
        self._blocks[key] = host_block
        self._leased[key] = None
        return host_block

    def end_plan(self) -> None:
        """End all leases."""
        self._leased.clear()

    def clear(self) -> None:
        """Drop all blocks."""
        assert not self._leased, "cleared while a plan is being made"
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._blocks.clear()

    def contents(self) -> dict[Key, int]:
        """Return the host block of each key."""
        return dict(self._blocks)

    def audit(self) -> None:
        """Raise AssertionError unless each host block is free or has one content, and nothing is
        leased.
        """
        host_blocks = sorted([*self._free, *self._blocks.values()])
        assert host_blocks == list(range(self.num_blocks)), "host blocks do not add up"
        assert not self._leased, f"{len(self._leased)} leases outlived their plan"
