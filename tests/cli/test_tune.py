"""`moeserve tune` up to the GPU that is not there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from moeserve.cli import tune
from moeserve.cli.main import main
from moeserve.cli.tune import ExpertShapes, linear_shapes, read_shape
from moeserve.errors import ConfigError
from moeserve.kernels import cost
from moeserve.kernels.configs import save, table
from moeserve.kernels.cost import CARDS
from moeserve.kernels.tuning import TOKENS, Job
from moeserve.models.hf_config import read_model_spec
from moeserve.version import __version__
from tests.specs import make_spec

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ([], 2, "needs a model directory or --shape or --all, and only one of them"),
        (["demo", "--shape", "E1 I1 D1 K1"], 2, "only one of them"),
        (["demo", "--all"], 2, "only one of them"),
        (["--all", "--weights", "fp8"], 2, "omit --weights and --only"),
        (["--all", "--minutes", "-3"], 2, "--minutes must be above 0, got -3"),
        (["--shape", "E128 768"], 2, "is not like 'E128 I768 D2048 K8'"),
        (["--shape", "E8 I768 D2048 K9"], 2, "K may not be more than E"),
        (["/no/such/model"], 3, "there is no directory"),
    ],
)
def test_errors(argv: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *argv]) == code
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--shape", "E128 I768 D2048 K8"], ["demo"], ["--all"]):
        assert main(["tune", *argv]) == 2
        assert "needs a GPU" in capsys.readouterr().err


def test_shapes(make_checkpoint: Any) -> None:
    assert read_shape(" E128  I768 D2048 K8 ") == ExpertShapes(128, 768, 2048, 8)
    assert linear_shapes(read_model_spec(make_checkpoint("qwen2_moe").path)) == [
        (128, 64), (64, 64), (8, 64), (96, 64), (64, 48), (256, 64),
    ]  # fmt: skip
    dense = make_spec(
        dtype="bfloat16", vocab_size=300, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=24, max_position=99, norm_eps=1e-6, intermediate_size=80, moe_layers=(False,),
    )  # fmt: skip
    assert linear_shapes(dense) == [(192, 64), (64, 96), (160, 64), (64, 80), (300, 64)]


def test_results_are_kept_and_told_and_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Any) -> torch.Tensor:
        return torch.tensor([config["warps"] == 16])

    def make(device: torch.device) -> Iterator[Job]:
        yield Job("linear", "N1 K1 float32", 4, {"warps": 4, "stages": 3}, {"warps": (8, 16)}, run)

    times = iter([2.0, 1.0])
    cpu = torch.device("cpu")
    by = f"moeserve {__version__}, triton {triton.__version__}"
    save("linear", "cpu", "N1 K1 float32", {4: {"warps": 2}}, tmp_path, "predicted")
    assert tune.tune([make], lambda call: next(times), cpu, tmp_path, 0.0) == 0
    assert "0 minutes are over; run the same command to continue" in capsys.readouterr().out
    assert tune.tune([make], lambda call: next(times), cpu, tmp_path, 8.0) == 0
    out = capsys.readouterr().out
    assert "no cost model of 'cpu', only of NVIDIA H100" in out
    assert "2.0000 -> 1.0000 ms (2.00 x), 3 tried" in out
    assert "dropped, because its bits differ: {'warps': 16, 'stages': 3}" in out
    kept = json.loads((tmp_path / "linear-cpu.json").read_text())
    assert kept == {"N1 K1 float32": {"4": {"warps": 8, "stages": 3, "by": by}}}
    assert tune.tune([make], lambda call: next(times), cpu, tmp_path, 8.0) == 0  # no times are left
    assert "already measured" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="nothing to tune"):
        tune.tune([], lambda call: 1.0, cpu, tmp_path)


def test_a_known_card_searches_kernels_without_a_model_from_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are made once, on the device, because making those of attention launches a kernel."""
    made = []

    def make(device: torch.device) -> Iterator[Job]:
        made.append(device)
        choices = {"warps": (4, 8), "stages": (2, 3)}
        yield Job(
            "linear",
            "N1 K1 float32",
            4,
            {"warps": 4, "stages": 3},
            choices,
            lambda config: torch.zeros(1),
        )

    monkeypatch.setattr(cost, "CARDS", {"cpu": CARDS["NVIDIA H200"]})
    times = iter(
        [2.0, 3.0, 1.0, 4.0]
    )  # of the defaults, 8 warps, 2 stages, and, in the second pass, both
    assert tune.tune([make], lambda call: next(times), torch.device("cpu"), tmp_path) == 0
    assert made == [torch.device("cpu")]
    assert capsys.readouterr().out.startswith(
        "linear N1 K1 float32, 4: 2.0000 -> 1.0000 ms (2.00 x), 4 tried"
    )
    assert next(iter(table("linear", "cpu", tmp_path)["N1 K1 float32"].values()))["stages"] == 2


def test_lists_tell_what_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("linear", "Some GPU", "N1", {16: {"warps": 4}}, tmp_path, "predicted")
    save("linear", "Some GPU", "N1", {8: {"warps": 4}}, tmp_path, "moeserve 1, triton 2")
    assert main(["tune", "--list", "--out", str(tmp_path)]) == 0
    shipped = capsys.readouterr().out.splitlines()
    assert shipped.pop(0) == "linear-some-gpu N1, sizes 8, 16: moeserve 1, triton 2; predicted"
    assert all(line.endswith(": predicted") for line in shipped)


@pytest.mark.parametrize("model", tune.COMMON)
def test_common_shapes_have_kernels(model: str) -> None:
    """Made without memory; the shipped tables, which are of these shapes, change only what is a
    choice.
    """
    shape, weights = tune.COMMON[model]
    makers = tune.makers_of(None, read_shape(shape), torch.bfloat16, "grouped_gemm", weights)
    jobs = [job for make in makers for job in make(device=torch.device("meta"))]
    assert [job.size for job in jobs] == [tokens * read_shape(shape).top_k for tokens in TOKENS]
    for job, card in itertools.product(jobs, CARDS):
        for known in table(job.family, card).get(job.shape, {}).values():
            config = dict(known)
            assert str(config.pop("by")) == "predicted"
            assert all(value in job.choices[name] for name, value in config.items())
