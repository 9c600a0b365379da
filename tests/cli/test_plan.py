"""`moeserve plan` and `moeserve simulate` as users call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeserve.cli.main import main

DEMO = ["demo", "--max-model-len", "2048"]


def test_plan_prints_the_best_layout_and_what_binds_it(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--rates", "50/s", "--input", "200", "--output", "50", "--num-requests", "100"]
    assert (
        main(["plan", *DEMO, "--gpus", "2xL40S", *load, "--slo", "ttft=1s,itl=50ms", "--explain"])
        == 0
    )
    out = capsys.readouterr().out
    assert "best: moeserve serve MODEL --dp" in out
    assert "goals met" in out
    assert "step time, decode only" in out
    assert out.count("simulated --dp") == 3


def test_simulate_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    lines = [
        {"timestamp": 10 * i, "input_length": 600, "output_length": 9, "hash_ids": [1]}
        for i in range(30)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert (
        main(["simulate", *DEMO, "--gpus", "8xH100", "--dp", "4", "--trace", str(trace), "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["completed"] == found["requests"] == 30
    assert found["cached_share"] > 0.5


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["simulate", "demo"], "one of --gpus, --calibration and --measure"),
        (["simulate", "demo", "--gpus", "H100"], "--rates 20/s"),
        (["simulate", "demo", "--gpus", "H100", "--rates", "fast"], "--rates 'fast' is not like"),
        (
            ["simulate", "demo", "--gpus", "H100", "--rates", "1", "--input", "0"],
            "--input must be at least 1",
        ),
        (["simulate", "demo", "--gpus", "H100", "--rates", "1", "--dp", "2"], "has 1 devices"),
        (
            ["simulate", "demo", "--gpus", "8xH100", "--rates", "1", "--tp", "3"],
            "tp=3 cannot divide",
        ),
        (["plan", "demo", "--gpus", "H100"], "--rates 20/s"),
        (["plan", "demo", "--gpus", "H100", "--rates", "inf"], "finite"),
        (
            ["plan", "demo", "--gpus", "H100", "--rates", "1", "--slo", "speed=1"],
            "is not like ttft=1s",
        ),
        (
            ["plan", "demo", "--gpus", "H100", "--rates", "1", "--input", "9000"],
            "do not fit into 2048",
        ),
        (
            ["plan", "demo", "--gpus", "H100", "--rates", "1", "--zipf", "nan"],
            "--zipf must be a number of at least 0",
        ),
        (
            ["plan", "demo", "--gpus", "H100", "--rates", "1", "--output", "0"],
            "--output must be at least 1",
        ),
        (["plan", "demo", "--gpus", "TPU", "--rates", "1"], "unknown device"),
        (
            ["plan", "demo", "--gpus", "9999999x8xH100", "--rates", "1"],
            "must be 1 to 1024 machines",
        ),
        (
            ["plan", "demo", "--gpus", "H100", "--rates", "1", "--seed", "-1"],
            "--seed must be at least 0, got -1",
        ),
        (
            ["simulate", "demo", "--gpus", "H100", "--rates", "1", "--tables", "/nowhere"],
            "there is no folder /nowhere",
        ),
        (
            ["simulate", "demo", "--measure", "/nowhere/x.json"],
            "--measure /nowhere/x.json: must be a file in a folder",
        ),
        (["simulate", "demo", "--measure", "/"], "--measure /: must be a file in a folder"),
    ],
)
def test_bad_requests_say_what_to_do(
    words: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) != 0
    out, err = capsys.readouterr()
    assert match in err
    assert "layout" not in out


def test_a_calibration_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moeserve.plan.calibration import fit_calibration, write_calibration
    from tests.plan.test_calibration import UNFITTED, samples

    write_calibration(tmp_path / "c.json", fit_calibration(samples(100), UNFITTED))
    assert (
        main(["simulate", "demo", "--calibration", str(tmp_path / "c.json"), "--rates", "1"]) != 0
    )
    assert "measure again" in capsys.readouterr().err
