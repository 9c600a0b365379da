"""tools/gpu_check.py, tiny and interpreted, so that it keeps working without a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tools import gpu_check
from tools.gpu import peers, targets, totals
from tools.gpu.bench import Bench, error_of, figures
from tools.gpu.models import ENGINES, prompt_flops, step_bytes
from tools.gpu.process import merge, read_json, run_section, write_json
from tools.gpu.references import align_reference

ROOT = Path(__file__).resolve().parents[2]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there it runs in full")


def records(folder: Path) -> dict[str, Any]:
    return {file.stem: json.loads(file.read_text()) for file in folder.iterdir()}


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tools.gpu_check",
        *words,
        "--smoke",
        "--out",
        str(folder),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)


def ended(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=110)[0]
    finally:
        process.kill()


@pytest.mark.full("graphs")
@needs_no_gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("script", "sections"),
    [
        ("correct", ["tests", "families"]),
        ("kernels", ["environment", "moe", "attention", "rows"]),
        ("engine", ["engine_gpt_oss", "engine_v2_lite", "engine_qwen3_fp8"]),
    ],
)
def test_smoke_run(script: str, sections: list[str], tmp_path: Path) -> None:
    process = started(tmp_path, script, "--only", ",".join(sections))
    said = ended(process)
    found = records(tmp_path / "cpu")
    assert process.returncode == 0, (said, found)
    assert found.keys() == {script, *sections}
    assert len(found) <= 8  # files that a lent machine gives back
    assert all(found[name]["whole"] and not found[name]["failed"] for name in sections)
    assert found[script]["sections"].keys() == set(sections)
    assert "not measured" in said
    if script == "kernels":
        assert found["moe"]["cases"][0]["errors"]["moeserve"] < 1e-3
        assert found["moe"]["cases"][0]["figures"]["moeserve"]["us"] is None  # no time is claimed
    if script == "correct":
        assert found["families"]["families"] == [{"name": "qwen3_moe", "same": True}]


@pytest.mark.full("graphs")
@needs_no_gpu
@pytest.mark.timeout(120)
def test_one_that_is_told_to_stop_leaves_what_it_has_and_the_next_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "cpu" / "checks.json"
    process = started(tmp_path, "correct", "--only", "checks")
    while len(read_json(file).get("done", ())) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    ended(process)
    found = records(tmp_path / "cpu")
    assert process.returncode == 1
    assert found["correct"]["stopped"] == "by SystemExit(143)"
    first = found["checks"]["done"]
    assert found["correct"]["sections"]["checks"]["stopped"]
    process = started(tmp_path, "correct", "--only", "checks")
    ended(process)
    found = records(tmp_path / "cpu")
    assert process.returncode == 0
    assert found["checks"]["whole"]
    assert found["checks"]["done"][: len(first)] == first
    assert len(set(found["checks"]["done"])) == len(found["checks"]["done"]) > 30
    assert len(found["checks"]["checks"]) + len(found["checks"]["invariance"]) == len(
        found["checks"]["done"]
    )


CASES = """
import os, signal, sys, time
from pathlib import Path
import torch
from tools.gpu.bench import Bench
from tools.gpu.process import read_json

def measure(name):
    if name == "hangs":
        time.sleep(60)
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "fails":
        raise ValueError("no luck")
    if name == "ends it all":
        sys.exit(3)
    return {"name": name, "odd": float("nan")}

part = tuple(map(int, sys.argv[4].split("/")))
known = frozenset(read_json(Path(sys.argv[2]))["names"])
bench = Bench(torch.device("cpu"), True, part, case_s=0.5, known=known, result=Path(sys.argv[1]))
bench.each("case", ("one", "hangs", "fails", "two", "crashes", "ends it all", "three"), measure)
"""


@pytest.mark.parametrize("parts", [1, 3])
def test_a_case_that_hangs_or_crashes_leaves_the_others_alone(parts: int, tmp_path: Path) -> None:
    script = tmp_path / "cases.py"
    kept = []
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{CASES}")
    run_section(
        [str(script)], parts, 50, {"case": [{"name": "before"}], "done": ["case one"]}, kept.append
    )
    record = kept[-1]
    assert {one["name"] for one in record["case"]} == {"before", "two", "three"}
    assert sorted(record["done"]) == ["case one", "case three", "case two"]
    assert record["failed"].keys() == {
        "case hangs",
        "case fails",
        "case crashes",
        "case ends it all",
    }
    assert "Timeout" in record["failed"]["case hangs"]
    assert "in measure" in record["failed"]["case hangs"]
    assert "no luck" in record["failed"]["case fails"]
    assert "exit status -11" in record["failed"]["case crashes"]
    assert "stopped" not in record


TESTS = """
import sys
from pathlib import Path
import torch
from tools.gpu import pytest_cases
from tools.gpu.bench import Bench
from tools.gpu.process import read_json

pytest_cases.SMOKE = (sys.argv[0].replace("run.py", "test_them.py"),)
known = frozenset(read_json(Path(sys.argv[2]))["names"])
result = Path(sys.argv[1])
pytest_cases.run(Bench(torch.device("cpu"), True, case_s=1.0, known=known, result=result))
"""


def test_a_test_that_hangs_leaves_the_others_alone(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    tests = tmp_path / "test_them.py"
    kept = []
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{TESTS}")
    tests.write_text(
        "import time, pytest\ndef test_a(): pass\ndef test_hangs(): time.sleep(60)\n"
        "def test_fails(): assert not 'this'\ndef test_skips(): pytest.skip('no GPU')\n"
    )
    run_section([str(script)], 1, 50, {}, kept.append)
    record = {
        key: [name.rpartition("::")[2] for name in kept[-1][key]] for key in ("done", "failed")
    }
    assert record == {"done": ["test_a", "test_skips"], "failed": ["test_hangs", "test_fails"]}
    failed = {name.rpartition("::")[2]: why for name, why in kept[-1]["failed"].items()}
    assert "in test_hangs" in failed["test_hangs"]
    assert "assert not 'this'" in failed["test_fails"]
    assert totals.of_tests(kept[-1])["passed"] == 1


def test_a_section_is_stopped_when_its_time_is_up(tmp_path: Path) -> None:
    script = tmp_path / "cases.py"
    kept = []
    begun_s = time.monotonic()
    script.write_text(
        'import sys, time\nopen(sys.argv[1], \'w\').write(\'{"running": "b", "done": ["a"]}\')\n'
        "time.sleep(60)"
    )
    run_section([str(script)], 2, 1.5, {"done": []}, kept.append)
    assert time.monotonic() - begun_s < 10
    assert kept[-1] == {"done": ["a", "a"], "stopped": ["b", "b"]}


def test_a_section_that_does_not_begin_says_why(tmp_path: Path) -> None:
    script = tmp_path / "cases.py"
    kept = []
    script.write_text("import not_installed\n")
    run_section([str(script)], 1, 50, {}, kept.append)
    assert "not_installed" in kept[-1]["problems"][0]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], list[Any]]:
    """Sections find what it is called with; returns the records that they had before."""

    def of(finds: dict[str, Any]) -> list[Any]:
        given = []

        def run(words: Any, parts: int, seconds: float, record: Any, keep: Any) -> None:
            given.append((words[-1], record))
            if isinstance(finds[words[-1]], Exception):
                raise finds[words[-1]]
            keep(merge(record, finds[words[-1]]))

        monkeypatch.setattr(gpu_check, "run_section", run)
        return given

    return of


def test_what_is_done_by_the_same_sources_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Any
) -> None:
    whole = {"done": ["a"], "failed": {}}
    part = {"done": ["b"], "stopped": ["c"]}
    words = ["kernels", "--smoke", "--out", str(tmp_path), "--only", "moe,rows"]
    fake({"moe": whole, "rows": part})
    assert gpu_check.main(words) == 0
    given = fake({"rows": {"done": ["c"]}})
    assert gpu_check.main(words) == 0
    assert [(name, record["done"], "stopped" in record) for name, record in given] == [
        ("rows", ["b"], False)
    ]
    assert records(tmp_path / "cpu")["rows"]["whole"]
    given = fake({"moe": whole, "rows": part})
    assert gpu_check.main(words) == 0
    assert given == []
    assert gpu_check.main([*words, "--again"]) == 0
    assert [record.get("done") for _, record in given] == [None, None]
    given = fake({"moe": whole, "rows": whole})
    monkeypatch.setattr(gpu_check, "digest", lambda: "other sources")
    assert gpu_check.main(words) == 0
    assert len(given) == 2
    again = [
        "kernels",
        "--smoke",
        "--out",
        str(tmp_path / "new"),
        "--only",
        "moe",
        "--after",
        str(tmp_path),
    ]
    assert gpu_check.main(again) == 0
    assert len(given) == 2


def test_a_section_that_fails_leaves_the_others_alone(
    tmp_path: Path, fake: Any, capsys: Any
) -> None:
    fake({"moe": RuntimeError("no luck"), "attention": {"wrong": ["x"]}, "rows": {"done": ["a"]}})
    assert (
        gpu_check.main(
            ["kernels", "--smoke", "--out", str(tmp_path), "--only", "moe,attention,rows"]
        )
        == 1
    )
    sections = records(tmp_path / "cpu")["kernels"]["sections"]
    assert "no luck" in sections["moe"]["problems"][0]
    assert (sections["attention"]["wrong"], sections["rows"]["how"]) == (["x"], "done")
    assert "no luck" in capsys.readouterr().out
    assert (
        gpu_check.main(
            ["kernels", "--smoke", "--out", str(tmp_path), "--minutes", "0.1", "--again"]
        )
        == 0
    )
    assert "skipped: needs 20 s" in records(tmp_path / "cpu")["kernels"]["sections"]["rows"]["how"]


def test_without_a_card_there_is_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "card_name", lambda: gpu_check.NO_CARD)
    assert gpu_check.main(["engine", "--out", str(tmp_path)]) == 1
    assert "torch sees no GPU" in records(tmp_path / "no-card")["engine"]["stopped"]


def test_every_command_ends_in_eight_minutes_and_leaves_eight_files() -> None:
    for sections in gpu_check.SCRIPTS.values():
        first = next(iter(sections.values()))
        assert first.seconds < 60 * 8 - gpu_check.ENDS_S
        assert len(sections.keys() - {"compile"}) + 1 <= 8
        assert all(section.least <= section.seconds for section in sections.values())


@pytest.mark.parametrize(
    ("name", "short"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"),
     ("NVIDIA L40S", "l40s"), ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
     ("NVIDIA GH200 480GB", "gh200")],
)  # fmt: skip
def test_results_are_named_by_the_card(name: str, short: str) -> None:
    assert gpu_check.short_name(name) == short


def test_files_are_whole_and_without_numbers_that_json_has_not(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": float("nan"), "b": (1, float("inf")), "c": f"{ROOT}/x"})
    assert read_json(tmp_path / "a.json") == {"a": None, "b": [1, None], "c": "x"}
    (tmp_path / "b.json").write_text('{"a": ')
    assert read_json(tmp_path / "b.json") == read_json(tmp_path / "c.json") == {}
    assert [file.name for file in tmp_path.iterdir()].count("a.json") == len(
        list(tmp_path.iterdir())
    ) - 1
    assert merge({"a": [1], "b": {"c": 1}, "d": 1}, {"a": [2], "b": {"e": 2}, "d": 3}) == {
        "a": [1, 2], "b": {"c": 1, "e": 2}, "d": 3,
    }  # fmt: skip


def test_cases_end_with_the_time_of_a_section_and_are_shared_out_to_its_processes() -> None:
    late = Bench(
        torch.device("cpu"), smoke=True, deadline_s=time.monotonic() - 1, known=frozenset(["x a"])
    )
    late.each("x", "abc", str)
    assert late.found["left_out"] == ["x b", "x c"]
    parts = [Bench(torch.device("cpu"), True, (i, 2)) for i in range(2)]
    for bench in parts:
        bench.each("x", range(5), int)
    assert [bench.found["x"] for bench in parts] == [[0, 2, 4], [1, 3]]


def test_totals() -> None:
    ways = [
        {"way": "one rank", "token_ids": [1]},
        {"way": "a", "token_ids": [1]},
        {"way": "b", "token_ids": [2]},
    ]
    assert totals.of_ranks({"ways": ways}) == {
        "same_tokens": {"a": True, "b": False},
        "wrong": ["b"],
    }
    assert totals.of_ranks({"ways": ways[1:]}) == {"same_tokens": {}, "wrong": []}
    found = totals.of_tests(
        {"done": ["a", "b", "c"], "failed": {"d": "why"}, "skipped": ["no GPU", "no GPU"]}
    )
    assert found == {"tests": 4, "failures": 1, "passed": 1, "reasons": {"no GPU": 2}}


def test_what_a_step_must_read(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 61 GB of weights but the table of embeddings, and 98,304 B of cache for each
    token.
    """
    (tmp_path / "config.json").write_text(json.dumps(ENGINES["qwen3"].config))
    whole = step_bytes(tmp_path, {}, 1 << 20, 0) - (1 << 20) * 98_304
    assert whole == pytest.approx(61.06e9 - 2 * 151_936 * 2048, rel=1e-3)
    assert prompt_flops(tmp_path, 4096) == pytest.approx(790e12 / 111.7e3, rel=0.01)
    (tmp_path / "config.json").write_text(json.dumps(ENGINES["gpt_oss"].config))
    at_start = (
        24 * 2 * (2880 * 2 * 64 * 64 + 2880 * 2 * 8 * 64) + 2 * 201_088 * 2880
    )  # projections and head
    assert step_bytes(tmp_path, {}, 1, 0) == pytest.approx(
        at_start + 24 * 4 * 3 * 2880**2 * 17 / 32, rel=5e-3
    )
    (tmp_path / "config.json").write_text(json.dumps(ENGINES["v2_lite"].config))
    few, many = (step_bytes(tmp_path, {}, 1, position) for position in (0, 1000))
    assert many - few == 1000 * 27 * 576 * 2


class FakeBench(Bench):
    """Records what is timed; a call takes as long as its number says."""

    def _graph(self, runs: Any) -> Any:
        value = runs[0]()
        return SimpleNamespace(replay=lambda: value), len(runs)

    def _elapsed_us(self, run: Any) -> float:
        replayed.append(run())
        return float(replayed[-1])


replayed: list[float] = []


def test_candidates_are_timed_in_turn_after_a_round_for_warmth() -> None:
    bench = FakeBench(torch.device("cpu"), smoke=False, rounds=2)
    found = bench.time(
        {"a": [lambda: 4.0, lambda: 4.0], "b": [lambda: 3.0], "c": [lambda: 1 / 0]}, may_fail={"c"}
    )
    assert found == {"a": [2.0, 2.0], "b": [3.0, 3.0]}
    assert replayed == [4.0, 3.0] * 3
    assert bench.found["notes"] == ["c: ZeroDivisionError: division by zero"]
    with pytest.raises(ZeroDivisionError):
        bench.time({"c": [lambda: 1 / 0]})
    assert [bench.copies(size) for size in (0, 10**7, 10**8, 10**10)] == [32, 30, 3, 1]


def test_figures() -> None:
    assert figures([2.0, 1.0, 9.0], num_bytes=4_000_000, flops=6_000_000) == {
        "us": 2.0,
        "us_min": 1.0,
        "us_max": 9.0,
        "bytes": 4_000_000,
        "tb_s": 2.0,
        "flops": 6_000_000,
        "tflop_s": 3.0,
    }
    assert figures([]) == {"us": None, "us_min": None, "us_max": None}
    assert error_of(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert not error_of(torch.tensor([float("nan")]), torch.ones(1)) <= 1.0


def test_targets_beside_what_was_measured() -> None:
    def case(
        tokens: int, tb_s: float, tflop_s: float, routing: str = "even", layer_us: float = 100.0
    ) -> dict[str, Any]:
        rates = {"moeserve": {"tb_s": tb_s, "tflop_s": tflop_s}, "moeserve layer": {"us": layer_us}}
        return {
            "shape": targets.SHAPE,
            "routing": routing,
            "tokens": tokens,
            "figures": rates,
            "ratios": {"vllm": 1.2},
        }

    results = {
        "environment": {
            "ceilings": [{"name": "copy", "tb_s": 3.0}, {"name": "matmul", "tflop_s": 700.0}]
        },
        "moe": {
            "cases": [
                case(64, 3.5, 1.0),
                case(4096, 1.0, 401.0),
                case(64, 1.0, 1.0, "balanced", 431.94 / 2),
                case(64, 1.0, 1.0) | {"shape": "another", "ratios": {"vllm": 0.1}},
            ],
            "w8a8": [{"tokens": 4096, "tflop_s": 480.0}],
        },
        "attention": {
            "decode": [{"contexts": "64 x 8k", "fast": {"tb_s": 2.7}}],
            "latent": [{"contexts": "64 x 8k, 16 heads", "fast": {"tb_s": None}}],
        },
        "engine_qwen3": {
            "start_to_first_token_s": 19.0,
            "decode": [
                {
                    "batch": 64,
                    "context": 1024,
                    "tokens_per_s": 1000.0,
                    "idle_share": 0.02,
                    "step_bytes": 96e9,
                },
                {
                    "batch": 256,
                    "context": 320,
                    "tokens_per_s": 9001.0,
                    "idle_share": 0.0,
                    "step_bytes": 96e9,
                },
                {"batch": 1, "problem": "no room"},
            ],
            "prefill": [{"tokens_per_s": 60_001.0, "tflop_s": 420.0}],
        },
        "engine_qwen3_batch": {
            "decode": [{"batch": 64, "tokens_per_s": 950.0, "step_bytes": 96e9}]
        },
        "ranks": {"same_tokens": {"a": True, "b": True}, "ways": []},
        "families": {"families": [{"same": True}, {"same": False}]},
        "tests": {"failures": 0},
    }
    table = {row.figure: (row.measured, row.met) for row in targets.rows(results, "h100")}
    assert table["fused MoE M 64, TB/s of weights"] == (3.5, False)
    assert table["fused MoE M 4096, TFLOP/s"] == (401.0, True)
    assert table["fused MoE fp8 M 4096, TFLOP/s"] == (480.0, True)
    assert table["fused MoE, time of vllm over ours, least"] == (1.2, True)
    assert table["fused MoE, time of vllm 0.24, published over ours, geomean"] == (
        pytest.approx(2.0),
        True,
    )
    assert table["decode attention 64 x 8k, % of 3.00 TB/s"] == (pytest.approx(90.0), True)
    assert table["latent decode attention 64 x 8k, 16 heads, % of 3.00 TB/s"] == (None, None)
    assert table["Qwen3-30B decode 256, tok/s"] == (9001.0, True)
    assert table["qwen3 decode 64, of its floor"] == (pytest.approx(0.5), True)
    assert table["qwen3 prefill, of its floor"] == (0.6, True)
    assert table["idle between steps at batch 64, %"] == (2.0, False)
    assert table["cost of --determinism batch at batch 64, %"] == (pytest.approx(5.0), True)
    assert table["start of a 30B engine to its first token, s"] == (19.0, True)
    assert table["two ranks on one card, ways with one rank's tokens"] == (2.0, True)
    assert table["families with the CPU's tokens, %"] == (50.0, False)
    assert table["tests that failed"] == (0.0, True)
    assert table["gpt_oss, of its floor"] == (None, None)
    text = targets.as_text(targets.rows(results, "h100"))
    assert "MISSED" in text
    assert "(an H200's target, context 320)" in text
    assert "H200's" not in targets.as_text(targets.rows(results, "h200"))


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
    for folder, value in (
        ("triton_1_0_0", 1),
        (f"triton_{peers.triton.__version__.replace('.', '_')}", 2),
    ):
        (tmp_path / folder).mkdir()
        table = {
            "1": {"BLOCK_SIZE_M": value},
            "64": {"BLOCK_SIZE_M": 10 * value},
            "triton_version": "x",
        }
        (tmp_path / folder / f"E=8,N=32,device_name={device}.json").write_text(json.dumps(table))
    assert peer.config(40)["BLOCK_SIZE_M"] == 20


def test_rows_are_padded_to_tiles() -> None:
    """Check the docstring's example."""
    to = align_reference(torch.tensor([[1], [0]]), 2, 2)
    pairs, count = peers.padded(to.order_N, to.expert_Z, to.row_Z, to.ends_e, 2, 2)
    assert (pairs.tolist(), count.tolist()) == ([1, 2, 0, 2], [4])
