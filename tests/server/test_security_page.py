"""The cases of docs/security.md: each names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_case_names_tests_that_exist():
    rows = [
        row
        for row in (ROOT / "docs" / "security.md").read_text().splitlines()
        if row.startswith("| ")
    ][1:]
    assert len(rows) > 35
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)", row)
        assert named, row
        for path, tests in named:
            source = (ROOT / path).read_text()
            for test in re.findall(r"`(test_\w+)`", tests):
                assert f"def {test}(" in source, (path, test)
