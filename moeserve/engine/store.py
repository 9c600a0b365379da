"""Where prefix blocks go when the pool evicts them: a content-addressed store behind one small protocol.

The scheduler keeps the index; the runner owns the bytes and copies them when a plan says so (`StepPlan.stores`
before `StepPlan.loads`, both before the forward pass). A store on disk or on a peer fits the same protocol.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from moeserve.engine.blocks import Key


class BlockStore(Protocol):
    """Blocks by content. A host block is where the runner finds the bytes; a leased host block is not reused."""

    def lookup(self, key: Key) -> bool:
        """Whether `load` would find it."""

    def load(self, key: Key) -> int:
        """The host block to copy from, leased until `release`."""

    def store(self, key: Key) -> int | None:
        """The host block to copy into, leased until `release`; None when nothing must be copied (or nothing can)."""

    def release(self) -> None:
        """Ends all leases: the plan that uses them is complete, and plans run in order."""

    def clear(self) -> None:
        """Forgets every content."""

    def audit(self) -> None:
        """Raises AssertionError when the books do not balance."""


class HostStore:
    """`num_blocks` blocks of host memory, least recently used first out."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._leased: dict[Key, None] = {}

    def lookup(self, key: Key) -> bool:
        return key in self._blocks

    def load(self, key: Key) -> int:
        self._blocks.move_to_end(key)
        self._leased[key] = None
        return self._blocks[key]

    def store(self, key: Key) -> int | None:
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return None
        if not self._free:
            # Leased keys were used in this very plan, so they sit at the young end: the oldest tells all.
            oldest = next(iter(self._blocks))
            if oldest in self._leased:
                return None
            self._free.append(self._blocks.pop(oldest))
        host_block = self._free.pop()
        self._blocks[key] = host_block
        self._leased[key] = None
        return host_block

    def release(self) -> None:
        self._leased.clear()

    def clear(self) -> None:
        assert not self._leased, "cleared while a plan is being made"
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._blocks.clear()

    def audit(self) -> None:
        """Each host block is free or holds one content, never two, never none."""
        assert sorted([*self._free, *self._blocks.values()]) == list(range(self.num_blocks)), (
            "host blocks do not add up"
        )
        assert not self._leased, f"{len(self._leased)} leases outlived their plan"
