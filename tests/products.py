"""Products of test parameters: all pairs of values in `make test`, every combination in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def every(group: str, *axes: Iterable[Any]) -> list[Any]:
    """Returns the parameters of a test: the product of the axes, of which all but a pairwise cover are marked `full`.

    With one axis the first value stays unmarked. group: see tools/full_tests.py.
    """
    combos = list(product(*(list(axis) for axis in axes)))
    kept = pairwise(combos) if len(axes) > 1 else {0}
    return [
        pytest.param(*combo, marks=[] if index in kept else pytest.mark.full(group))
        for index, combo in enumerate(combos)
    ]


def pairwise(combos: Sequence[tuple[Any, ...]]) -> set[int]:
    """Returns the indices of a few combinations in which every pair of values of two axes occurs (greedy cover)."""

    def pairs(combo: tuple[Any, ...]) -> set[tuple[int, str, int, str]]:
        return {(i, repr(combo[i]), j, repr(combo[j])) for i, j in combinations(range(len(combo)), 2)}

    open_pairs = set().union(*(pairs(combo) for combo in combos))
    kept: set[int] = set()
    while open_pairs:
        best = max(range(len(combos)), key=lambda index: len(pairs(combos[index]) & open_pairs))
        kept.add(best)
        open_pairs -= pairs(combos[best])
    return kept
