"""docs/models.md matches the registry."""

from __future__ import annotations

from moeserve.models.registry import FAMILIES
from tools import models_table


def test_the_table_is_up_to_date() -> None:
    assert models_table.PATH.read_text() == models_table.text(), "run python -m tools.models_table"
    assert models_table.text().count("\n| ") == len(FAMILIES) + 1
