"""benchmarks.step: the real scheduler and tables, timed."""

from __future__ import annotations

import pytest

from benchmarks.step import runner_tables
from moeserve.engine.step_bench import measure


def test_phases_add_up_and_tables_are_there() -> None:
    for result in measure([1, 8], steps=30, tables=runner_tables(8, 30))["results"]:
        phases = result["phases_us"]
        assert sum(p["mean"] for p in phases.values()) == pytest.approx(result["step_us"]["mean"], abs=1)
        assert phases["tables"]["mean"] > 0
