"""Quantized weights in a runner: rejections, the log, and their memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve import LLM, SamplingParams
from moeserve.config import config_of
from moeserve.errors import ConfigError
from moeserve.loader.stored_format import StoredFormat
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import bytes_per_weight, model_size
from moeserve.ops.native import native
from moeserve.runner.cpu import CPUModelRunner
from tests.gguf_files import matrices, write_gguf
from tests.quantized_checkpoints import FORMS, Form, write_quantized

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there Triton is not interpreted"
)


def load(path: Path, **settings: Any) -> None:
    CPUModelRunner(config_of(path, **settings), read_model_spec(path), path).load(
        lambda phase, percent: None
    )


def test_other_kernels_refuse(make_checkpoint: Any, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe").path
    with pytest.raises(
        ConfigError, match=r"need the native kernels.*linear: torch.*use --quantization none, or"
    ):
        load(path, kernels="torch", quantization="int8")
    stored, _ = write_quantized(path, tmp_path, FORMS["int8"])
    with pytest.raises(ConfigError, match="use the float16 or bfloat16 checkpoint, or"):
        load(stored, kernels="torch")


@needs_no_gpu
def test_shapes_that_triton_has_no_kernel_for_are_named(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    """Groups of 8, of which int4 products would take 16s; experts of width 32 are no obstacle."""
    path = make_checkpoint("qwen3_moe").path
    stored, _ = write_quantized(path, tmp_path, Form("int4", group=8, packed=True))
    with pytest.raises(
        ConfigError,
        match=r"inputs of 32s, and layers.0.qkv has 64, in groups of 8, .* cpu.*float16 or",
    ):
        load(stored, kernels="triton")
    load(path, kernels="triton", quantization="int4")
    with pytest.raises(ConfigError, match="packed_cache needs the native kernels"):
        load(path, kernels="triton", packed_cache=str(tmp_path))
    load(path, kernels="triton", quantization="int8")


@needs_no_gpu
@pytest.mark.parametrize(
    ("width", "said"),
    [(128, "here those of experts become e4m3"), (64, "here they stay torch.float32")],
)
def test_what_becomes_of_activations(
    width: int, said: str, make_checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(
        "qwen3_moe", num_hidden_layers=1, hidden_size=128, moe_intermediate_size=width
    ).path
    stored, _ = write_quantized(path, tmp_path, FORMS["fp8 in blocks"])
    with caplog.at_level("INFO"):
        load(stored, kernels="triton")
    assert f"the checkpoint quantizes activations, too: {said}" in caplog.text


@pytest.mark.skipif(native() is None, reason="needs the native kernels")
def test_quantized_activations_are_named_once(
    make_checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = write_quantized(make_checkpoint("llama").path, tmp_path, FORMS["int8"])
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8,
        "dynamic": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    with caplog.at_level("INFO"):
        load(path, activations="float")
        load(path)
    assert (
        caplog.text.count("the checkpoint quantizes activations, too: here they stay torch.float32")
        == 1
    )
    assert (
        caplog.text.count("the checkpoint quantizes activations, too: here they become int8") == 1
    )


@pytest.mark.skipif(native() is None, reason="needs the native kernels")
def test_rows_of_int8_change_logits_but_not_with_company() -> None:
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], list(range(40)), [9] * 17)]
    logprobs = {}
    for activations in ("float", "int8"):
        with LLM(
            "demo", threads=1, max_model_len=64, quantization="int4", activations=activations
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
            alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
            together = [output.outputs[0] for output in llm.generate(prompts, params)]
            assert [(a.token_ids, a.logprobs) for a in alone] == [
                (t.token_ids, t.logprobs) for t in together
            ]
            logprobs[activations] = [output.logprobs for output in alone]
    assert logprobs["float"] != logprobs["int8"]


@needs_no_gpu
@pytest.mark.skipif(native() is None, reason="needs the native kernels")
def test_a_gguf_file_is_widened_where_no_kernel_takes_it(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    sizes = {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "head_dim": 64,
        "num_hidden_layers": 1,
    }
    choose = matrices("Q4_K", "Q6_K", "MXFP4", "IQ4_NL", "Q5_1", "Q4_0")
    file = write_gguf(
        "qwen3_moe", make_checkpoint("qwen3_moe", **sizes).path, tmp_path / "model.gguf", choose
    )
    scores = {}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    for kernels, activations in (
        ("native", "float"),
        ("torch", "auto"),
        ("triton", "auto"),
        ("native", "auto"),
    ):
        more: dict[str, Any] = {
            "kernels": kernels,
            "activations": activations,
            "dtype": "float32",
            "threads": 1,
        }
        with LLM(file, skip_tokenizer_init=True, max_model_len=64, **more) as llm:
            (out,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
        (row,) = out.outputs[0].logprobs
        scores[kernels, activations] = dict(zip(row.ids, row.values, strict=True))
    expected = scores.pop(("native", "float"))
    assert all(
        found == pytest.approx(expected, abs=1e-4)
        for key, found in scores.items()
        if key[0] != "native"
    )
    assert scores["native", "auto"] != pytest.approx(expected, abs=1e-4), "rows are rounded there"


def test_rows_of_int8_are_refused_where_they_would_change_nothing(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint("qwen3_moe").path
    with pytest.raises(
        ConfigError, match=r"activations=int8 needs weights of 4 or 8 bits.*float32"
    ):
        load(path, activations="int8")
    with pytest.raises(ConfigError, match="activations=int8 needs the native kernels"):
        load(path, activations="int8", quantization="int8", kernels="torch")
    for form in (FORMS["fp8"], Form("int4", group=8, packed=True)):
        stored, _ = write_quantized(path, tmp_path / form.kind, form)
        with pytest.raises(
            ConfigError, match=r"groups of 16 inputs or a multiple of 32.*use activations=float"
        ):
            load(stored, activations="int8")


def test_bytes_of_a_weight(make_checkpoint: Any, tmp_path: Path) -> None:
    path = make_checkpoint("mixtral").path
    spec = read_model_spec(path)
    assert [bytes_per_weight(spec, asked, 2) for asked in ("none", "int8", "int4")] == [
        2,
        1.0,
        0.5625,
    ]
    stored, _ = write_quantized(path, tmp_path, FORMS["fp8"])
    assert bytes_per_weight(read_model_spec(stored), "none", 4) == 1.0
    channels = StoredFormat(kind="int4", layout="words", zeros=True)
    assert bytes_per_weight(replace(spec, stored=(channels,)), "none", 2) == 0.5625
    assert model_size(read_model_spec(stored)) == model_size(spec)
