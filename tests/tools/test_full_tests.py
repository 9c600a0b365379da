"""The items that a `full` test keeps, and the groups' sources.

Every group that a test names has sources or is run only by `make test-all`.
"""

from __future__ import annotations

import re
from itertools import combinations, product
from pathlib import Path

from tests.full import cover
from tools.full_tests import SOURCES, digest

ROOT = Path(__file__).parents[2]


def test_every_value_and_every_pair_of_values_is_kept() -> None:
    params = [{"a": a, "b": b, "c": c} for a, b, c in product(range(4), "xyz", (True, False))]
    for size in (1, 2):
        kept = cover(params, size)
        assert len(kept) < len(params)
        wanted, found = (
            {s for i in some for s in combinations(params[i].items(), size)}
            for some in (range(24), kept)
        )
        assert found == wanted
    assert len(cover([{"a": a, "b": b} for a, b in product((0, 1), repeat=2)], 1)) == 2


def test_no_test_names_an_unknown_group() -> None:
    named = {
        m
        for path in ROOT.glob("tests/**/*.py")
        for m in re.findall(r"mark\.full\(\s*\"(\w+)\"", path.read_text())
    }
    assert named == {*SOURCES, "shapes", "http", "wheel"}


def test_every_group_has_sources() -> None:
    for group, patterns in SOURCES.items():
        assert [pattern for pattern in patterns if not list(ROOT.glob(pattern))] == [], group
        assert re.fullmatch(r"[0-9a-f]{16}", digest(group))
