"""The check of the GPU kernels, tiny and interpreted, so that it cannot rot where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tools import gpu_check
from tools.gpu import peers, targets
from tools.gpu.bench import Bench, error_of, figures
from tools.gpu.references import align_reference

ROOT = Path(__file__).resolve().parents[2]


def records(folder: Path) -> dict[str, Any]:
    return {file.stem: json.loads(file.read_text()) for file in folder.iterdir()}


@pytest.mark.full("graphs")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it runs in full")
def test_smoke_run(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tools.gpu_check", "--smoke", "--out", str(tmp_path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = records(tmp_path)
    assert set(found) == {"correct", "environment", "moe", "attention", "rows", "targets"}
    assert len(found["correct"]["checks"]) > 20
    assert found["moe"]["cases"][0]["errors"]["moeserve"] < 1e-3
    assert found["moe"]["cases"][0]["figures"]["moeserve"]["us"] is None  # no time is claimed
    assert found["targets"]["failed"] == []
    assert "not measured" in done.stdout


def test_a_section_that_fails_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(bench: Bench, args: Any) -> dict[str, Any]:
        raise RuntimeError("no luck")

    def fine(bench: Bench, args: Any) -> dict[str, Any]:
        return {"cases": list(bench.cases([1, 2])), "odd": float("nan")}

    sections = {"moe": gpu_check.Section(9, 1e9, fine), "correct": gpu_check.Section(9, 1, fail),
                "rows": gpu_check.Section(9, 1, fine)}  # fmt: skip
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    assert gpu_check.main(["--smoke", "--out", str(tmp_path)]) == 1
    found = records(tmp_path)
    assert "no luck" in found["correct"]["traceback"]
    assert (found["rows"]["cases"], found["rows"]["odd"]) == ([1, 2], None)
    assert "needs 1e+09 s" in found["moe"]["skipped"]
    assert found["targets"]["failed"] == ["correct"]
    assert "FAILED" in capsys.readouterr().out


def test_a_section_leaves_the_later_ones_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fine(bench: Bench, args: Any) -> dict[str, Any]:
        return {}

    sections = {"correct": gpu_check.Section(9, 5, fine), "rows": gpu_check.Section(9, 57, fine)}
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    assert gpu_check.main(["--smoke", "--minutes", "1", "--out", str(tmp_path)]) == 0
    found = records(tmp_path)
    assert "skipped" in found["correct"]
    assert "skipped" not in found["rows"]


def test_cases_end_with_the_time_of_a_section_and_are_shared_out_to_compilers() -> None:
    late = Bench(torch.device("cpu"), smoke=True, deadline_s=time.monotonic() - 1)
    assert list(late.cases("ab")) == []
    assert late.left_out == ["a", "b"]
    parts = [list(Bench(torch.device("cpu"), True, (i, 2)).cases(range(5))) for i in range(2)]
    assert parts == [[0, 2, 4], [1, 3]]


class FakeBench(Bench):
    """Takes note of what is timed; a call takes as long as its number says."""

    def _graph(self, runs: Any) -> Any:
        value = runs[0]()
        return SimpleNamespace(replay=lambda: value), len(runs)

    def _elapsed_us(self, run: Any) -> float:
        replayed.append(run())
        return float(replayed[-1])


replayed: list[float] = []


def test_candidates_are_timed_in_turn_after_a_round_for_warmth() -> None:
    bench = FakeBench(torch.device("cpu"), smoke=False, rounds=2)
    found = bench.time({"a": [lambda: 4.0, lambda: 4.0], "b": [lambda: 3.0], "c": [lambda: 1 / 0]}, may_fail={"c"})
    assert found == {"a": [2.0, 2.0], "b": [3.0, 3.0]}
    assert replayed == [4.0, 3.0] * 3
    assert bench.left_out == ["c: ZeroDivisionError: division by zero"]
    with pytest.raises(ZeroDivisionError):
        bench.time({"c": [lambda: 1 / 0]})
    assert [bench.copies(size) for size in (0, 10**7, 10**8, 10**10)] == [32, 30, 3, 1]


def test_figures() -> None:
    assert figures([2.0, 1.0, 9.0], num_bytes=4_000_000, flops=6_000_000) == {
        "us": 2.0, "us_min": 1.0, "us_max": 9.0, "bytes": 4_000_000, "tb_s": 2.0, "flops": 6_000_000, "tflop_s": 3.0,
    }  # fmt: skip
    assert figures([]) == {"us": None, "us_min": None, "us_max": None}
    assert error_of(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert not error_of(torch.tensor([float("nan")]), torch.ones(1)) <= 1.0


def test_targets_beside_what_was_measured() -> None:
    def case(tokens: int, tb_s: float, tflop_s: float) -> dict[str, Any]:
        rates = {"moeserve": {"tb_s": tb_s, "tflop_s": tflop_s}}
        return {"shape": targets.SHAPE, "skew": 0.0, "tokens": tokens, "figures": rates}

    results = {
        "moe": {
            "cases": [
                case(64, 3.7, 1.0),
                case(128, 3.5, 1.0),
                case(4096, 1.0, 401.0),
                case(64, 1.0, 1.0) | {"skew": 1.0},
                case(64, 1.0, 1.0) | {"shape": "another"},
            ],
            "ratio_geomeans": {"vllm": {"geomean": 1.2, "worst": 0.9}},
        },
        "attention": {"decode": [{"contexts": "1 x 128k + 31 x 4k", "fast": {"tb_s": 4.0}}]},
        "engine": {"decode_256": {"tokens_per_s": 9001.0, "idle_share": 0.02}, "start_to_first_token_s": 19.0},
    }
    table = {row.figure: (row.measured, row.met) for row in targets.rows(results)}
    assert table["fused MoE M 64-512, least TB/s of weights"] == (3.5, False)
    assert table["fused MoE M 4096, TFLOP/s"] == (401.0, True)
    assert table["fused MoE M 16384, TFLOP/s"] == (None, None)
    assert table["fused MoE, time of vllm over ours, least"] == (0.9, False)
    assert table["decode attention 1 x 128k + 31 x 4k, times its floor"][1]
    assert table["idle between steps at batch 256, %"] == (2.0, False)
    assert table["start to first token, s"] == (19.0, True)
    assert "MISSED" in targets.as_text(targets.rows(results))


PEER = """
import not_installed

@triton.jit
def helper(x):
    return x

@not_installed.register
def launcher():
    pass

@triton.jit
def fused_moe_kernel(a_ptr, N, BLOCK_SIZE_M: tl.constexpr):
    helper(a_ptr)
"""


def test_peers_are_loaded_without_their_imports(tmp_path: Path) -> None:
    assert peers.load_peers(None)[0] == {}
    (tmp_path / "vllm" / "x").mkdir(parents=True)
    (tmp_path / "vllm" / "x" / "fused_moe.py").write_text(PEER)
    found, notes = peers.load_peers(tmp_path)
    assert list(found) == ["vllm"]
    assert found["vllm"].kernel.arg_names == ["a_ptr", "N", "BLOCK_SIZE_M"]
    assert "there is no fused_moe_triton_kernels.py" in notes["sglang"]


def test_a_peers_table_goes_by_the_nearest_number_of_tokens(tmp_path: Path) -> None:
    peer = peers.PeerMoe(peers.Peer(None, tmp_path), 8, 32, 64)
    assert peer.config(4)["BLOCK_SIZE_M"] == 16
    device = torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "cpu"
    for folder, value in (("triton_1_0_0", 1), (f"triton_{peers.triton.__version__.replace('.', '_')}", 2)):
        (tmp_path / folder).mkdir()
        table = {"1": {"BLOCK_SIZE_M": value}, "64": {"BLOCK_SIZE_M": 10 * value}, "triton_version": "x"}
        (tmp_path / folder / f"E=8,N=32,device_name={device}.json").write_text(json.dumps(table))
    assert peer.config(40)["BLOCK_SIZE_M"] == 20


def test_rows_are_padded_to_tiles() -> None:
    """As its example."""
    to = align_reference(torch.tensor([[1], [0]]), 2, 2)
    pairs, count = peers.padded(to.order_N, to.expert_Z, to.row_Z, to.ends_e, 2, 2)
    assert (pairs.tolist(), count.tolist()) == ([1, 2, 0, 2], [4])
