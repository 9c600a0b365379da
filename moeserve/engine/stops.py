"""Finds the few rows whose token may end them, without looking at every row's stop set."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.plan import I32


class StopTable:
    """Stop ids of the running requests. One count per token id says how many of them stop there at all."""

    def __init__(self) -> None:
        self._ids: dict[int, frozenset[int]] = {}
        self._count = np.zeros(2, np.int32)  # the last entry stays 0 and stands for every larger id

    def add(self, slot: int, ids: tuple[int, ...]) -> None:
        if not ids:
            return
        unique = self._ids[slot] = frozenset(ids)
        if (size := max(unique) + 2) > len(self._count):
            self._count = np.concatenate((self._count, np.zeros(size - len(self._count), np.int32)))
        self._count[list(unique)] += 1

    def remove(self, slot: int) -> None:
        if ids := self._ids.pop(slot, None):
            self._count[list(ids)] -= 1

    def hits(self, slots: NDArray[np.intp], tokens: I32) -> list[int]:
        """Rows i where tokens[i] is a stop id of slots[i]."""
        if not self._ids:
            return []
        some = np.flatnonzero(self._count[np.minimum(tokens, len(self._count) - 1)])
        return [i for i in some.tolist() if int(tokens[i]) in self._ids.get(int(slots[i]), ())]
