"""Random weights in place of a checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve import LLM, SamplingParams
from moeserve.comm.world import World
from moeserve.config import config_of
from moeserve.errors import ConfigError
from moeserve.loader import weights
from moeserve.loader.dummy import PAGE, RandomReader, _fill, dummy_checkpoint
from moeserve.loader.weights import Params
from moeserve.models.hf_config import read_model_spec
from moeserve.models.load_plan import load_plan
from moeserve.runner.cpu import CPUModelRunner
from tests.quantized_checkpoints import FORMS, dequantized
from tests.runner.harness import written


@pytest.fixture
def config_only(make_checkpoint: Any, tmp_path: Path) -> Path:
    """A folder with a model's config.json and nothing else."""
    config = json.loads((make_checkpoint("qwen2_moe").path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_filled_and_the_same_in_every_start(
    config_only: Path, dtype: torch.dtype
) -> None:
    spec = read_model_spec(config_only)
    plan = load_plan(spec, set())
    found = []
    for threads in (1, 4):
        with Params(
            dummy_checkpoint(config_only, plan), plan, dtype, threads=threads, reader=RandomReader
        ) as params:
            found.append({param.name: params.pop(param.name) for param in plan.params})
    assert "layers.0.w13" in found[0]
    for name, weight in found[0].items():
        assert weight.dtype is dtype
        assert weight.isfinite().all(), name
        assert (weight != 0).double().mean() > 0.9, name
        assert torch.equal(weight, found[1][name]), name
    norm = found[0]["norm"]
    w13 = found[0]["layers.0.w13"].float()
    assert 0.5 <= norm.min() < norm.max() <= 1.5
    assert w13.std() == pytest.approx(w13.shape[-1] ** -0.5, rel=0.05)
    assert not torch.equal(w13[0], found[0]["layers.1.w13"][0])
    assert found[0]["layers.0.w13"].stride(0) == 0, "one expert stands for all of a layer"


@pytest.mark.parametrize(
    ("stored", "quantization"),
    [
        (None, "none"),
        (None, "int8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "none"),
    ],
)
def test_a_model_without_weights_answers(config_only: Path, stored: Any, quantization: Any) -> None:
    """So does a model whose config.json says e4m3."""
    if stored:
        config = json.loads((config_only / "config.json").read_text())
        (config_only / "config.json").write_text(
            json.dumps(config | {"quantization_config": stored})
        )
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "threads": 1,
    }
    with LLM(config_only, quantization=quantization, **settings) as llm:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        (out,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 5


def test_a_layer_that_chooses_experts_by_token_id_answers(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    config = (make_checkpoint("deepseek_v4").path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    spec = read_model_spec(tmp_path)
    plan = load_plan(spec, ())
    reader = RandomReader(dummy_checkpoint(tmp_path, plan))
    (table,) = (param for param in plan.params if param.below)
    pieces = [piece for piece in plan.pieces if piece.param == table.name]
    ids_VK = reader.allocate(table, pieces, torch.float32, torch.device("cpu"))
    for piece in pieces:
        for job in reader.jobs(piece, ids_VK):
            job()
    assert ids_VK.unique().tolist() == list(range(8))
    assert all(len(set(row)) == len(row) for row in ids_VK.tolist())
    with LLM(tmp_path, load_format="dummy", skip_tokenizer_init=True, max_model_len=64) as llm:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        (out,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 5


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.rows == 1])
def test_any_format_is_imagined(name: str, config_only: Path) -> None:
    """About as large as weights that are not quantized, and of all values."""
    config = json.loads((config_only / "config.json").read_text())
    (config_only / "config.json").write_text(
        json.dumps(config | {"quantization_config": FORMS[name].config})
    )
    spec = read_model_spec(config_only)
    plan = load_plan(spec, set())
    with Params(
        dummy_checkpoint(config_only, plan, spec.stored), plan, torch.float32, reader=RandomReader
    ) as params:
        w13 = params.pop("layers.0.w13")
        router = params.pop("layers.0.router")
    assert isinstance(router, torch.Tensor)
    assert w13.kind == FORMS[name].kind
    assert dequantized(w13).std() == pytest.approx(w13.shape[-1] ** -0.5, rel=0.1)
    assert len(w13.values.unique()) >= 15


@pytest.mark.parametrize("asked", ["int4", "int8"])
def test_what_is_asked_for_is_there_without_rounding(
    asked: Any, config_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the kind, groups and dtypes that rounding would give."""
    spec = read_model_spec(config_only)
    plan = load_plan(spec, set())
    names = ("layers.0.w13", "layers.0.qkv", "layers.0.w2")
    parts: dict[str, Any] = {"device": "meta", "quantize_to": asked, "reader": RandomReader}
    with Params(dummy_checkpoint(config_only, plan), plan, torch.bfloat16, **parts) as params:
        expected = [params.pop(name) for name in names]
    monkeypatch.setattr(weights, "quantization_of", None)
    parts["device"] = "cpu"
    with Params(
        dummy_checkpoint(config_only, plan, quantize_to=asked), plan, torch.bfloat16, **parts
    ) as params:
        for name, theirs in zip(names, expected, strict=True):
            ours = params.pop(name)
            assert (ours.kind, ours.group, ours.zeros, ours.dtype) == (
                theirs.kind,
                theirs.group,
                None,
                torch.bfloat16,
            )
            assert [(a.shape, a.dtype) for a in ours.parts] == [
                (b.shape, b.dtype) for b in theirs.parts
            ]
            assert dequantized(ours).std() == pytest.approx(ours.shape[-1] ** -0.5, rel=0.1)
            assert len(ours.values.unique()) >= 15
        assert isinstance(params.pop("layers.0.router"), torch.Tensor)


def test_large_weights_repeat_in_no_row() -> None:
    for width in (64, 192):  # each column of pages begins elsewhere
        weight = torch.empty(3 * PAGE // width, width)
        _fill(5, weight)
        assert (
            weight[: PAGE // width - 1]
            .eq(weight[PAGE // width : 2 * (PAGE // width) - 1])
            .float()
            .mean()
            < 0.1
        )
        assert weight.std() == pytest.approx(width**-0.5, rel=0.01)


def test_refused_where_there_are_more_ranks(config_only: Path) -> None:
    config = config_of(config_only, load_format="dummy")
    with pytest.raises(ConfigError, match="load_format=dummy is for one rank"):
        CPUModelRunner(config, read_model_spec(config_only), config_only, World(0, 2)).load(
            lambda *phase: None
        )


def test_packed_weights_that_were_made_up_are_nobody_elses(
    config_only: Path, tmp_path: Path
) -> None:
    """If a folder is named, they are kept there like others."""
    spec = read_model_spec(config_only)
    found = []
    for _ in range(2):
        config = config_of(config_only, load_format="dummy", packed_cache=str(tmp_path / "cache"))
        runner = CPUModelRunner(config, spec, config_only)
        runner.load(lambda *phase: None)
        found.append(runner.mapped_bytes)
        written()
    assert found[0] == 0 < found[1]
