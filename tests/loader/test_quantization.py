"""Quantized checkpoints: supported settings in config.json, and the required files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.config import config_of
from moeserve.errors import CheckpointError, ConfigError
from moeserve.loader.checkpoint import Checkpoint, open_checkpoint
from moeserve.loader.experts import ExpertFiles
from moeserve.loader.load_plan import Param, Piece
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import StoredWeight
from moeserve.loader.stored_format import StoredFormat
from moeserve.loader.unpack import unpack
from moeserve.loader.weights import empty_weight
from moeserve.models.hf_config import read_model_spec
from moeserve.models.load_plan import expert_load_plan, load_plan
from moeserve.ops.quantized import Quantized
from moeserve.runner.limits import check
from tests.loader.eager import load
from tests.quantized_checkpoints import FORMS, write_quantized

from .conftest import LLAMA, WriteConfig

Q = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


def compressed(
    layout: str = "pack-quantized", top: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    values = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 128,
        **weights,
    }
    group = {"targets": ["Linear"], "weights": values, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        **(top or {}),
    }


MXFP4 = StoredFormat(kind="fp4", layout="blocks", group=32)
NVFP4 = StoredFormat(kind="fp4", layout="nibbles", group=16, activations=True)
GOOD = [
    (compressed(), StoredFormat(kind="int4", layout="words", group=128)),
    (
        compressed(
            top={"sparsity_config": {"format": "dense", "targets": []}, "transform_config": {}}
        ),
        StoredFormat(kind="int4", layout="words", group=128),
    ),
    (
        compressed(symmetric=False, actorder="weight"),
        StoredFormat(kind="int4", layout="words", group=128, zeros=True),
    ),
    (compressed(strategy=None, group_size=-1), StoredFormat(kind="int4", layout="words")),
    (compressed(num_bits=8, strategy="channel"), StoredFormat(kind="int8", layout="words")),
    (compressed("int-quantized", num_bits=8, strategy="channel"), StoredFormat(kind="int8")),
    (
        compressed("naive-quantized", num_bits=8, strategy="tensor"),
        StoredFormat(kind="int8", rows=0),
    ),
    (
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        StoredFormat(kind="fp8", rows=0),
    ),
    (
        compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 128]
        ),
        StoredFormat(kind="fp8", rows=64, group=128),
    ),
    (
        compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
        StoredFormat(kind="fp4", layout="nibbles", group=16),
    ),
    (
        compressed("mxfp4-pack-quantized", type="float", group_size=32, scale_dtype="torch.uint8"),
        StoredFormat(kind="fp4", layout="nibbles", group=32),
    ),
    (
        compressed(
            "int-quantized", {"kv_cache_scheme": {"num_bits": 8}}, num_bits=8, group_size=64
        ),
        StoredFormat(kind="int8", group=64),
    ),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, MXFP4),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {}}, NVFP4),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, NVFP4),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        StoredFormat(kind="fp8", rows=0, activations=True),
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        StoredFormat(kind="fp8", rows=128, group=128),
    ),
    ({"quant_method": "fbgemm_fp8"}, StoredFormat(kind="fp8", activations=True)),
    ({"quant_method": "mxfp8"}, StoredFormat(kind="fp8", group=32, activations=True)),
    (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        StoredFormat(kind="fp8", group=32, activations=True),
    ),
    (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 64,
            "version": "GEMM",
            "modules_to_not_convert": ["gate"],
        },
        StoredFormat(kind="int4", layout="awq", group=64, zeros=True),
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
        StoredFormat(kind="int4", layout="gptq"),
    ),
    (
        {
            "quant_method": "gptq",
            "bits": 8,
            "checkpoint_format": "gptq_v2",
            "desc_act": True,
            "static_groups": True,
        },
        StoredFormat(kind="int8", layout="gptq_v2", group=128),
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        StoredFormat(kind="fp8", rows=128, group=128, activations=True),
    ),
    ({"quant_method": "fp8"}, StoredFormat(kind="fp8", rows=0, activations=True)),
]
BAD = [
    (
        {"quant_method": "bitsandbytes"},
        "quant_method is 'bitsandbytes'; supported: compressed-tensors, fp8",
    ),
    ({"quant_method": "gptq", "bits": 3}, "bits is 3; supported: 4, 8"),
    (
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        "desc_act is True; groups of reordered inputs",
    ),
    (
        {"quant_method": "gptq", "bits": 8, "sym": False},
        "sym is False; zero points are supported for 4 bits only",
    ),
    (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}},
        "dynamic is .* settings per module",
    ),
    (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        "supported: gptq, gptq_v2",
    ),
    ({"quant_method": "awq", "bits": 8}, "bits is 8; supported: 4"),
    ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'; supported: gemm"),
    ({"quant_method": "awq", "zero_point": False}, "zero_point is False"),
    (
        {"quant_method": "awq", "group_size": 12},
        "group_size is 12; it must be a multiple of 8, or -1",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        "quant_algo is 'W4A8_AWQ'; supported: FP8",
    ),
    ({"quant_method": "modelopt"}, "quant_algo is missing"),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        "group_size is 32; supported: 16",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        "quantized_layers is None; it must map names of layers",
    ),
    (
        compressed("nvfp4-pack-quantized"),
        "type is 'int'; supported: float with the format nvfp4-pack-quantized",
    ),
    (compressed("nvfp4-pack-quantized", type="float"), "group_size is 128; supported: 16"),
    (
        {"quant_method": "mxfp8", "weight_block_size": [1, 16]},
        r"weight_block_size is \[1, 16\]; supported: \[1, 32\]",
    ),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; supported: e4m3"),
    (
        {"quant_method": "fp8", "weight_block_size": [128]},
        r"weight_block_size is \[128\]; it must be two sizes",
    ),
    ({"quant_method": "fp8", "weight_block_size": [128, 100]}, "the second a multiple of 8"),
    (compressed("marlin-24"), "format is 'marlin-24'; supported: pack-quantized"),
    (compressed(num_bits=3), "num_bits is 3; it must be an integer from 4 to 8"),
    (compressed(num_bits=6), "num_bits is 6; supported: 8, and 4 with"),
    (
        compressed("int-quantized"),
        "num_bits is 4; supported: 8, and 4 with the format pack-quantized",
    ),
    (compressed(type="float"), "type is 'float'; supported: int"),
    (compressed(actorder="group"), "actorder is 'group'; this is not supported"),
    (compressed(actorder=True), "actorder is True"),
    (compressed(dynamic=True), "dynamic is True"),
    (compressed(group_size=12), "group_size is 12; it must be a multiple of 8"),
    (compressed(group_size="x"), "group_size is 'x'"),
    (compressed(strategy="token"), "strategy is 'token'; supported: tensor, channel, group"),
    (
        compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        "zero points are supported for 4",
    ),
    (
        compressed(top={"sparsity_config": {"format": "sparse-bitmask"}}),
        "sparsity_config is .*sparse weights",
    ),
    (compressed(top={"config_groups": {}}), "config_groups is {}; it must have a group"),
    (compressed(top={"config_groups": {"W8A16": ["Linear"]}}), "config_groups"),
    (
        compressed(top={"config_groups": {"a": {"weights": None}}}),
        "weights is None; groups that quantize activations alone",
    ),
    ([], "quantization_config"),
]


@pytest.mark.parametrize(("config", "expected"), GOOD)
def test_formats_that_are_read(
    config: Any, expected: StoredFormat, write_config: WriteConfig
) -> None:
    assert read_model_spec(write_config(LLAMA, quantization_config=config)).stored == (expected,)


@pytest.mark.parametrize(("config", "message"), BAD)
def test_others_are_refused_by_their_field(
    config: Any, message: str, write_config: WriteConfig
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model_spec(write_config(LLAMA, quantization_config=config))


def test_groups_that_differ(write_config: WriteConfig) -> None:
    """Experts in int4, attention in fp8 and a few layers in other groups; alike ones count once."""
    experts = compressed()["config_groups"]["group_0"]
    attention = compressed(group_size=64)["config_groups"]["group_0"]
    fp8 = compressed(num_bits=8, type="float", strategy="channel")["config_groups"]["group_0"]
    groups = {
        "a": {**experts, "targets": ["re:.*experts.*"], "format": "pack-quantized"},
        "b": {**attention, "targets": ["Linear"], "format": "pack-quantized"},
        "c": {**fp8, "format": "float-quantized"},
    }
    config = compressed("mixed-precision", top={"config_groups": groups})
    formats = read_model_spec(write_config(LLAMA, quantization_config=config)).stored
    assert [(form.kind, form.group, form.targets) for form in formats] == [
        ("int4", 128, ("re:.*experts.*",)),
        ("int4", 64, ("Linear",)),
        ("fp8", 0, ("Linear",)),
    ]
    config["config_groups"] = dict.fromkeys("ab", groups["b"])
    assert read_model_spec(write_config(LLAMA, quantization_config=config)).stored == (
        StoredFormat(kind="int4", layout="words", group=64),
    )


def test_model_opts_own_file(write_config: WriteConfig) -> None:
    """Without quantization_config in config.json; with several algorithms, also."""
    path = write_config(LLAMA)
    values: dict[str, Any] = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    (path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": values})
    )
    assert read_model_spec(path).stored == (NVFP4,)
    layers = {
        "a": {"quant_algo": "FP8"},
        "b": {"quant_algo": "NVFP4", "group_size": 16},
        "c": {"quant_algo": "FP8"},
    }
    values = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": values}))
    assert [form.kind for form in read_model_spec(path).stored] == ["fp8", "fp4"]
    layers["b"]["quant_algo"] = "INT4_AWQ"
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": values}))
    with pytest.raises(
        CheckpointError,
        match=r"hf_quant_config.json: quantization.quantized_layers.b.quant_algo is",
    ):
        read_model_spec(path)


def test_of_the_text_model_in_a_larger_one(write_config: WriteConfig) -> None:
    """Kimi-K2.5 has its settings in the text model's config."""
    path = write_config(LLAMA, text_config={"quantization_config": compressed(group_size=32)})
    assert read_model_spec(path).stored == (StoredFormat(kind="int4", layout="words", group=32),)
    path = write_config(LLAMA, text_config={"quantization_config": {"quant_method": "aqlm"}})
    with pytest.raises(
        CheckpointError, match=r"text_config\.quantization_config\.quant_method is 'aqlm'"
    ):
        read_model_spec(path)


def test_quantized_activations_are_noted(write_config: WriteConfig) -> None:
    config = compressed("int-quantized", num_bits=8, strategy="channel")
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    (stored,) = read_model_spec(write_config(LLAMA, quantization_config=config)).stored
    assert stored.activations


@pytest.fixture
def small(make_checkpoint: Any, tmp_path: Path) -> Any:
    """small(form, change) -> the error of loading a checkpoint whose tensors were changed."""

    def refuse(form: str, change: Any) -> str:
        path, _ = write_quantized(make_checkpoint("qwen3_moe").path, tmp_path, FORMS[form])
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            everything(path)
        return str(caught.value)

    return refuse


def everything(path: Path) -> dict[str, Any]:
    spec = read_model_spec(path)
    checkpoint = open_checkpoint(path, spec.stored)
    return load(checkpoint, load_plan(spec, checkpoint.names), torch.bfloat16)


def put(name: str, index: Any, value: float) -> Any:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name][index] = value

    return change


def replace(name: str, tensor: Any) -> Any:
    return lambda tensors: tensors.update({name: tensor})


CHANGES: list[tuple[str, Any, str]] = [
    (
        "fp8 in blocks",
        put(EXPERT, (5, 7), torch.nan),
        f"tensor {EXPERT!r} in model.safetensors has NaN",
    ),
    (
        "fp8 in blocks",
        put(EXPERT + "_scale_inv", (0, 0), torch.inf),
        f"tensor {EXPERT + '_scale_inv'!r} in",
    ),
    (
        "int8",
        put(Q + "_scale", (3, 0), torch.nan),
        f"tensor {Q + '_scale'!r} in model.safetensors has NaN or infinity",
    ),
    (
        "int8",
        lambda t: t.pop(Q + "_scale"),
        f"{Q!r} in model.safetensors is I8, but {Q}_scale is missing",
    ),
    (
        "int8",
        lambda t: t.pop(EXPERT) is t.pop(EXPERT + "_scale"),
        f"{EXPERT!r} [32, 64] is missing",
    ),
    (
        "int8",
        replace(Q + "_scale", torch.ones(127, 1)),
        f"{Q + '_scale'!r} in model.safetensors is F32 [127, 1]",
    ),
    (
        "int4",
        lambda t: t.update({Q + "_scale": t[Q + "_scale"].T.contiguous()}),
        "supported: [128, 2] scales in F32",
    ),
    (
        "int4",
        replace(Q, torch.ones(128, 64)),
        f"{Q + '_packed'!r} in model.safetensors is there as {Q!r}, too",
    ),
    (
        "int8",
        replace(Q, torch.ones(128, 32, dtype=torch.int8)),
        "has shape [128, 32], config.json implies [128, 64]",
    ),
    (
        "int8",
        replace(Q, torch.ones(128, 64)),
        f"{Q + '_scale'!r} in model.safetensors is not part of this model",
    ),
    (
        "int8",
        replace(Q + "_g_idx", torch.ones(64, dtype=torch.int32)),
        "_g_idx' in model.safetensors is not part of this model",
    ),
    ("int4", replace(Q + "_packed", torch.ones(128, 9, dtype=torch.int32)), "implies [128, 8]"),
    (
        "int4 with zero points",
        lambda t: t.pop(Q + "_zero_point"),
        "needs a tensor of zero points, I32 [16, 2]",
    ),
    (
        "int8",
        lambda t: t.update({Q: t.pop(Q).float()}) is t.pop(Q + "_scale"),
        (
            f"tensor {Q!r} is not quantized and 'model.layers.0.self_attn.v_proj.weight' is int8; "
            "they must have the same format"
        ),
    ),
    (
        "int8",
        lambda t: t.update({
            "model.embed_tokens.weight": torch.ones(256, 64, dtype=torch.int8),
            "model.embed_tokens.weight_scale": torch.ones(256, 1),
        }),
        "'model.embed_tokens.weight' is quantized, which is supported for linear layers only",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "change", "message"), CHANGES)
def test_what_does_not_fit_is_named(form: str, change: Any, message: str, small: Any) -> None:
    assert message in small(form, change)


@pytest.mark.parametrize("kind", [*FORMS, "asked int8", "asked int4"])
def test_experts_read_one_by_one_are_the_same(
    kind: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint("qwen3_moe").path
    asked = None
    if kind in FORMS:
        path, _ = write_quantized(path, tmp_path, FORMS[kind])
    else:
        asked = kind.removeprefix("asked ")
    spec = read_model_spec(path)
    checkpoint = open_checkpoint(path, spec.stored)
    plan = load_plan(spec, checkpoint.names)
    params = load(checkpoint, plan, torch.bfloat16, quantize_to=asked)
    files = ExpertFiles(
        checkpoint,
        lambda layer, e: expert_load_plan(spec, checkpoint.names, layer, [e]),
        torch.bfloat16,
        quantize_to=asked,
    )
    for expert in (5, 0, 5):
        for got, name in zip(files.read(1, expert), ("w13", "w2"), strict=True):
            expected = params[f"layers.1.{name}"][expert]
            assert got.kind == expected.kind == (FORMS[kind].kind if kind in FORMS else asked)
            assert all(torch.equal(a, b) for a, b in zip(got.parts, expected.parts, strict=True))
    files.close()


def test_a_written_form_lacks_nothing(make_checkpoint: Any, tmp_path: Path) -> None:
    """The test writer leaves some layers unquantized; the reader must see both kinds."""
    path, _ = write_quantized(make_checkpoint("qwen3_moe").path, tmp_path, FORMS["int4"])
    params = everything(path)
    assert params["layers.0.qkv"].kind == "int4"
    assert params["layers.1.qkv"].dtype == torch.bfloat16
    assert json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]


def test_a_checkpoint_that_is_quantized_already(make_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = write_quantized(make_checkpoint("llama").path, tmp_path, FORMS["fp8"])
    with pytest.raises(
        ConfigError, match="quantization=int8, but the checkpoint's weights are fp8 already"
    ):
        check(config_of(path, quantization="int8"), read_model_spec(path))


def test_widths_that_groups_do_not_divide(make_checkpoint: Any) -> None:
    path = make_checkpoint("qwen3_moe", moe_intermediate_size=40, intermediate_size=24).path
    with pytest.raises(ConfigError, match=r"layers with 40 inputs.*use quantization=int8"):
        check(config_of(path, quantization="int4"), read_model_spec(path))
    check(config_of(path, quantization="int8"), read_model_spec(path))


def test_unknown_kinds(make_checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match="int3"):
        config_of("demo", quantization="int3")


@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_zero_points_of_few_outputs(rows: int) -> None:
    """Eight of them share a word, also where one word per group is all."""
    form = StoredFormat(kind="int4", layout="words", group=32, zeros=True)
    shape = (rows, 128)
    zeros_NC = torch.arange(rows * 4).view(rows, 4) % 16
    padded = torch.nn.functional.pad(zeros_NC, (0, 0, 0, -rows % 8)).view(-1, 8, 4)
    tensors = {
        "w_packed": torch.zeros(rows, 16, dtype=torch.int32),
        "w_scale": torch.ones(rows, 4),
        "w_zero_point": (padded << 4 * torch.arange(8)[:, None]).sum(1).to(torch.int32),
    }
    infos = {
        name: TensorInfo(
            name,
            Path("f"),
            "F32" if tensor.is_floating_point() else "I32",
            tuple(tensor.shape),
            0,
            0,
        )
        for name, tensor in tensors.items()
    }
    stored = StoredWeight(form, infos["w_packed"], infos["w_scale"], infos["w_zero_point"])
    assert stored.mismatch(shape) == ""
    piece = Piece("w", shape, "w")
    checkpoint = Checkpoint(Path(), {}, {"w": stored})
    into = empty_weight(checkpoint, Param("w", shape), [piece], torch.float32, torch.device("cpu"))
    assert isinstance(into, Quantized)

    def read(info: TensorInfo, take: Any) -> torch.Tensor:
        found = tensors[info.name][take]
        return found if found.is_floating_point() else found.view(torch.int32)

    unpack(stored, piece, into, read)
    assert into.zeros is not None
    assert torch.equal(into.zeros, zeros_NC.float())
