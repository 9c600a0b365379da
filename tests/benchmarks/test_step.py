"""benchmarks.step measures steps of the stated size, and its phases add up to their time."""

from __future__ import annotations

import pytest

from benchmarks import step
from moeserve.engine.plan import StepPlan


def test_phases_add_up_and_tables_are_there() -> None:
    for result in step.measure([1, 8], steps=30, tables=step.runner_tables(8, 30))["results"]:
        phases = result["phases_us"]
        assert sum(p["mean"] for p in phases.values()) == pytest.approx(
            result["step_us"]["mean"], abs=1
        )
        assert phases["tables"]["mean"] > 0


def test_every_step_has_the_rows_that_the_result_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "WARM_UP_STEPS", 10)
    rows: list[int] = []

    def tables(plan: StepPlan) -> None:
        rows.append(len(plan.slots_R))

    (row,) = step.measure([3], steps=50, tables=tables, clock="cpu")["results"]
    assert row["num_running"] == 3
    assert rows.count(3) >= 60
    assert set(row["phases_us"]) == {"plan", "tables", "update_from_output", "encode", "loop"}
    assert all(phase["p50"] <= phase["p99"] for phase in row["phases_us"].values())
