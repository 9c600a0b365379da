"""Families with sliding windows or chunked attention in some layers, and Phi-3.5-MoE."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tests.families import FULL, SLIDING
from tests.gguf_families.group import (
    GLOBAL_NAMES,
    LAYER_NAMES,
    Config,
    Group,
    Tensors,
    renamed,
    rope_freqs,
    rope_of,
    text_metadata,
    with_stacked_experts,
)

_ARCHITECTURES = {
    "gemma4_text": "gemma4",
    "llama4_text": "llama4",
    "phimoe": "phimoe",
    "mimo_v2_flash": "mimo2",
    "step3p5": "step35",
    "afmoe": "afmoe",
    "exaone_moe": "exaone-moe",
    "cohere2_moe": "cohere2moe",
    "mellum": "mellum",
}
_NAMES = {  # what differs from LAYER_NAMES; names with an ending are whole
    "gemma4_text": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "layer_scalar": "layer_output_scale.weight",
    },
    "llama4_text": {
        "feed_forward.router": "ffn_gate_inp",
        **{
            f"feed_forward.{module}{product}_proj": f"ffn_{product}{suffix}"
            for module, suffix in (("", ""), ("experts.", "_exps"), ("shared_expert.", "_shexp"))
            for product in ("gate", "up", "down")
        },
    },
    "phimoe": {
        "block_sparse_moe.gate": "ffn_gate_inp",
        "block_sparse_moe.experts.w1": "ffn_gate_exps",
        "block_sparse_moe.experts.w2": "ffn_down_exps",
        "block_sparse_moe.experts.w3": "ffn_up_exps",
    },
    "mimo_v2_flash": {
        "self_attn.attention_sink_bias": "attn_sinks.weight",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "pre_mlp_layernorm": "ffn_norm",
        "eh_proj": "nextn.eh_proj",
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "final_layernorm": "layer_output_norm",
    },
    "step3p5": {
        "self_attn.g_proj": "attn_gate",
        "moe.gate": "ffn_gate_inp",
        "moe.router_bias": "exp_probs_b.bias",
        "eh_proj": "nextn.eh_proj",
        **{f"moe.{product}_proj": f"ffn_{product}_exps" for product in ("gate", "up", "down")},
        **{
            f"share_expert.{product}_proj": f"ffn_{product}_shexp"
            for product in ("gate", "up", "down")
        },
    },
    "afmoe": {
        "self_attn.gate_proj": "attn_gate",
        "post_attention_layernorm": "post_attention_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.router.gate": "ffn_gate_inp",
        "mlp.expert_bias": "exp_probs_b.bias",
    },
    "exaone_moe": {
        "mlp.e_score_correction_bias": "exp_probs_b.bias",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "eh_proj": "nextn.eh_proj",
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "shared_head.norm": "nextn.shared_head_norm",
    },
    "cohere2_moe": {},
    "mellum": {},
}
_NUM_MIMO_MTP_LAYERS = 3  # llama.cpp's converter writes it for all models


def _slides(config: Config) -> list[bool]:
    return [kind == SLIDING for kind in config["layer_types"]]


def _gemma4(config: Config) -> dict[str, Any]:
    full = config["layer_types"].index(FULL)
    per_layer_config = config.get("per_layer_config") or {}  # keys may be "05"
    own: Config = next((value for key, value in per_layer_config.items() if int(key) == full), {})
    head = own.get("head_dim") or config["global_head_dim"]
    heads = own.get("num_key_value_heads") or config["num_key_value_heads"]
    per_layer = [config["num_key_value_heads"] if slides else heads for slides in _slides(config)]
    cap = config["final_logit_softcapping"]
    return {
        **text_metadata(config),
        "attention.head_count_kv": per_layer,
        "attention.key_length": head,
        "attention.key_length_swa": config["head_dim"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": _slides(config),
        "attention.value_length": head,
        "attention.value_length_swa": config["head_dim"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "rope.dimension_count": head,
        "rope.dimension_count_swa": config["head_dim"],
        **({"final_logit_softcapping": cap} if cap else {}),
    }


def _llama4(config: Config) -> dict[str, Any]:
    return {
        **text_metadata(config),
        "expert_feed_forward_length": config["intermediate_size"],
        "feed_forward_length": config["intermediate_size_mlp"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }


def _phimoe(config: Config) -> dict[str, Any]:
    rope = rope_of(config)
    head = config["hidden_size"] // config["num_attention_heads"]
    long_context = {}
    if rope["rope_type"] == "longrope":
        long_context = {"rope.scaling.attn_factor": _attention_factor(config)}
    return {
        **text_metadata(config),
        "attention.sliding_window": config["sliding_window"] or 0,
        "rope.dimension_count": head,
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.type": None,
        **long_context,
    }


def _attention_factor(config: Config) -> float:
    """Return LongRoPE's factor of attention scores, as the converter computes it."""
    original = rope_of(config)["original_max_position_embeddings"]
    scale = config["max_position_embeddings"] / original
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def _mimo2(config: Config) -> dict[str, Any]:
    slides = [*config["hybrid_layer_pattern"], *[1] * _NUM_MIMO_MTP_LAYERS]
    heads = (config["num_key_value_heads"], config["swa_num_key_value_heads"])
    return {
        **text_metadata(config, _NUM_MIMO_MTP_LAYERS),
        "attention.head_count_kv": [heads[number] for number in slides],
        "attention.layer_norm_rms_epsilon": config["layernorm_epsilon"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "nextn_predict_layers": _NUM_MIMO_MTP_LAYERS,
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.freq_base_swa": config["swa_rope_theta"],
    }


def _step35(config: Config) -> dict[str, Any]:
    num_mtp = config["num_nextn_predict_layers"]
    other = config["attention_other_setting"]
    slides = _slides(config)
    heads = (config["num_attention_heads"], other["num_attention_heads"])
    kv_heads = (config["num_attention_groups"], other["num_attention_groups"])
    full_theta, sliding_theta = config["rope_theta"][:2]
    return {
        **text_metadata(config | {"rope_theta": full_theta}, num_mtp),
        "attention.head_count": [heads[each] for each in slides],
        "attention.head_count_kv": [kv_heads[each] for each in slides],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "expert_count": config["moe_num_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["share_expert_dim"],
        "expert_used_count": config["moe_top_k"],
        "expert_weights_norm": config["norm_expert_weight"],
        "expert_weights_scale": config["moe_router_scaling_factor"],
        "leading_dense_block_count": int(config["moe_layers_enum"].split(",")[0]),
        "moe_every_n_layers": 1,
        "nextn_predict_layers": num_mtp,
        "rope.freq_base_swa": float(sliding_theta),
        "swiglu_clamp_exp": config["swiglu_limits"],
        "swiglu_clamp_shexp": config["swiglu_limits_shared"],
    }


def _afmoe(config: Config) -> dict[str, Any]:
    return {
        **text_metadata(config),
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_norm": config["route_norm"],
        "expert_weights_scale": config["route_scale"],
        "leading_dense_block_count": config["num_dense_layers"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }


def _exaone_moe(config: Config) -> dict[str, Any]:
    num_mtp = config["num_nextn_predict_layers"]
    count = config["num_shared_experts"]
    return {
        **text_metadata(config, num_mtp),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": _slides(config),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": count,
        "expert_shared_feed_forward_length": count * config["moe_intermediate_size"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "leading_dense_block_count": config.get("first_k_dense_replace", 0),
        "nextn_predict_layers": num_mtp,
        "rope.scaling.type": "none",
        "vocab_size": config["vocab_size"],
    }


def _cohere2moe(config: Config) -> dict[str, Any]:
    size = config["intermediate_size"]
    return {
        **text_metadata(config),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": _slides(config),
        "expert_feed_forward_length": size,
        "expert_shared_count": config["num_shared_experts"],
        "expert_shared_feed_forward_length": config["num_shared_experts"] * size,
        "expert_weights_norm": config["norm_topk_prob"],
        "leading_dense_block_count": config["mlp_layer_types"].index("sparse"),
        "logit_scale": config["logit_scale"],
        "rope.dimension_count": config["head_dim"],
        "rope.scaling.type": "none",
        "vocab_size": config["vocab_size"],
    }


def _mellum(config: Config) -> dict[str, Any]:
    return {
        **text_metadata(config),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": _slides(config),
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }


_METADATA = {
    "gemma4_text": _gemma4,
    "llama4_text": _llama4,
    "phimoe": _phimoe,
    "mimo_v2_flash": _mimo2,
    "step3p5": _step35,
    "afmoe": _afmoe,
    "exaone_moe": _exaone_moe,
    "cohere2_moe": _cohere2moe,
    "mellum": _mellum,
}


def _metadata(family: str, config: Config) -> dict[str, Any]:
    return _METADATA[family](config)


def _tensors(family: str, config: Config, tensors: Tensors) -> Tensors:
    if family == "llama4_text":  # experts are transposed
        tensors = {
            name: tensor.mT if ".experts." in name else tensor for name, tensor in tensors.items()
        }
    if family != "gemma4_text":  # gates and ups stay in one tensor
        tensors = with_stacked_experts(tensors)
    tensors = _with_mtp_layers(family, config, tensors)
    if family == "step3p5":
        tensors = {
            name: tensor + 1.0 if name.endswith("norm.weight") else tensor
            for name, tensor in tensors.items()
        }
    found = renamed(tensors, LAYER_NAMES | _NAMES[family], GLOBAL_NAMES)
    return found | _rope_tensors(family, config)


def _with_mtp_layers(family: str, config: Config, tensors: Tensors) -> Tensors:
    """Return the tensors with MTP layers as layers after those of the decoder."""
    count = config["num_hidden_layers"]
    layers = {"mimo_v2_flash": "model.mtp.layers.", "exaone_moe": "mtp.layers."}
    outside = {
        "mtp.fc": "eh_proj",
        "mtp.pre_fc_norm_embedding": "enorm",
        "mtp.pre_fc_norm_hidden": "hnorm",
        "mtp.norm": "shared_head.norm",
    }
    found = {}
    for name, tensor in tensors.items():
        if family in layers and name.startswith(layers[family]):
            number, _, rest = name.removeprefix(layers[family]).partition(".")
            found[f"model.layers.{count + int(number)}.{rest}"] = tensor
        elif (base := name.rpartition(".")[0]) in outside:
            if family == "exaone_moe":
                for i in range(config["num_nextn_predict_layers"]):
                    found[f"model.layers.{count + i}.{outside[base]}.weight"] = tensor
        else:
            found[name] = tensor
    return found


def _rope_tensors(family: str, config: Config) -> Tensors:
    """Return the tensors with factors of rotary wavelengths."""
    rope = rope_of(config)
    kind = rope.get("rope_type")
    if family == "gemma4_text":
        size = _gemma4(config)["attention.key_length"]
        rotated = int(size * rope["partial_rotary_factor"] / 2)
        numbers = [1.0] * rotated + [1e30] * (size // 2 - rotated)
        return {"rope_freqs.weight": torch.tensor(numbers, dtype=torch.float32)}
    if kind == "longrope":
        return {
            f"rope_factors_{which}.weight": torch.tensor(rope[f"{which}_factor"])
            for which in ("short", "long")
        }
    if kind != "llama3":
        return {}
    size = config["head_dim"]
    if family != "step3p5":
        return {"rope_freqs.weight": rope_freqs(rope, size)}
    # Half of a head is rotated in layers with full attention.
    rope["rope_theta"] = config["rope_theta"][0]
    factors = rope_freqs(rope, size // 2, computed_in=torch.float64)
    return {"rope_freqs.weight": torch.cat((factors, torch.ones(size // 2 - len(factors))))}


def _longrope(max_position: int, original: int) -> Config:
    """Return options of Phi-3.5-MoE with the factor of attention scores that its file will have."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": original}
    options = {"max_position_embeddings": max_position, "rope_parameters": rope}
    factor = float(str(np.float32(_attention_factor(options))))
    rope |= {
        "rope_theta": 1e4,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
        "short_mscale": factor,
        "long_mscale": factor,
    }
    return options


_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
GROUP = Group(
    _ARCHITECTURES,
    _metadata,
    _tensors,
    {
        # Factors of Llama 3.1 are rounded to fp32 in files; test_gguf.py has a test of them.
        "llama4_text": {
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "rope_parameters": _PLAIN_ROPE,
        },
        "afmoe": {"route_norm": True, "score_func": "sigmoid"},  # as published
        "step3p5": {
            "rope_parameters": {
                kind: {**_PLAIN_ROPE, "partial_rotary_factor": share, "rope_theta": theta}
                for kind, share, theta in ((FULL, 0.5, 5e5), (SLIDING, 1.0, 1e4))
            }
        },
        "exaone_moe": {"num_nextn_predict_layers": 1},  # as published
        "phimoe": {"router_jitter_noise": 0.01, **_longrope(1024, 64)},
    },
)
