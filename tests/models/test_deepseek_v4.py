"""DeepSeek-V4: the formats of its published weights, and its configs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeserve.blocks.compressed_attention import CompressedAttention
from moeserve.blocks.feed_forward import MoE
from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec
from moeserve.ops.native import native
from tests.quantized_checkpoints import Form, rounded

from .conftest import Driver

MODULE: Any = native()
PROMPT = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist()
QUARTER = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
LINEAR = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")


def fp8(w_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values and scales in blocks of 128 x 128, and the dequantized weight."""
    exponent = (w_NK.abs().max() / 448).log2().ceil()
    values = (w_NK / exponent.exp2()).to(torch.float8_e4m3fn)
    blocks = [-(-size // 128) for size in w_NK.shape]
    scales = (exponent + 127).to(torch.uint8).expand(blocks).contiguous()
    return values, scales, values.float() * exponent.exp2()


def fp4(w_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs of values, scales in groups of 32, and the dequantized weight."""
    codes, _, meaning, scales = rounded(w_NK, Form("fp4", group=32))
    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return pairs.view(torch.int8), scales["_scale"], meaning


def write_as_published(source: Path, folder: Path, experts: str) -> tuple[Path, Path]:
    """Write the checkpoint as its authors do, and its fp32 meaning. experts: fp4 or fp8."""
    stored = dict[str, Tensor]()
    meaning = dict[str, Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = meaning[name] = tensor
        module = name.removesuffix(".weight")
        if not module.endswith(LINEAR) or "compressor" in module or "mtp" in module:
            continue
        quantize = fp4 if experts == "fp4" and ".experts." in name else fp8
        stored[name], scales, meaning[name] = quantize(tensor)
        stored[module + ".scale"] = scales.view(torch.float8_e8m0fnu)
    config = json.loads((source / "config.json").read_text())
    quantization = {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    }  # fmt: skip
    extras = ({"quantization_config": quantization, "expert_dtype": experts}, {})
    paths = (folder / "stored", folder / "meaning")
    for path, content, extra in zip(paths, (stored, meaning), extras, strict=True):
        shutil.copytree(source, path)
        save_file(content, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | extra))
    return paths


@pytest.mark.skipif(MODULE is None or not MODULE.serving_isa(), reason="needs the native kernels")
@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_published_weights_mean_what_they_say(
    experts: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    source = make_checkpoint("deepseek_v4", moe_intermediate_size=64, intermediate_size=64).path
    stored, meaning = write_as_published(source, tmp_path, experts)
    ours, theirs = (Driver(path).prefill("a", PROMPT, 31) for path in (stored, meaning))
    assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max() <= 2e-5


def spec_of(values: dict[str, Any], folder: Path) -> ModelSpec:
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["DeepseekV4ForCausalLM"], "dtype": "float32", **values})
    )
    return read_model_spec(folder)


def test_both_spellings_of_a_config_mean_the_same(tmp_path: Path) -> None:
    old = {
        "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1,
        "qk_rope_head_dim": 32,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    }  # fmt: skip
    new = {
        "num_hidden_layers": 4, "partial_rotary_factor": 32 / 512,
        "layer_types": [
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000},
            "compress": {
                "rope_type": "yarn", "rope_theta": 160000, "factor": 16,
                "original_max_position_embeddings": 65536, "attention_factor": 1.0,
            },
        },
    }  # fmt: skip
    spec = spec_of(old, tmp_path)
    assert spec == spec_of(new, tmp_path)
    mixers = [layer.mixer for layer in spec.layers]
    assert all(isinstance(mixer, CompressedAttention) for mixer in mixers)
    assert [mixer.every for mixer in mixers] == [0, 4, 128, 4]
    assert [mixer.rope.theta for mixer in mixers] == [1e4, 16e4, 16e4, 16e4]
    assert {mixer.rope.attention_factor for mixer in mixers} == {1.0}
    blocks = [layer.feed_forward for layer in spec.layers]
    assert all(isinstance(block, MoE) for block in blocks)
    assert [block.hashed for block in blocks] == [129280, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [0, 8]}, "compress_ratios"),
        ({"compress_rates": {"heavily_compressed_attention": 24}}, "compress_rates"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"o_groups": 3}, "o_groups"),
        ({"mlp_layer_types": ["moe", "dense"]}, "mlp_layer_types"),
        ({"compress_ratios": [{}, 4]}, r"compress_ratios is \[\{\}, 4\]; it must list"),
        ({"compress_rates": {"heavily_compressed_attention": True}}, "compress_rates is"),
        ({"compress_rates": {"heavily_compressed_attention": 2**40}}, "multiple of it up to 65536"),
        ({"compress_rate_hca": 24}, "compress_rate_hca is 24; .* must divide 16"),
        ({"n_shared_experts": None}, "n_shared_experts is None; it must be an integer from 1"),
        ({"compress_rope_theta": "x"}, "compress_rope_theta is 'x'"),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"main": QUARTER, "compress": {}}},
            "rope_parameters.partial_rotary_factor is 0.25; 256 of 512 elements",
        ),
    ],
)
def test_values_that_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of({"num_hidden_layers": 2, **change}, tmp_path)


def test_one_object_of_rope_parameters_does_not_count(tmp_path: Path) -> None:
    """As in transformers, `main` counts only beside `compress`."""
    one, none = (
        spec_of({"num_hidden_layers": 2, "rope_parameters": parameters}, tmp_path)
        for parameters in ({"main": {"rope_theta": 500.0}}, {})
    )
    assert one == none


@pytest.mark.parametrize("expert", [-1, 8])
def test_experts_that_do_not_exist_are_refused(
    expert: int, make_checkpoint: Any, tmp_path: Path
) -> None:
    """The table of a hash layer is indexed with token ids; its values index experts."""
    source = make_checkpoint("deepseek_v4").path
    tensors = load_file(source / "model.safetensors")
    tensors["layers.0.ffn.gate.tid2eid"][7, 1] = expert
    shutil.copy(source / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="tid2eid names experts beyond the 8 of"):
        Driver(tmp_path)
