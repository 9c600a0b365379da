"""The model families: what is special about each config.json, and what holds where it is silent.

The defaults are those of the families' configuration classes in transformers 5; the sources of the architectures are
named beside them. To add a family: one `_name(config, num_layers)` and one row in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.spec import RouterSpec

MAX_LAYERS = 1000
MAX_WIDTH = 2**20
MAX_POSITION = 2**27
_MAX_EXPERTS = 4096
_MAX_MULTIPLIER = 1e6


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. `special(config, number of layers)` gives the fields of ModelSpec that not all families share;
    `defaults` are the values where config.json is silent."""

    model_type: str
    special: Callable[[Fields, int], dict[str, Any]]
    defaults: dict[str, Any]


def _experts(config: Fields, size_key: str) -> dict[str, Any]:
    keys = [key for key in ("num_experts", "num_local_experts") if key in config.values]
    if len(keys) == 2 and config.values[keys[0]] != config.values[keys[1]]:
        raise config.error(keys[0], f"but {keys[1]} is {config.values[keys[1]]!r}; remove one of the two")
    num_experts = config.integer(keys[0] if keys else "num_experts", 1, _MAX_EXPERTS)
    return {
        "num_experts": num_experts,
        "experts_per_token": config.integer("num_experts_per_tok", 1, num_experts),
        "expert_size": config.integer(size_key, 1, MAX_WIDTH),
    }


def _every_layer_moe(config: Fields, num_layers: int) -> dict[str, Any]:
    return {"moe_layers": (True,) * num_layers, **_experts(config, "intermediate_size")}


def _every_layer_dense(config: Fields, num_layers: int) -> dict[str, Any]:
    return {
        "moe_layers": (False,) * num_layers,
        "intermediate_size": config.integer("intermediate_size", 1, MAX_WIDTH),
    }


def _some_layers_moe(config: Fields, num_layers: int) -> dict[str, Any]:
    """Qwen: every `decoder_sparse_step`-th layer except `mlp_only_layers` has experts, the others a dense MLP."""
    step = config.integer("decoder_sparse_step", 1, MAX_LAYERS)
    dense = set(config.integers("mlp_only_layers", 0, num_layers - 1))
    return {
        "moe_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        "intermediate_size": config.integer("intermediate_size", 1, MAX_WIDTH),
        **_experts(config, "moe_intermediate_size"),
    }


def _same_window(config: Fields, num_layers: int, window: int | None) -> dict[str, Any]:
    """All layers alike. A config that names other kinds of layers means a model that we do not compute."""
    types = config.values.get("layer_types")
    if types is not None and types != ["full_attention"] * num_layers:
        raise config.error("layer_types", "this architecture has one kind of attention; remove this key")
    return {"windows": (window,) * num_layers}


def _no_window(config: Fields, num_layers: int) -> dict[str, Any]:
    config.unsupported("sliding_window", "this architecture has no sliding window; set it to null")
    return _same_window(config, num_layers, None)


def _window_per_layer(config: Fields, num_layers: int, slides: Callable[[int, int], bool]) -> dict[str, Any]:
    """Qwen: `layer_types` says which layers slide; without it `slides(layer, max_window_layers)` does."""
    window = _switched_window(config)
    types = config.raw("layer_types")
    if types is None:
        first_or_last = config.integer("max_window_layers", 0, 2**31)
        sliding = [window is not None and slides(i, first_or_last) for i in range(num_layers)]
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
            raise config.error("layer_types", f"it must list one of {', '.join(known)} for each of {num_layers} layers")
        sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and window is None:
        raise config.error("layer_types", "sliding layers need use_sliding_window true and a sliding_window")
    return {"windows": tuple(window if slides_here else None for slides_here in sliding)}


def _switched_window(config: Fields) -> int | None:
    if not config.boolean("use_sliding_window"):
        return None
    return config.optional_integer("sliding_window", 1, MAX_POSITION)


def _bias(config: Fields) -> dict[str, Any]:
    bias = config.boolean("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias}


def _softmax_router(config: Fields) -> RouterSpec:
    return RouterSpec(renormalize=config.boolean("norm_topk_prob"))


def _qwen3_moe(config: Fields, num_layers: int) -> dict[str, Any]:
    return {
        **_some_layers_moe(config, num_layers),
        **_same_window(config, num_layers, _switched_window(config)),
        **_bias(config),
        "qk_norm": "head",
        "router": _softmax_router(config),
    }


def _qwen2_moe(config: Fields, num_layers: int) -> dict[str, Any]:
    return {
        **_some_layers_moe(config, num_layers),
        **_window_per_layer(config, num_layers, lambda layer, limit: layer % 2 == 0 and layer < limit),
        "qkv_bias": config.boolean("qkv_bias"),
        "shared_expert_size": config.integer("shared_expert_intermediate_size", 1, MAX_WIDTH),
        "router": _softmax_router(config),
    }


def _mixtral(config: Fields, num_layers: int) -> dict[str, Any]:
    window = config.optional_integer("sliding_window", 1, MAX_POSITION)
    return {
        **_every_layer_moe(config, num_layers),
        **_same_window(config, num_layers, window),
        "router": RouterSpec(renormalize=True),
    }


def _olmoe(config: Fields, num_layers: int) -> dict[str, Any]:
    return {
        **_every_layer_moe(config, num_layers),
        **_no_window(config, num_layers),
        **_bias(config),
        "clip_qkv": config.optional_number("clip_qkv", 0, _MAX_MULTIPLIER),
        "qk_norm": "full",
        "router": _softmax_router(config),
    }


def _granite_moe(config: Fields, num_layers: int) -> dict[str, Any]:
    return {
        **_every_layer_moe(config, num_layers),
        **_no_window(config, num_layers),
        **_bias(config),
        "attention_scale": config.number("attention_multiplier", 0, _MAX_MULTIPLIER),
        "embedding_scale": config.number("embedding_multiplier", 0, _MAX_MULTIPLIER),
        "residual_scale": config.number("residual_multiplier", 0, _MAX_MULTIPLIER),
        "logits_divisor": config.number("logits_scaling", 0, _MAX_MULTIPLIER),
        "router": RouterSpec(score="softmax_selected"),
    }


def _llama(config: Fields, num_layers: int) -> dict[str, Any]:
    return {
        **_every_layer_dense(config, num_layers),
        **_no_window(config, num_layers),
        **_bias(config),
        "mlp_bias": config.boolean("mlp_bias"),
    }


def _qwen3(config: Fields, num_layers: int) -> dict[str, Any]:
    return {
        **_every_layer_dense(config, num_layers),
        **_window_per_layer(config, num_layers, lambda layer, limit: layer >= limit),
        **_bias(config),
        "qk_norm": "head",
    }


COMMON_DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "eos_token_id": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


def _sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None, positions: int
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096}

FAMILIES: dict[str, Family] = {
    "Qwen3MoeForCausalLM": Family(  # arXiv 2505.09388
        "qwen3_moe",
        _qwen3_moe,
        _sizes(151936, 2048, 6144, 24, 32, 4, 32768)
        | _QWEN_WINDOWS
        | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "Qwen2MoeForCausalLM": Family(  # arXiv 2407.10671
        "qwen2_moe",
        _qwen2_moe,
        _sizes(151936, 2048, 5632, 24, 16, 16, 32768)
        | _QWEN_WINDOWS
        | {
            "decoder_sparse_step": 1,
            "layer_types": None,
            "max_window_layers": 28,
            "mlp_only_layers": None,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "qkv_bias": True,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "MixtralForCausalLM": Family(  # arXiv 2401.04088
        "mixtral",
        _mixtral,
        _sizes(32000, 4096, 14336, 32, 32, 8, 131072)
        | {
            "eos_token_id": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
        },
    ),
    "OlmoeForCausalLM": Family(  # arXiv 2409.02060
        "olmoe",
        _olmoe,
        _sizes(50304, 2048, 2048, 16, 16, None, 4096)
        | {
            "clip_qkv": None,
            "eos_token_id": 50279,
            "norm_topk_prob": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
        },
    ),
    "GraniteMoeForCausalLM": Family(  # arXiv 2408.13359
        "granitemoe",
        _granite_moe,
        _sizes(32000, 4096, 11008, 32, 32, None, 2048)
        | {
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "eos_token_id": 2,
            "logits_scaling": 1.0,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "residual_multiplier": 1.0,
        },
    ),
    "LlamaForCausalLM": Family(  # arXiv 2302.13971, 2407.21783
        "llama",
        _llama,
        _sizes(32000, 4096, 11008, 32, 32, None, 2048) | {"eos_token_id": 2, "mlp_bias": False},
    ),
    "Qwen3ForCausalLM": Family(  # arXiv 2505.09388
        "qwen3",
        _qwen3,
        _sizes(151936, 4096, 22016, 32, 32, 32, 32768)
        | _QWEN_WINDOWS
        | {"head_dim": 128, "layer_types": None, "max_window_layers": 28},
    ),
}
