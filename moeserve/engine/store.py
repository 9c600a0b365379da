"""Where prefix blocks go when the pool evicts them: a content-addressed store behind one small protocol.

The scheduler keeps the index; the runner owns the bytes and copies them when a plan says so (`StepPlan.stores`
before `StepPlan.loads`, both before the forward pass). A store on disk or on a peer fits the same protocol.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from moeserve.engine.blocks import Key


class BlockStore(Protocol):
    """Blocks by content. A cell is where the runner finds the bytes; a leased cell is not reused."""

    def lookup(self, key: Key) -> bool:
        """Whether `load` would find it."""

    def load(self, key: Key) -> int:
        """The cell to copy from, leased until `release`."""

    def store(self, key: Key) -> int | None:
        """The cell to copy into, leased until `release`; None when nothing must be copied (or nothing can)."""

    def release(self) -> None:
        """Ends all leases: the plan that uses them is complete, and plans run in order."""

    def clear(self) -> None:
        """Forgets every content."""

    def audit(self) -> None:
        """Raises AssertionError when the books do not balance."""


class HostStore:
    """`num_cells` blocks of host memory, least recently used first out."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self._free = list(range(num_cells - 1, -1, -1))
        self._cells: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._leased: dict[Key, None] = {}

    def lookup(self, key: Key) -> bool:
        return key in self._cells

    def load(self, key: Key) -> int:
        self._cells.move_to_end(key)
        self._leased[key] = None
        return self._cells[key]

    def store(self, key: Key) -> int | None:
        if key in self._cells:
            self._cells.move_to_end(key)
            return None
        if not self._free:
            # Leased keys were used in this very plan, so they sit at the young end: the oldest tells all.
            oldest = next(iter(self._cells))
            if oldest in self._leased:
                return None
            self._free.append(self._cells.pop(oldest))
        cell = self._free.pop()
        self._cells[key] = cell
        self._leased[key] = None
        return cell

    def release(self) -> None:
        self._leased.clear()

    def clear(self) -> None:
        assert not self._leased, "cleared while a plan is being made"
        self._free = list(range(self.num_cells - 1, -1, -1))
        self._cells.clear()

    def audit(self) -> None:
        """Each cell is free or holds one content, never two, never none."""
        assert sorted([*self._free, *self._cells.values()]) == list(range(self.num_cells)), "cells do not add up"
        assert not self._leased, f"{len(self._leased)} leases outlived their plan"
