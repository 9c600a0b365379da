"""bench step: the real scheduler and tables, timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeserve.cli import main


def test_phases_add_up_and_tables_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    assert main.main(["bench", "step", "--running", "1,8", "--steps", "30", "--output-json", str(file)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["running", "p50"]
    assert [row.split()[0] for row in rows] == ["1", "8"]
    for result in json.loads(file.read_text())["results"]:
        phases = result["phases_us"]
        assert {"plan", "tables", "update_from_output", "encode", "loop"} == set(phases)
        assert sum(p["mean"] for p in phases.values()) == pytest.approx(result["step_us"]["mean"], abs=1)
        assert phases["tables"]["mean"] > 0


def test_json_without_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "step", "--running", "2", "--steps", "20", "--no-tables", "--json"]) == 0
    assert "tables" not in json.loads(capsys.readouterr().out)["results"][0]["phases_us"]


@pytest.mark.parametrize("argv", [["--running", "a"], ["--running", "0"], ["--steps", "1"]])
def test_bad_flags_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "step", *argv]) == 2
    assert "--running" in capsys.readouterr().err
