"""DeepSeek, Mistral 4, GLM, Ling, ERNIE and Hunyuan."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.families import YARN
from tests.gguf_families.group import (
    LAYER_NAMES,
    Config,
    Group,
    Tensors,
    renamed,
    rope_of,
    text_metadata,
    with_stacked_experts,
)

_LATENT = ("deepseek2", "deepseek32", "glm-dsa", "mistral4")
_WITH_MTP = ("deepseek32", "glm-dsa", "glm4moe", "bailingmoe2")  # converters that keep MTP layers
_ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v32": "deepseek32",
    "kimi_k25": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "glm_moe_dsa": "glm-dsa",
    "mistral3": "mistral4",
    "mistral4": "deepseek2",  # Mistral-Large-3, whose checkpoint has Mistral's own format
    "glm4_moe": "glm4moe",
    "glm4v_moe": "glm4moe",
    "solar_open": "glm4moe",
    "bailing_moe": "bailingmoe2",
    "sarvam_moe": "bailingmoe2",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "hy_v3": "hy_v3",
}
_OPTIONS: dict[str, Config] = {
    "deepseek_v2": {"rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.9}},
    "deepseek_v32": {"num_nextn_predict_layers": 1},
    "glm_moe_dsa": {"num_nextn_predict_layers": 1},
    # The converter's default is a half.
    "solar_open": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 1.0,
        }
    },
    # Keys that only published files have, and sizes that the converter requires.
    "hunyuan_v1_moe": {
        "hidden_size": 512,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": [96, 96],
        "moe_topk": [3, 3],
        "num_shared_expert": [1, 1],
    },
}
_LAYER_NAMES = {
    **LAYER_NAMES,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "eh_proj": "nextn.eh_proj",
    "embed_tokens": "nextn.embed_tokens",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.head": "nextn.shared_head_head",
    "shared_head.norm": "nextn.shared_head_norm",
}
_OTHER_NAMES = {  # architecture -> names within a layer that differ
    "mistral4": {"mlp.experts.down_proj": "ffn_down_exps.weight"},
    "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
    "bailingmoe2": {
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "attention.query_layernorm": "attn_q_norm",
        "attention.key_layernorm": "attn_k_norm",
        "mlp.gate.expert_bias": "exp_probs_b.bias",
    },
    "ernie4_5-moe": {"mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    "hunyuan-moe": {
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
        "mlp.gate.wg": "ffn_gate_inp",
        **{f"mlp.shared_mlp.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    },
    "hy_v3": {
        "mlp.router.gate": "ffn_gate_inp",
        "mlp.gate.e_score_correction_bias": "exp_probs_b",
        "mlp.expert_bias": "exp_probs_b",
        **{f"mlp.shared_mlp.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    },
}
_GLOBAL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.word_embeddings": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _metadata(family: str, config: Config) -> dict[str, Any]:
    arch = _ARCHITECTURES[family]
    has_mtp = arch in _WITH_MTP or family == "glm4_moe_lite"
    num_mtp_layers = config.get("num_nextn_predict_layers") if has_mtp else None
    values = text_metadata(config, num_mtp_layers or 0)
    if num_mtp_layers is not None:
        values["nextn_predict_layers"] = num_mtp_layers
    if arch in _LATENT:
        values |= _latent(family, config)
    else:
        values |= _OTHER_METADATA[arch](config)
    return {key: value for key, value in values.items() if value is not None}


def _latent(family: str, config: Config) -> dict[str, Any]:
    rank = config["kv_lora_rank"]
    rotated = config["qk_rope_head_dim"]
    values = {
        "vocab_size": config["vocab_size"],
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"] or None,
    }
    rope = rope_of(config)
    if "mscale_all_dim" in rope:
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if "index_topk" in config:
        values |= {
            "attention.indexer.head_count": config["index_n_heads"],
            "attention.indexer.key_length": config["index_head_dim"],
            "attention.indexer.top_k": config["index_topk"],
        }
    if config.get("indexer_types"):
        values["attention.indexer.types"] = [kind == "full" for kind in config["indexer_types"]]
    if family == "mistral4":
        values |= {
            "expert_gating_func": 1,
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
            "attention.temperature_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        }
    return values


def _glm4moe(config: Config) -> dict[str, Any]:
    rope = rope_of(config)
    share = rope.get("partial_rotary_factor", 0.5)
    sections = rope.get("mrope_section")
    return {
        "rope.dimension_sections": [*sections, 0] if sections else None,
        "rope.dimension_count": int(config["head_dim"] * share),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config.get("first_k_dense_replace"),
        "expert_gating_func": 2,
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
    }


def _bailingmoe2(config: Config) -> dict[str, Any]:
    size = config["moe_intermediate_size"]
    return {
        "vocab_size": config["vocab_size"],
        # Sarvam rotates whole heads.
        "rope.dimension_count": int(config["head_dim"] * config.get("partial_rotary_factor", 1)),
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": size,
        "expert_shared_feed_forward_length": size * config["num_shared_experts"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
    }


def _ernie(config: Config) -> dict[str, Any]:
    return {
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_k"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": (
            config["intermediate_size"] // config["num_key_value_heads"]
        ),
    }


def _hunyuan(config: Config) -> dict[str, Any]:
    values = {
        "expert_used_count": config["moe_topk"][0],
        "expert_feed_forward_length": config["moe_intermediate_size"][0],
        "expert_shared_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": config["num_shared_expert"][0],
    }
    size = config["head_dim"]
    scaled = 10_000.0 * 1000.0 ** (size / (size - 2))
    return values | {
        "rope.freq_base": scaled,
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 2**18,
        "context_length": 2**18,
    }


def _hy_v3(config: Config) -> dict[str, Any]:
    size = config["moe_intermediate_size"]
    return {
        "expert_feed_forward_length": size,
        "expert_shared_feed_forward_length": size * config["num_shared_experts"],
        "expert_weights_norm": True,
        "expert_weights_scale": config["router_scaling_factor"],
        "expert_gating_func": 2,
    }


_OTHER_METADATA = {
    "glm4moe": _glm4moe,
    "bailingmoe2": _bailingmoe2,
    "ernie4_5-moe": _ernie,
    "hunyuan-moe": _hunyuan,
    "hy_v3": _hy_v3,
}


def _tensors(family: str, config: Config, tensors: Tensors) -> Tensors:
    arch = _ARCHITECTURES[family]
    kept = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("language_model.").replace("model.language_model.", "model.")
        if family in ("deepseek_v3", "kimi_k25") and _is_mtp(name, config):
            continue  # which this converter omits
        if family == "sarvam_moe" and name.endswith("expert_bias"):
            tensor = tensor - tensor.mean()
        if name.startswith(("model.layers.", *_GLOBAL_NAMES)):
            kept[name] = tensor
    if arch in _LATENT:
        kept = _with_split_kv_b(kept, config)
    if family != "mistral3":  # its experts stay fused
        kept = with_stacked_experts(kept)
    names = {**_LAYER_NAMES, **_OTHER_NAMES.get(arch, {})}
    return renamed(kept, names, _GLOBAL_NAMES)


def _is_mtp(name: str, config: Config) -> bool:
    return name.startswith(f"model.layers.{config['num_hidden_layers']}.")


def _with_split_kv_b(tensors: Tensors, config: Config) -> Tensors:
    found: dict[str, Tensor] = {}
    nope = config["qk_nope_head_dim"]
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            per_head = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[-1])
            found[name.replace("kv_b_proj", "k_b_proj")] = per_head[:, :nope].mT
            found[name.replace("kv_b_proj", "v_b_proj")] = per_head[:, nope:]
        else:
            found[name] = tensor
    return found


GROUP = Group(_ARCHITECTURES, _metadata, _tensors, _OPTIONS)
