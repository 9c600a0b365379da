"""GGUF files of the checkpoints that most people run: published sizes, and the types of the files
that they take.

The files have a header and no weights: their data are a hole. All that is checked before weights
are read is checked here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.comm.world import World
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.load_plan import LoadPlan, check_plan
from moeserve.models.hf_config import read_model_spec
from moeserve.models.load_plan import load_plan
from moeserve.models.mtp import mtp_load_plan, with_mtp
from moeserve.models.spec import ModelSpec, model_size
from tests.families import FAMILIES, architecture
from tests.gguf_families.group import Config
from tests.gguf_files import GROUPS, add

from .test_published_configs import RELEASES

Type = gguf.GGMLQuantizationType
Mix = Callable[[str, int], str]  # (name of a matrix, number of its layer) -> type
_NEVER_QUANTIZED = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "ssm_norm", "proj")


class Published(NamedTuple):
    family: str  # in tests/families.py
    release: str  # in RELEASES
    mix: str
    gigabytes: float | None = None  # of the file that people take
    changes: Config | None = None  # of the release's config


def _is_expert(name: str) -> bool:
    return "_exps" in name


def _q4_k_m(name: str, layer: int) -> str:
    if name == "output.weight":
        return "Q6_K"
    wide = "attn_v" in name or "ffn_down" in name
    return "Q6_K" if wide and layer % 2 else "Q4_K"


def _q4_0(name: str, layer: int) -> str:
    return "Q6_K" if name in ("output.weight", "token_embd.weight") else "Q4_0"


def _mxfp4(name: str, layer: int) -> str:
    return "MXFP4" if _is_expert(name) else "Q8_0"


def _dynamic(gate_and_up: str, down: str, other: str) -> Mix:
    """Return a mix with small types for experts only, as Unsloth's "UD" files have."""

    def choose(name: str, layer: int) -> str:
        if not _is_expert(name):
            return other if name.startswith("blk.") else "Q6_K"
        return down if "down" in name else gate_and_up

    return choose


_MIXES: dict[str, Mix] = {
    "Q4_K_M": _q4_k_m,
    "Q4_0": _q4_0,
    "MXFP4": _mxfp4,
    "UD-Q4_K_XL": _dynamic("Q4_K", "Q5_K", "Q8_0"),
    "UD-Q3_K_XL": _dynamic("IQ3_XXS", "IQ4_XS", "Q5_K"),
    "UD-Q2_K_XL": _dynamic("Q2_K", "Q3_K", "Q4_K"),
    "UD-IQ2_XXS": _dynamic("IQ2_XXS", "IQ3_XXS", "Q5_K"),
    "UD-IQ1_S": _dynamic("IQ1_S", "IQ2_XXS", "Q5_K"),
}
# Types for rows that are no whole number of blocks
_FALLBACK = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ4_XS"), "IQ4_NL"),
}  # fmt: skip
_QWEN_122B = {
    "hidden_size": 3072, "num_hidden_layers": 48, "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024, "num_attention_heads": 32,
    "linear_num_value_heads": 64, "layer_types": None,
}  # fmt: skip
CONFIGS: dict[str, Config] = {
    **{name: config for name, (config, _, _) in RELEASES.items()},
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    # The sizes of these two are the defaults of their configuration classes.
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "rope_theta": 1000000.0,
    },
    "Mistral-Small-4-119B": {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
        "text_config": {"model_type": "mistral4"}, "vision_config": {"model_type": "pixtral"},
    },
}  # fmt: skip
CHECKPOINTS = {
    "Qwen3.6-35B-A3B Q4_K_M": Published("qwen3_5_moe", "Qwen3.5-35B-A3B", "Q4_K_M", 21),
    "Qwen3.6-35B-A3B UD-IQ2_XXS": Published("qwen3_5_moe", "Qwen3.5-35B-A3B", "UD-IQ2_XXS"),
    "Gemma-4-26B-A4B": Published("gemma4_text", "Gemma-4-26B-A4B", "Q4_0"),
    "Gemma-4-26B-A4B UD": Published("gemma4_text", "Gemma-4-26B-A4B", "UD-Q4_K_XL"),
    "gpt-oss-20b": Published("gpt_oss", "gpt-oss-20b", "MXFP4", 12),
    "gpt-oss-120b": Published(
        "gpt_oss",
        "gpt-oss-20b",
        "MXFP4",
        63,
        {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None},
    ),
    "Qwen3-Coder-Next": Published("qwen3_next", "Qwen3-Next-80B-A3B", "Q4_K_M", 51),
    "GLM-4.7-Flash": Published("glm4_moe_lite", "GLM-4.7-Flash", "Q4_K_M"),
    "Qwen3.5-122B-A10B": Published(
        "qwen3_5_moe", "Qwen3.5-35B-A3B", "UD-Q3_K_XL", changes=_QWEN_122B
    ),
    "Qwen3-30B-A3B": Published("qwen3_moe", "Qwen3-30B-A3B", "Q4_K_M", 18.6),
    "MiniMax-M2": Published(
        "minimax_m2", "MiniMax-M2", "UD-Q3_K_XL", changes={"shared_intermediate_size": None}
    ),
    "Nemotron-3-Nano": Published("nemotron_h", "Nemotron-3-Nano-30B-A3B", "UD-Q4_K_XL"),
    "Mistral-Small-4": Published("mistral3", "Mistral-Small-4-119B", "Q4_K_M"),
    "Llama-4-Scout": Published(
        "llama4_text", "Llama-4-Scout", "UD-IQ1_S", changes={"attn_temperature_tuning": True}
    ),
    "Kimi-K2": Published("deepseek_v3", "Kimi-K2-Instruct", "UD-IQ1_S"),
}


@pytest.mark.full("models", keep=4)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_file_of_published_size_is_taken(name: str, tmp_path: Path) -> None:
    published = CHECKPOINTS[name]
    config = _full_config(published)
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = read_model_spec(tmp_path)
    file = write_header(published, config, _tensors(expected), tmp_path / "model.gguf")
    spec = read_model_spec(file)
    checkpoint = open_checkpoint(file, spec.stored)
    for plan in _plans(spec, checkpoint.names):
        check_plan(checkpoint, plan)
    assert model_size(spec) == model_size(expected)
    if published.gigabytes is not None:
        assert file.stat().st_size / 1e9 == pytest.approx(published.gigabytes, rel=0.08)


def _full_config(published: Published) -> Config:
    """Return config.json with all keys that the family's configuration class has."""
    import transformers  # imported here because it is slow

    class_name, options = FAMILIES[published.family]
    config = CONFIGS[published.release]
    text = {**config.get("text_config", config), **(published.changes or {})}
    text = {
        key: value
        for key, value in text.items()
        if value is not None and key != "quantization_config"
    }
    if "text_config" in options:
        values = {**config, "text_config": text}
    else:
        values = text
    values = {key: value for key, value in values.items() if key != "model_type"}
    full: Config = getattr(transformers, class_name + "Config")(**values).to_dict()
    return {**full, "architectures": [architecture(published.family)], "dtype": "bfloat16"}


def _plans(spec: ModelSpec, present: Any) -> list[LoadPlan]:
    """Return the plans of the decoder, and of its MTP head."""
    plans = [load_plan(spec, present)]
    if spec.mtp is not None:
        plans.append(mtp_load_plan(with_mtp(spec), present, World()))
    return plans


def _tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Return the tensors of the safetensors checkpoint, without data."""
    pieces = [piece for plan in _plans(spec, ()) for piece in plan.pieces]
    return {piece.source: torch.empty(piece.shape, device="meta") for piece in pieces}


def write_header(
    published: Published, config: Config, tensors: dict[str, Tensor], path: Path
) -> Path:
    """Write a GGUF file with a hole instead of weights."""
    group = next(group for group in GROUPS if published.family in group.architectures)
    config = config | config.get("text_config", {})
    arch = group.architectures[published.family]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in group.metadata(published.family, config).items():
        add(writer, f"{arch}.{key}", value)
    values = {}  # of the few tensors with data, by their places
    place = 0
    for name, tensor in group.tensors(published.family, config, tensors).items():
        shape = tuple(tensor.shape)
        kind = _type(published.mix, name, shape)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = tensor.numel() // block_size * block_bytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)
        if tensor.device.type != "meta":
            values[place] = tensor.numpy().tobytes()
        place += gguf.GGUFWriter.ggml_pad(num_bytes, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    begin = gguf.GGUFWriter.ggml_pad(path.stat().st_size, writer.data_alignment)
    with path.open("r+b") as out:
        out.truncate(begin + place)
        for place, data in values.items():
            out.seek(begin + place)
            out.write(data)
    return path


def _type(mix: str, name: str, shape: tuple[int, ...]) -> Type:
    """Return a tensor's type: F32 for vectors and what llama.cpp never quantizes."""
    base = name.split(".")[-2]
    if len(shape) < 2 or base in _NEVER_QUANTIZED or not name.endswith(".weight"):
        return Type.F32
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    kind = _MIXES[mix](name, layer)
    if shape[-1] % gguf.GGML_QUANT_SIZES[Type[kind]][0]:
        kind = _FALLBACK[kind]
    return Type[kind]
