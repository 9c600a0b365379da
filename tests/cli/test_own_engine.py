"""Commands that start an engine of their own, on the real thing: the demo model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from moeserve.cli import main
from moeserve.errors import EngineDied
from moeserve.frontend.front_end import FrontEnd

LINES = (
    '{"custom_id": "a", "url": "/v1/completions", '
    '"body": {"prompt": "Once", "max_tokens": 3, "seed": 1}}\n'
    '{"custom_id": "b", "url": "/v1/completions", '
    '"body": {"prompt": "Once", "max_tokens": 0, "seed": 1}}\n'
)


def children() -> set[int]:
    """Return this process's descendants except template sandboxes, which live until it ends."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "moeserve.text.template_sandbox" not in process.cmdline():
                found.add(process.pid)
    return found


def engine_runs(tree: list[psutil.Process]) -> bool:
    for process in tree:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "engine_main" in " ".join(process.cmdline()):
                return True
    return False


def test_run_batch_without_a_server_starts_one_and_ends_it(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(LINES)
    out = tmp_path / "out.jsonl"
    argv = [
        "run-batch",
        "-i",
        str(tmp_path / "in.jsonl"),
        "-o",
        str(out),
        "--max-model-len",
        "256",
        "--threads",
        "1",
    ]
    before = children()
    assert main.main(argv) == 0
    assert children() <= before
    got = {line["custom_id"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert got["a"]["response"]["status_code"] == 200
    assert got["a"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert got["b"]["response"]["status_code"] == 400
    assert got["b"]["response"]["body"]["error"]["param"] == "max_tokens"


def test_a_model_that_cannot_be_served_is_its_own_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(LINES)
    (tmp_path / "model").mkdir()
    argv = ["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"), "--model"]
    assert main.main([*argv, str(tmp_path / "model")]) == 3
    error = capsys.readouterr().err
    assert "is missing" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_an_engine_that_dies_for_good_ends_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def died(front: FrontEnd) -> EngineDied:
        return EngineDied("killed too often")

    async def never(*args: object, **options: object) -> int:
        await asyncio.sleep(60)
        return 0

    monkeypatch.setattr(FrontEnd, "died", died)
    monkeypatch.setattr("moeserve.cli.run_batch.answer", never)
    (tmp_path / "in.jsonl").write_text(LINES)
    argv = [
        "run-batch",
        "-i",
        str(tmp_path / "in.jsonl"),
        "-o",
        str(tmp_path / "out"),
        "--max-model-len",
        "256",
    ]
    assert main.main(argv) == 1
    assert "moeserve run-batch: killed too often" in capsys.readouterr().err


def test_no_server_outlives_a_batch_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(LINES)
    argv = [
        sys.executable,
        "-m",
        "moeserve.cli.main",
        "run-batch",
        "-i",
        str(tmp_path / "in.jsonl"),
    ]
    with subprocess.Popen([*argv, "-o", str(tmp_path / "out")], stderr=subprocess.DEVNULL) as batch:
        tree: list[psutil.Process] = []
        while not engine_runs(tree):
            assert batch.poll() is None, "the batch ended before its engine ran"
            tree = psutil.Process(batch.pid).children(recursive=True)
            time.sleep(0.01)
        os.kill(batch.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(tree, timeout=30)
    assert not alive


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_offline_benchmarks_write_vllms_keys(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    argv = [
        "bench",
        name,
        "--input-len",
        "4",
        "--output-len",
        "3",
        "--max-model-len",
        "64",
        "--threads",
        "1",
    ]
    more = {
        "latency": ["--num-iters", "2", "--num-iters-warmup", "1", "--batch-size", "2"],
        "throughput": ["--num-prompts", "3", "--num-warmups", "1"],
    }
    assert main.main([*argv, *more[name], "--output-json", str(file)]) == 0
    got = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == got
    if name == "latency":
        assert len(got["latencies"]) == 2
        assert set(got["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
        assert min(got["latencies"]) <= got["avg_latency"] <= max(got["latencies"])
    else:
        assert (got["num_requests"], got["total_num_tokens"]) == (3, 3 * (4 + 3))
        assert got["tokens_per_second"] == pytest.approx(21 / got["elapsed_time"])


def test_offline_benchmarks_refuse_bad_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--input-len", "0"], ["--num-iters", "0"], ["--max-model-len", "-2"]):
        assert main.main(["bench", "latency", *argv]) == 2
        assert "must be at least 1" in capsys.readouterr().err
