"""Select the items of `full` tests that `make test` runs anyway."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest


def left_out(items: Sequence[pytest.Item], asked: set[str]) -> set[pytest.Item]:
    """Return the items to skip: marked `full`, of a group that is not selected, and not kept.

    full(group) keeps none. keep=N keeps the first N sets of parameters, keep="each" a few in which
    every value of a parameter occurs, and keep="pairs" a few in which every pair of values occurs.
    """
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("full")
        if mark is not None and not {"all", mark.args[0]} & asked:
            tests.setdefault((str(item.path), getattr(item, "originalname", item.name)), []).append(
                item
            )
    out: set[pytest.Item] = set()
    for same in tests.values():
        mark = same[0].get_closest_marker("full")
        assert mark is not None
        kept = _kept(mark.kwargs.get("keep", 0), same)
        out.update(item for index, item in enumerate(same) if index not in kept)
    return out


def _kept(keep: int | str, items: list[pytest.Item]) -> set[int]:
    if isinstance(keep, int):
        return set(range(keep))
    params = [item.callspec.params if hasattr(item, "callspec") else {} for item in items]
    return cover(params, {"each": 1, "pairs": 2}[keep])


def cover(params: Sequence[dict[str, Any]], size: int) -> set[int]:
    """Return the indices of a few sets of parameters that cover each combination of `size` values.

    The choice is greedy. For example, [{a: 0, b: 0}, {a: 0, b: 1}, {a: 1, b: 0}, {a: 1, b: 1}] with
    size 1 gives {0, 3}.
    """
    found = [
        set(combinations([(name, repr(value)) for name, value in sorted(one.items())], size))
        for one in params
    ]
    missing = set().union(*found)
    kept: set[int] = set()
    while missing:
        best = max(range(len(found)), key=lambda index: len(found[index] & missing))
        kept.add(best)
        missing -= found[best]
    return kept
