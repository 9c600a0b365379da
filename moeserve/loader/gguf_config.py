"""Translates the metadata of GGUF files to the JSON files of Hugging Face checkpoints.

llama.cpp's converters write keys such as `ARCHITECTURE.block_count`. gguf_architectures/ has what
llama.cpp computes for each architecture beyond these keys. An unknown key of the architecture is
rejected, because it may change the results.
"""

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError
from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import (
    ROPE_FACTORS,
    ROPE_FACTORS_LONG,
    ROPE_FACTORS_SHORT,
    SIGMOID,
    SLIDING_PATTERN,
    SLIDING_THETA,
    SOFTMAX,
    GGUFArchitecture,
)
from moeserve.loader.gguf_architectures.registry import ARCHITECTURES, variants_of
from moeserve.loader.gguf_file import GGUFHeader, read_model
from moeserve.loader.gguf_layers import FULL, SLIDING, num_layers, rotated_share
from moeserve.loader.gguf_vocab import end_ids, tokenizer_config
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored_format import GGML_FORMATS

_MAX_INTEGER = 2**31
_MAX_VALUES = 2**16  # values of an array: one for each layer, or factors of a rotary embedding
_SCALARS = (bool, int, float, str)
_MAX_MSCALE = 1000.0
_KEYS = {  # GGUF key -> config.json key, in all architectures
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.sliding_window": "sliding_window",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "feed_forward_length": "intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_OTHER_KEYS = {  # read by functions below, or without effect
    "attention.causal",
    "attention.key_length_mla",
    "attention.value_length",
    "attention.value_length_mla",
    "expert_gating_func",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
    "tensor_data_layout",
    "vocab_size",
}
# Keys with values that no tensor's shape can verify. llama.cpp requires them, too.
_REQUIRED = (
    "attention.head_count",
    "block_count",
    "context_length",
    "embedding_length",
)
# config.json key -> llama.cpp's default if the file omits it
_DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_group": 1,
    "n_shared_experts": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "sliding_window": None,
    "topk_group": 1,
}
# Tensors whose values are part of the config
CONFIG_TENSORS = (ROPE_FACTORS, ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG)
_SAMPLING = {  # key of generation_config.json -> GGUF key, after "general.sampling."
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def document(path: Path, name: str) -> dict[str, Any]:
    """Return what the JSON file `name` of the model's directory would have, made from metadata.

    {}: no metadata correspond to that file.
    """
    headers = read_model(path)
    if name == "config.json":
        return _config(headers)
    meta = headers[0].metadata
    if name == "generation_config.json":
        keys = {key: f"general.sampling.{gguf_key}" for key, gguf_key in _SAMPLING.items()}
        return {
            key: _config_value(meta[gguf_key]) for key, gguf_key in keys.items() if gguf_key in meta
        }
    return tokenizer_config(path, meta) if name == "tokenizer_config.json" else {}


def architecture_of(headers: list[GGUFHeader]) -> tuple[GGUFArchitecture, dict[str, Any]]:
    """Return the architecture's variant, and the metadata whose keys begin with "ARCHITECTURE.".

    The returned keys are without this prefix.

    Raises CheckpointError for an unsupported architecture.
    """
    header = headers[0]
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        shown = repr(name)[:80]
        raise CheckpointError(
            f"{header.path}: general.architecture is {shown}; supported as GGUF: "
            f"{', '.join(ARCHITECTURES)}. Serve the model's safetensors checkpoint if "
            "docs/models.md lists it"
        )
    prefix = f"{name}."
    _check_lengths(header, prefix)
    num_layers = header.metadata.get(f"{prefix}block_count")
    arch_meta = {
        key.removeprefix(prefix): _config_value(
            value, num_layers if key != prefix + SLIDING_PATTERN else None
        )
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    is_sigmoid = arch_meta.get("expert_gating_func") == SIGMOID
    if not arch_meta.get("expert_gating_func"):
        # Converters write the key only if config.json has it. Of the supported architectures with
        # several variants, only those with sigmoid scores have a bias of the scores.
        tensor_names = (tensor.name for each in headers for tensor in each.tensors)
        is_sigmoid = any(".exp_probs_b" in tensor_name for tensor_name in tensor_names)
    variants = variants_of(name)
    for condition, variant in variants.items():
        if arch_meta.get(condition) or (condition == "sigmoid" and is_sigmoid):
            return variant, arch_meta
    return variants[""], arch_meta


def _check_lengths(header: GGUFHeader, prefix: str) -> None:
    """Raise CheckpointError for an array that would take long to read. Real ones are short."""
    for key, value in header.metadata.items():
        if key.startswith(prefix) and not isinstance(value, _SCALARS) and len(value) > _MAX_VALUES:
            raise CheckpointError(
                f"{header.path}: {key[:80]} has {len(value)} values; supported: up to "
                f"{_MAX_VALUES}. Download another file"
            )


def _config(headers: list[GGUFHeader]) -> dict[str, Any]:
    """Return the content of config.json. Raises CheckpointError for unsupported metadata."""
    arch, arch_meta = architecture_of(headers)
    path = headers[0].path
    meta = headers[0].metadata
    tensors = [tensor for header in headers for tensor in header.tensors]
    names = {tensor.name for tensor in tensors}
    _check_keys(path, arch, arch_meta)
    defaults = {"expert_gating_func": 0, "nextn_predict_layers": 0}
    per_layer = Fields(path, arch_meta, defaults | _config_tensors(tensors))
    first = {
        key: value[0]
        for key in arch.per_layer
        if isinstance(value := arch_meta.get(key), list) and value
    }
    values = Fields(path, {**arch_meta, **first}, defaults)
    if values.raw("expert_gating_func") not in (0, arch.gating):
        raise values.error("expert_gating_func", f"{arch.architecture} has {arch.gating}")
    values.only(**{"attention.causal": True})
    for name in (ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG):
        if per_layer.raw(name) and name not in arch.other_keys:
            raise CheckpointError(
                f"{path}: tensor {name!r} is not supported for {arch.architecture}; serve the "
                "model's safetensors checkpoint"
            )
    embedding = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise CheckpointError(
            f"{path}: the tensor 'token_embd.weight' is missing; this is not a language model"
        )
    heads = values.integer("attention.head_count", 1, _MAX_INTEGER)
    config: dict[str, Any] = {**_DEFAULTS, "num_key_value_heads": heads, **arch.defaults}
    for table in (_KEYS, arch.keys):
        config |= {name: arch_meta[key] for key, name in table.items() if key in arch_meta}
    if "attention.kv_lora_rank" in arch_meta:
        config |= _latent_attention(values, arch)
    else:
        config |= _attention(values, arch)
    if "attention_multiplier" in config and config["attention_multiplier"] is None:
        config["attention_multiplier"] = config["head_dim"] ** -0.5
    num_mtp_layers = values.integer("nextn_predict_layers", 0, _MAX_INTEGER)
    config |= {
        "architectures": [arch.architecture],
        "attention_bias": any(re.fullmatch(r"blk\.\d+\.attn_q\.bias", name) for name in names),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "dtype": _dtype(tensors),
        "eos_token_id": end_ids(meta) or None,
        "num_hidden_layers": num_layers(values),
        "num_nextn_predict_layers": num_mtp_layers,
        "rope_factors": per_layer.raw(ROPE_FACTORS),
        "rope_parameters": _rope(values, arch),
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": embedding.shape[0],
    }
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    own = arch.config(per_layer, shapes)
    rope = config["rope_parameters"]
    if "rope_parameters" in own and rope.get("factor", 1) != 1:
        raise values.error(
            "rope.scaling.factor",
            f"{arch.architecture} is supported without scaling; serve the model's safetensors "
            "checkpoint",
        )
    return config | _quantization_config(tensors) | own


def _check_keys(path: Path, arch: GGUFArchitecture, arch_meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError for unknown keys, and for missing keys that no shape can verify."""
    for key in arch_meta:
        tables = (_KEYS, _OTHER_KEYS, arch.keys, arch.rope_keys, arch.other_keys)
        if not any(key in known for known in tables):
            raise CheckpointError(
                f"{path}: the metadata key {key[:80]!r} of its architecture is not known, and may "
                "change what the model computes; serve the model's safetensors checkpoint"
            )
    expert_keys = ["expert_used_count"] if arch_meta.get("expert_count") else []
    if arch_meta.get("expert_group_count") not in (None, 0, 1):
        expert_keys.append("expert_group_used_count")
    for key in (*_REQUIRED, arch.norm_key, *arch.required, *expert_keys):
        if key not in arch_meta:
            raise CheckpointError(
                f"{path}: the metadata key {key!r} of its architecture is missing, and nothing "
                "else in the file has its value; download another file"
            )


def _attention(values: Fields, arch: GGUFArchitecture) -> dict[str, Any]:
    """Return the config of attention with keys and values per head (MHA, GQA)."""
    arch_meta = values.values
    width = values.integer("embedding_length", 1, _MAX_INTEGER)
    heads = values.integer("attention.head_count", 1, _MAX_INTEGER)
    head_dim = width // heads
    if arch_meta.get("attention.key_length"):
        head_dim = values.integer("attention.key_length", 1, _MAX_INTEGER)
    has_other_values = "attention.value_length" in arch.keys
    if not has_other_values and arch_meta.get("attention.value_length", head_dim) != head_dim:
        raise values.error("attention.value_length", f"supported: {head_dim}, the length of keys")
    config: dict[str, Any] = {
        "head_dim": head_dim,
        "partial_rotary_factor": 1.0,  # families have other defaults
        "rope_interleaved_rows": arch.interleaved_rope,
    }
    has_rope = "rope.dimension_count" not in arch.other_keys
    if has_rope and arch_meta.get("rope.dimension_count", head_dim) != head_dim:
        rotary_dim = values.integer("rope.dimension_count", 1, head_dim)
        config["partial_rotary_factor"] = rotated_share(rotary_dim, head_dim)
    return config


def _latent_attention(values: Fields, arch: GGUFArchitecture) -> dict[str, Any]:
    """Return the config of MLA (DeepSeek).

    Older files have the sizes of heads in key_length and value_length; newer ones have them in
    key_length_mla and value_length_mla.
    """
    k_dim, v_dim = (
        values.integer(key + "_mla" if key + "_mla" in values.values else key, 1, _MAX_INTEGER)
        for key in ("attention.key_length", "attention.value_length")
    )
    rotary_dim = values.integer("rope.dimension_count", 2, k_dim)
    groups = 1
    if values.values.get("expert_group_count"):
        groups = values.integer("expert_group_count", 1, _MAX_INTEGER)
    config = {
        "head_dim": None,
        "qk_nope_head_dim": k_dim - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": v_dim,
        "q_lora_rank": values.values.get("attention.q_lora_rank"),
        "n_group": groups,
        "topk_group": values.raw("expert_group_used_count") if groups > 1 else 1,
    }
    if arch.gating == SOFTMAX:
        config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return config


def _rope(values: Fields, arch: GGUFArchitecture) -> dict[str, Any]:
    """Return `rope_parameters`."""
    arch_meta = values.values
    kind = arch_meta.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise values.error("rope.scaling.type", "supported: none, linear, yarn")
    if not arch_meta.get("rope.scaling.factor"):
        kind = "none"
    rope = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": arch_meta.get("rope.freq_base", 10_000.0),
    }
    if kind != "none":
        rope["factor"] = arch_meta["rope.scaling.factor"]
    if kind == "yarn":
        rope["truncate"] = arch.architecture != "GptOssForCausalLM"
        names = {
            "original_context_length": "original_max_position_embeddings",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }
        for key, name in names.items():
            if f"rope.scaling.{key}" in arch_meta:
                rope[name] = arch_meta[f"rope.scaling.{key}"]
        log_multiplier = "rope.scaling.yarn_log_multiplier"
        if arch_meta.get(log_multiplier):  # 0 is none
            # llama.cpp has one value for both; its converter writes 0.1 * mscale_all_dim.
            mscale = round(values.number(log_multiplier, 0, _MAX_MSCALE) * 10, 6)
            rope["mscale"] = mscale
            rope["mscale_all_dim"] = mscale
    own = {name: arch_meta[key] for key, name in arch.rope_keys.items() if key in arch_meta}
    rope = {**rope, **arch.rope_defaults, **own}
    if arch.sliding_rope:
        theta = arch_meta.get(SLIDING_THETA, rope["rope_theta"])
        return {FULL: rope, SLIDING: {"rope_theta": theta}}
    return rope


def _config_tensors(tensors: list[TensorInfo]) -> dict[str, list[float] | None]:
    """Read the tensors whose values are part of the config; None for those that are absent."""
    found = {tensor.name: tensor for tensor in tensors if tensor.name in CONFIG_TENSORS}
    return {name: _floats(found[name]) if name in found else None for name in CONFIG_TENSORS}


def _floats(tensor: TensorInfo) -> list[float]:
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_VALUES:
        raise CheckpointError(
            f"{tensor} is {tensor.dtype} {list(tensor.shape)}; supported: F32 with one dimension "
            f"of up to {_MAX_VALUES}"
        )
    with (
        CheckpointError.instead_of(OSError, f"{tensor.path} cannot be read"),
        tensor.path.open("rb") as file,
    ):
        file.seek(tensor.offset)
        raw = file.read(tensor.num_bytes)
    if len(raw) != tensor.num_bytes:
        raise CheckpointError(f"{tensor} ends early; download the file again")
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def _quantization_config(tensors: list[TensorInfo]) -> dict[str, Any]:
    """Return `quantization_config` with the types of quantized weights, most bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in GGML_FORMATS:
            sizes[tensor.dtype] += tensor.num_bytes
    types = [name for name, _ in sizes.most_common()]
    return {"quantization_config": {"quant_method": "gguf", "types": types}} if types else {}


def _dtype(tensors: list[TensorInfo]) -> str:
    """Return the dtype of most elements, or bfloat16 if most elements are quantized."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += math.prod(tensor.shape)
    return {"F32": "float32", "F16": "float16"}.get(sizes.most_common(1)[0][0], "bfloat16")


def _config_value(value: Any, num_layers: int | None = None) -> Any:
    """Return a metadata value as config.json would have it.

    Floats lose the digits that fp32 adds (0.1, not 0.10000000149). An array of equal numbers, one
    for each of `num_layers`, becomes one number.
    """
    import numpy as np  # slow to import, and not needed by readers of safetensors models

    if isinstance(value, np.ndarray):
        values = [_config_value(item) for item in value.tolist()]
        is_same = isinstance(num_layers, int) and len(values) == num_layers > 0
        return values[0] if is_same and all(item == values[0] for item in values) else values
    if isinstance(value, float) and abs(value) <= np.finfo(np.float32).max:  # not NaN
        return float(str(np.float32(value)))
    return value
