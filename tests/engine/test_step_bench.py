"""The step benchmark measures steps of the size it says, and splits all of their time."""

from __future__ import annotations

import pytest

from moeserve.engine import step_bench
from moeserve.engine.plan import StepPlan


def test_phases_add_up_and_tables_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_bench, "WARM_UP_STEPS", 10)
    rows: list[int] = []

    def tables(plan: StepPlan) -> None:
        rows.append(len(plan.slots_R))

    result = step_bench.measure([3], steps=50, tables=tables, clock="cpu")
    (row,) = result["results"]
    assert row["num_running"] == 3
    assert rows.count(3) >= 60
    assert set(row["phases_us"]) == {"plan", "tables", "update_from_output", "encode", "loop"}
    assert sum(phase["mean"] for phase in row["phases_us"].values()) == pytest.approx(row["step_us"]["mean"], abs=1)
    assert all(phase["p50"] <= phase["p99"] for phase in row["phases_us"].values())
