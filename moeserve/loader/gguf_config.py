"""Translates GGUF files to Hugging Face checkpoints: metadata to config.json, and tensor names.

llama.cpp's converters write keys such as `ARCHITECTURE.block_count`. `_VARIANTS` describes what
llama.cpp computes for each architecture beyond these keys. An unknown key of the architecture is
rejected, because it may change the results.
"""

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError
from moeserve.loader.fields import Fields
from moeserve.loader.gguf_file import GGUFHeader, read_model
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import StoredWeight
from moeserve.loader.stored_format import GGML_FORMATS

# Values of expert_gating_func, the router's scoring function
_SOFTMAX = 1
_SIGMOID = 2
_SOFTMAX_OF_SELECTED = 3  # softmax over the logits of the selected experts only
_MAX_INTEGER = 2**31
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
    "attention.layer_norm_rms_epsilon",
    "block_count",
    "context_length",
    "embedding_length",
)
# config.json key -> llama.cpp's default if the file omits it
_DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "sliding_window": None,
}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's scale factor of each rotary wavelength
_SAMPLING = {  # key of generation_config.json -> GGUF key, after "general.sampling."
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# Tokens that end an answer if the vocabulary has them, as in llama.cpp
_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
)


@dataclass(frozen=True, slots=True)
class _Variant:
    """A GGUF architecture, or a variant of it, and the Hugging Face model that it stands for."""

    architecture: str  # in config.json
    keys: Mapping[str, str] = field(default_factory=dict)  # in addition to `_KEYS`
    defaults: Mapping[str, Any] = field(default_factory=dict)  # in addition to `_DEFAULTS`
    required: tuple[str, ...] = ()  # in addition to `_REQUIRED`
    gating: int = _SOFTMAX  # the router's scoring function
    shared: str = "mlp.shared_experts"  # the module of shared experts
    # The converter reordered the rows of q and k: the two rows of a rotary pair are adjacent.
    interleaved_rope: bool = False


_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
_SHARED_SIZE = "expert_shared_feed_forward_length"
_GRANITE_VARIANT = _Variant(
    "GraniteMoeForCausalLM",
    keys=_GRANITE,
    defaults={
        "attention_multiplier": None,  # 1 / sqrt(head_dim)
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
    },
    required=("logit_scale",),
    interleaved_rope=True,
)
# GGUF architecture -> condition -> variant. The first condition that holds decides: a metadata key
# that is present and not 0, or "sigmoid" (the router's scores); "" always holds.
_VARIANTS: dict[str, dict[str, _Variant]] = {
    "deepseek2": {
        "sigmoid": _Variant("DeepseekV3ForCausalLM", gating=_SIGMOID),
        "": _Variant("DeepseekV2ForCausalLM"),
    },
    "dots1": {"": _Variant("Dots1ForCausalLM", gating=_SIGMOID)},
    "glm4moe": {"": _Variant("Glm4MoeForCausalLM", gating=_SIGMOID)},
    "gpt-oss": {
        "": _Variant(
            "GptOssForCausalLM",
            keys={"expert_feed_forward_length": "intermediate_size"},
            required=("attention.sliding_window",),
            gating=_SOFTMAX_OF_SELECTED,
        )
    },
    "granitemoe": {
        _SHARED_SIZE: replace(
            _GRANITE_VARIANT,
            architecture="GraniteMoeSharedForCausalLM",
            keys=_GRANITE | {_SHARED_SIZE: "shared_intermediate_size"},
            shared="shared_mlp",
        ),
        "": _GRANITE_VARIANT,
    },
    "llama": {
        "expert_count": _Variant("MixtralForCausalLM", interleaved_rope=True),
        "": _Variant("LlamaForCausalLM", interleaved_rope=True),
    },
    "minimax-m2": {
        "": _Variant(
            "MiniMaxM2ForCausalLM",
            keys={"expert_feed_forward_length": "intermediate_size"},
            gating=_SIGMOID,
        )
    },
    "olmoe": {"": _Variant("OlmoeForCausalLM", keys={"attention.clamp_kqv": "clip_qkv"})},
    "qwen2": {"": _Variant("Qwen2ForCausalLM")},
    "qwen2moe": {
        "": _Variant(
            "Qwen2MoeForCausalLM",
            keys={_SHARED_SIZE: "shared_expert_intermediate_size"},
            shared="mlp.shared_expert",
        )
    },
    "qwen3": {"": _Variant("Qwen3ForCausalLM")},
    "qwen3moe": {"": _Variant("Qwen3MoeForCausalLM", defaults={"norm_topk_prob": True})},
}
ARCHITECTURES = tuple(_VARIANTS)

# GGUF name -> Hugging Face name, outside of layers
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# GGUF name -> Hugging Face name, within a layer
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+)\.(weight|bias)")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_(exps|shexp)")


def gguf_tensors(path: Path) -> tuple[dict[str, TensorInfo], dict[str, StoredWeight]]:
    """Return a model's tensors by their Hugging Face names, and the quantized ones among them."""
    headers = read_model(path)
    shared = _variant(headers)[0].shared
    tensors = {}
    outer_scales = {}  # by name of the weight that they multiply
    for tensor in (tensor for header in headers for tensor in header.tensors):
        if tensor.name == _ROPE_FACTORS:
            continue  # part of the config
        if tensor.name.endswith(".scale"):
            weight = tensor.name.removesuffix(".scale") + ".weight"
            outer_scales[_hugging_face_name(weight, shared)] = tensor
            continue
        name = _hugging_face_name(tensor.name, shared)
        shape = tensor.shape
        if name in tensors:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} is in two files, or under two names in one"
            )
        if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)
        tensors[name] = replace(tensor, name=name, shape=shape)
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding and embedding.dtype in GGML_FORMATS:
        # A tied LM head stays quantized, while the embedding table is dequantized.
        tensors.setdefault("lm_head.weight", replace(embedding, name="lm_head.weight"))
    stored = {}
    for name, tensor in tensors.items():
        if form := GGML_FORMATS.get(tensor.dtype):
            # One tensor has both: each block of values begins or ends with its scales.
            stored[name] = StoredWeight(form, values=tensor, scales=tensor)
    for name, scale in outer_scales.items():
        stored[name] = _with_outer_scale(path, stored.get(name), scale)
    return tensors, stored


def _with_outer_scale(path: Path, stored: StoredWeight | None, scale: TensorInfo) -> StoredWeight:
    """Add the tensor that multiplies an NVFP4 weight: one number, or one for each expert."""
    is_supported = stored is not None and stored.format.ggml == "NVFP4"
    if stored is not None and is_supported:
        shape = stored.values.shape
        sizes = (1, shape[0]) if len(shape) == 3 else (1,)
        is_supported = math.prod(scale.shape) in sizes
    if stored is None or not is_supported:
        raise CheckpointError(
            f"{path}: tensor {scale.name!r} of shape {list(scale.shape)} is not supported: only "
            "NVFP4 weights have scales beside them, one each or one for each expert"
        )
    return replace(stored, format=replace(stored.format, scales="F32"), outer_scale=scale)


def _hugging_face_name(name: str, shared: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names are unchanged.

    shared: the module of shared experts.
    """
    if (block := _BLOCK.fullmatch(name)) is None:
        base, _, ending = name.rpartition(".")
        return f"{_GLOBAL_NAMES[base]}.{ending}" if base in _GLOBAL_NAMES else name
    layer, base, ending = block.groups()
    if experts := _EXPERTS.fullmatch(base):
        product = f"{experts[1]}_proj"
        if experts[2] == "shexp":
            new_name = f"{shared}.{product}.{ending}"
        else:
            suffix = "_bias" if ending == "bias" else ""
            new_name = f"mlp.experts.{product}{suffix}"
    elif base == "exp_probs_b":
        new_name = "mlp.gate.e_score_correction_bias"
    elif base == "attn_sinks":
        new_name = "self_attn.sinks"
    elif base in _LAYER_NAMES:
        new_name = f"{_LAYER_NAMES[base]}.{ending}"
    else:
        return name
    return f"model.layers.{layer}.{new_name}"


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
    return _tokenizer_config(meta) if name == "tokenizer_config.json" else {}


def _tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    config = {}
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    tokens = meta.get("tokenizer.ggml.tokens", [])
    for key, name in {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}.items():
        number = meta.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    return config


def _variant(headers: list[GGUFHeader]) -> tuple[_Variant, dict[str, Any]]:
    """Return the architecture's variant, and the metadata whose keys begin with "ARCHITECTURE.".

    The returned keys are without this prefix.

    Raises CheckpointError for an unsupported architecture.
    """
    header = headers[0]
    name = header.metadata.get("general.architecture")
    if name not in _VARIANTS:
        shown = repr(name)[:80]
        raise CheckpointError(
            f"{header.path}: general.architecture is {shown}; supported as GGUF: "
            f"{', '.join(_VARIANTS)}. Serve the model's safetensors checkpoint if docs/models.md "
            "lists it"
        )
    prefix = f"{name}."
    arch_meta = {
        key.removeprefix(prefix): _config_value(value)
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    is_sigmoid = arch_meta.get("expert_gating_func") == _SIGMOID
    if not arch_meta.get("expert_gating_func"):
        # Converters write the key only if config.json has it. Of the supported architectures with
        # several variants, only those with sigmoid scores have a bias of the scores.
        tensor_names = (tensor.name for each in headers for tensor in each.tensors)
        is_sigmoid = any(".exp_probs_b" in tensor_name for tensor_name in tensor_names)
    for condition, variant in _VARIANTS[name].items():
        if arch_meta.get(condition) or (condition == "sigmoid" and is_sigmoid):
            return variant, arch_meta
    return _VARIANTS[name][""], arch_meta


def _config(headers: list[GGUFHeader]) -> dict[str, Any]:
    """Return the content of config.json. Raises CheckpointError for unsupported metadata."""
    variant, arch_meta = _variant(headers)
    path = headers[0].path
    meta = headers[0].metadata
    tensors = [tensor for header in headers for tensor in header.tensors]
    names = {tensor.name for tensor in tensors}
    _check_keys(path, variant, arch_meta)
    values = Fields(path, arch_meta, {"expert_gating_func": 0, "nextn_predict_layers": 0})
    if values.raw("expert_gating_func") not in (0, variant.gating):
        raise values.error("expert_gating_func", f"{variant.architecture} has {variant.gating}")
    values.only(**{"attention.causal": True})
    embedding = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise CheckpointError(
            f"{path}: the tensor 'token_embd.weight' is missing; this is not a language model"
        )
    heads = values.integer("attention.head_count", 1, _MAX_INTEGER)
    config: dict[str, Any] = {**_DEFAULTS, "num_key_value_heads": heads, **variant.defaults}
    for table in (_KEYS, variant.keys):
        config |= {name: arch_meta[key] for key, name in table.items() if key in arch_meta}
    if "attention.kv_lora_rank" in arch_meta:
        config |= _latent_attention(values, variant)
    else:
        config |= _attention(values, variant)
    if "attention_multiplier" in config and config["attention_multiplier"] is None:
        config["attention_multiplier"] = config["head_dim"] ** -0.5
    num_mtp_layers = values.integer("nextn_predict_layers", 0, _MAX_INTEGER)
    config |= {
        "architectures": [variant.architecture],
        "attention_bias": any(re.fullmatch(r"blk\.\d+\.attn_q\.bias", name) for name in names),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "dtype": _dtype(tensors),
        "eos_token_id": _end_ids(meta) or None,
        "num_hidden_layers": values.integer("block_count", 1, _MAX_INTEGER) - num_mtp_layers,
        "num_nextn_predict_layers": num_mtp_layers,
        "rope_factors": _rope_factors(tensors),
        "rope_parameters": _rope(values, variant),
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": embedding.shape[0],
    }
    return config | _quantization_config(tensors)


def _check_keys(path: Path, variant: _Variant, arch_meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError for unknown keys, and for missing keys that no shape can verify."""
    for key in arch_meta:
        if not any(key in known for known in (_KEYS, variant.keys, _OTHER_KEYS)):
            raise CheckpointError(
                f"{path}: the metadata key {key[:80]!r} of its architecture is not known, and may "
                "change what the model computes; serve the model's safetensors checkpoint"
            )
    expert_keys = ("expert_used_count",) if arch_meta.get("expert_count") else ()
    for key in (*_REQUIRED, *variant.required, *expert_keys):
        if key not in arch_meta:
            raise CheckpointError(
                f"{path}: the metadata key {key!r} of its architecture is missing, and nothing "
                "else in the file has its value; download another file"
            )


def _attention(values: Fields, variant: _Variant) -> dict[str, Any]:
    """Return the config of attention with keys and values per head (MHA, GQA)."""
    arch_meta = values.values
    width = values.integer("embedding_length", 1, _MAX_INTEGER)
    heads = values.integer("attention.head_count", 1, _MAX_INTEGER)
    head_dim = arch_meta.get("attention.key_length") or width // heads
    if arch_meta.get("attention.value_length", head_dim) != head_dim:
        raise values.error("attention.value_length", f"supported: {head_dim}, the length of keys")
    config = {"head_dim": head_dim, "rope_interleaved_rows": variant.interleaved_rope}
    rotary_dim = arch_meta.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    return config


def _latent_attention(values: Fields, variant: _Variant) -> dict[str, Any]:
    """Return the config of MLA (DeepSeek).

    Older files have the sizes of heads in key_length and value_length; newer ones have them in
    key_length_mla and value_length_mla.
    """
    k_dim, v_dim = (
        values.integer(key + "_mla" if key + "_mla" in values.values else key, 1, _MAX_INTEGER)
        for key in ("attention.key_length", "attention.value_length")
    )
    rotary_dim = values.integer("rope.dimension_count", 2, k_dim)
    groups = values.values.get("expert_group_count") or 1
    config = {
        "head_dim": None,
        "qk_nope_head_dim": k_dim - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": v_dim,
        "q_lora_rank": values.values.get("attention.q_lora_rank"),
        "n_group": groups,
        "topk_group": values.values.get("expert_group_used_count") or 1,
    }
    if variant.gating == _SOFTMAX:
        config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return config


def _rope(values: Fields, variant: _Variant) -> dict[str, Any]:
    """Return `rope_parameters`."""
    arch_meta = values.values
    kind = arch_meta.get(
        "rope.scaling.type", "linear" if arch_meta.get("rope.scaling.factor") else "none"
    )
    if kind not in ("none", "linear", "yarn"):
        raise values.error("rope.scaling.type", "supported: none, linear, yarn")
    rope = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": arch_meta.get("rope.freq_base", 10_000.0),
    }
    if kind != "none":
        rope["factor"] = arch_meta.get("rope.scaling.factor")
    if kind == "yarn":
        rope["truncate"] = variant.architecture != "GptOssForCausalLM"
        names = {
            "original_context_length": "original_max_position_embeddings",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }
        for key, name in names.items():
            if f"rope.scaling.{key}" in arch_meta:
                rope[name] = arch_meta[f"rope.scaling.{key}"]
        if "rope.scaling.yarn_log_multiplier" in arch_meta:
            # llama.cpp has one value for both; its converter writes 0.1 * mscale_all_dim.
            mscale = round(arch_meta["rope.scaling.yarn_log_multiplier"] * 10, 6)
            rope["mscale"] = mscale
            rope["mscale_all_dim"] = mscale
    return rope


def _rope_factors(tensors: list[TensorInfo]) -> list[float] | None:
    """Read the scale factor of each rotary wavelength; None if the file has none."""
    tensor = next((tensor for tensor in tensors if tensor.name == _ROPE_FACTORS), None)
    if tensor is None:
        return None
    if tensor.dtype != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(
            f"{tensor} is {tensor.dtype} {list(tensor.shape)}; supported: F32 with one dimension"
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


def _end_ids(meta: Mapping[str, Any]) -> list[int]:
    """Return the ids of tokens that end an answer: those in the metadata, and `_END_TOKENS`."""
    ids = (meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    tokens = meta.get("tokenizer.ggml.tokens", [])
    known = (tokens.index(token) for token in _END_TOKENS if token in tokens)
    return [*(number for number in ids if isinstance(number, int)), *known]


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


def _config_value(value: Any) -> Any:
    """Return a metadata value as config.json would have it.

    Floats lose the digits that fp32 adds (0.1, not 0.10000000149). An array of equal numbers (one
    per layer) becomes one number.
    """
    import numpy as np  # slow to import, and not needed by readers of safetensors models

    if isinstance(value, np.ndarray):
        value = value.tolist()
        return value[0] if value and all(item == value[0] for item in value) else value
    return (
        float(str(np.float32(value)))
        if isinstance(value, float) and math.isfinite(value)
        else value
    )
