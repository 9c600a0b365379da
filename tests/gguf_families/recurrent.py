"""Families with recurrent layers: Qwen3-Next and 3.5, Nemotron-H, Granite 4, Jamba, LFM2, Kimi."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.blocks.ngram_embedding import NgramEmbedding
from moeserve.loader.fields import Fields
from moeserve.models.qwen4_exp import TEXT, ngram_embeddings
from moeserve.ops.elementwise import exp
from tests.families import FULL
from tests.gguf_families.group import (
    GLOBAL_NAMES,
    LAYER_NAMES,
    Config,
    Group,
    Tensors,
    renamed,
    rope_of,
    text_metadata,
    with_stacked_experts,
)

_ARCHITECTURES = {
    "granite_moe_hybrid": "granitehybrid",
    "jamba": "jamba",
    "kimi_linear": "kimi-linear",
    "lfm2_moe": "lfm2moe",
    "nemotron_h": "nemotron_h_moe",
    "nemotron_h_dense": "nemotron_h",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "qwen4_exp_text": "qwen4exp",
}
_OPTIONS: dict[str, Config] = {
    "granite_moe_hybrid": {"time_step_limit": [0.0, math.inf]},
    "kimi_linear": {"n_group": 1, "topk_group": 1},
    "lfm2_moe": {"routed_scaling_factor": 1.0, "tie_word_embeddings": True},
    # The converter reads no model with both experts and dense MLPs.
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "linear_attention", FULL, "moe"],
        "mamba_head_dim": 16,  # it requires a multiple of 64 for all heads
        "time_step_min": 0.001,
    },
    "nemotron_h_dense": {"time_step_min": 0.001},
    "qwen4_exp_text": {"ple_layer_ids": [3]},  # the file has one table
}
_MAMBA_NAMES = {
    "A_log": "ssm_a",
    "D": "ssm_d",
    "conv1d": "ssm_conv1d",
    "in_proj": "ssm_in",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
_MAMBA2_NAMES = {**_MAMBA_NAMES, "dt_bias": "ssm_dt.bias"}
_SHARED_NAMES = {
    f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")
}  # fmt: skip
_QWEN_NAMES = {
    **LAYER_NAMES,
    **_SHARED_NAMES,
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "post_attention_layernorm": "post_attention_norm",
    "shared_head.norm": "nextn.shared_head_norm",
}
_CONNECTION_NAMES = {
    "block_inject_weight": "inject",
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
}
_MTP_NAMES = {
    "fc": "eh_proj",
    "norm": "shared_head.norm",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
}


def _qwen_metadata(config: Config) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    num_mtp_layers = config.get("mtp_num_hidden_layers", 0)
    types = config["layer_types"]
    value_heads = config["linear_num_value_heads"]
    values = text_metadata(config, num_mtp_layers) | {
        "attention.recurrent_layers": [
            i < num_layers and types[i] == "linear_attention"
            for i in range(num_layers + num_mtp_layers)
        ],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "nextn_predict_layers": num_mtp_layers or None,
        "rope.dimension_count": int(
            config["head_dim"] * rope_of(config).get("partial_rotary_factor", 0.25)
        ),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.inner_size": value_heads * config["linear_value_head_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.time_step_rank": value_heads,
    }
    if "mrope_section" in rope_of(config):
        values["rope.dimension_sections"] = [*rope_of(config)["mrope_section"], 0]
    return values


_QWEN4_NAMES = {
    **_QWEN_NAMES,
    **{
        f"{module}_hyper_connection.{name}": f"hc_{begin}_{new}"
        for module, begin in (("attn", "attn"), ("mlp", "ffn"))
        for name, new in _CONNECTION_NAMES.items()
    },
    **{f"self_attn.indexer.{x}_proj": f"indexer.{x}_proj" for x in "qk"},
    **{f"self_attn.indexer.{x}_layernorm": f"indexer.{x}_norm" for x in "qk"},
    **{f"ple.norm_{x}": f"ple_norm_{x}" for x in ("conv", "key", "query")},
    "ple.conv1d": "ple_conv1d",
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
}


def _qwen4_metadata(config: Config) -> dict[str, Any]:
    types = config["layer_types"]
    ratio = config["indexer_compress_ratio"]
    embedding = _hash_of(config)
    return _qwen_metadata(config) | {
        "attention.compress_ratios": [0 if kind == "linear_attention" else ratio for kind in types],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"],
        "attention.indexer.top_k": config["indexer_budget"],
        "embedding_length_per_layer_input": config["ple_embed_dim"] // len(embedding.sizes),
        "hyper_connection.count": config["hc_count"],
        "hyper_connection.low_rank": config["hc_lowrank"],
        "nextn_predict_layers": None,
        "ple.conv_kernel": config["ple_conv_kernel_size"],
        "ple.eos_token_id": config["eos_token_id"],
        "ple.head_offsets": np.array(embedding.offsets, np.uint64),
        "ple.head_vocab_sizes": np.array(embedding.sizes, np.uint64),
        "ple.heads_per_ngram": config["heads_per_ngram"],
        "ple.layer_multipliers": np.array(embedding.multipliers, np.uint64),
        "ple.layers": [layer - 1 for layer in config["ple_layer_ids"]],
        "ple.ngram_size": config["ngram_size"],
    }


def _qwen4_tensors(config: Config, tensors: Tensors) -> Tensors:
    found: Tensors = {}
    shards = list[Tensor]()
    queries = config["indexer_n_heads"] * config["indexer_head_dim"]
    for name in sorted(tensors, key=lambda name: [int(x) for x in re.findall("[0-9]+", name)]):
        tensor = _tiled(config, name, tensors[name])
        if ".ngram_embedding.shard_" in name:
            shards.append(tensor)
        elif name.endswith("index_qk_proj.weight"):
            found[name.replace("index_qk_proj", "q_proj")] = tensor[:queries]
            found[name.replace("index_qk_proj", "k_proj")] = tensor[queries:]
        elif tensor.dtype != torch.int64 and not name.startswith("mtp."):
            is_shifted = "norm" in name and not name.endswith("linear_attn.norm.weight")
            found[name] = tensor + 1 if is_shifted else tensor
    mixer = "model.hyper_connection_mixer."
    global_names = GLOBAL_NAMES | {
        f"{mixer}{name}": f"output_hc_{new}" for name, new in _CONNECTION_NAMES.items()
    }
    table = torch.cat(shards)
    result = renamed(_converted(with_stacked_experts(found)), _QWEN4_NAMES, global_names)
    return result | {"per_layer_token_embd.weight": table}


def _hash_of(config: Config) -> NgramEmbedding:
    """Return the specification of the n-gram embedding, for the constants of its hash."""
    text = {"architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text"}
    fields = Fields(Path("config.json"), config | text, TEXT.defaults | {"attention_bias": False})
    return next(iter(ngram_embeddings(fields, config["hc_count"]).values()))


def _qwen_tensors(config: Config, tensors: Tensors) -> Tensors:
    found: Tensors = {}
    for name, tensor in _with_mtp_layers(config, tensors).items():
        if name.endswith("in_proj_qkvz.weight"):
            queries_keys_values, gates = by_part(config, tensor)
            found[name.replace("qkvz", "qkv")] = queries_keys_values
            found[name.replace("qkvz", "z")] = gates
            continue
        if config["model_type"].startswith("qwen3_5"):
            tensor = _tiled(config, name, tensor)
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        found[name] = tensor
    return renamed(_converted(with_stacked_experts(found)), _QWEN_NAMES)


def _with_mtp_layers(config: Config, tensors: Tensors) -> Tensors:
    """Return the text model's tensors, with those of MTP named as a further layer's."""
    found: Tensors = {}
    layer = f"model.layers.{config['num_hidden_layers']}."
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "model.")
        if name.startswith("mtp.layers.0."):
            name = name.replace("mtp.layers.0.", layer)
        elif name.startswith("mtp."):
            part, _, ending = name.removeprefix("mtp.").rpartition(".")
            name = f"{layer}{_MTP_NAMES[part]}.{ending}"
        is_mtp = name.startswith(layer)
        if not name.startswith("model.visual.") and (
            not is_mtp or config.get("mtp_num_hidden_layers")
        ):
            found[name] = tensor
    return found


def by_part(config: Config, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return in_proj_qkvz in two: queries, keys and values of all heads; output gates."""
    groups = config["linear_num_key_heads"]
    keys = config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"] // groups
    grouped = tensor.reshape(groups, -1, tensor.shape[1])
    *parts, gates = (
        part.flatten(0, 1) for part in torch.split(grouped, [keys, keys, values, values], 1)
    )  # fmt: skip
    return torch.cat(parts), gates


def _tiled(config: Config, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of Qwen3.5 with its value heads in the order that GGUF files have."""
    part = name.partition("linear_attn.")[2]
    groups = config["linear_num_key_heads"]
    width = config["linear_value_head_dim"]

    def reordered(rows: Tensor, width: int = 1) -> Tensor:
        return rows.reshape(groups, -1, width, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return reordered(tensor)
    if part == "in_proj_z.weight":
        return reordered(tensor, width)
    if part == "out_proj.weight":
        return reordered(tensor.T, width).T
    if part in ("conv1d.weight", "in_proj_qkv.weight"):
        first = 2 * groups * config["linear_key_head_dim"]
        return torch.cat((tensor[:first], reordered(tensor[first:], width)))
    return tensor


def _converted(tensors: Tensors) -> Tensors:
    """Return the tensors with A instead of A_log, and convolutions without the middle dimension."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor = -exp(tensor)
        elif "conv" in name and tensor.dim() == 3:
            tensor = tensor.squeeze(1)
        found[name] = tensor
    return found


def _kv_heads(config: Config, is_full: list[bool], count: int | None = None) -> list[int]:
    """Return the number of KV heads of each layer."""
    count = count or config["num_key_value_heads"]
    return [count if full else 0 for full in is_full]


def _permuted(config: Config, tensors: Tensors) -> Tensors:
    """Return the tensors with rows of queries and keys in pairs, as Llama's converter does."""
    found = dict(tensors)
    for x, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        for name in (name for name in tensors if name.endswith(f"{x}_proj.weight")):
            rows = tensors[name]
            found[name] = (
                rows.reshape(config[heads], 2, -1, rows.shape[1])
                .transpose(1, 2)
                .reshape(rows.shape)
            )
    return found


def _mamba2_metadata(config: Config, inner: int) -> dict[str, Any]:
    names = {  # key -> names in config.json
        "ssm.conv_kernel": ("mamba_d_conv", "conv_kernel"),
        "ssm.group_count": ("mamba_n_groups", "n_groups"),
        "ssm.state_size": ("mamba_d_state", "ssm_state_size"),
        "ssm.time_step_rank": ("mamba_n_heads", "mamba_num_heads"),
    }
    return {
        **{key: next(config[x] for x in found if x in config) for key, found in names.items()},
        "context_length": 2**20,
        "rope.scaling.finetuned": False,
        "ssm.inner_size": inner,
        "vocab_size": config["vocab_size"],
    }


def _with_mamba2_shapes(config: Config, tensors: Tensors) -> Tensors:
    """Return the tensors of Mamba-2 with the shapes that llama.cpp takes."""
    groups = config.get("mamba_n_groups") or config["n_groups"]
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith((".ssm_a", ".ssm_d")):
            found[name] = tensor[:, None]
        elif name.endswith(".ssm_norm.weight"):
            found[name] = tensor.view(groups, -1)
    return found


def _granite_metadata(config: Config) -> dict[str, Any]:
    is_full = [kind in ("attention", FULL) for kind in config["layer_types"]]
    return (
        text_metadata(config)
        | _mamba2_metadata(config, config["mamba_expand"] * config["hidden_size"])
        | {
            "attention.head_count_kv": _kv_heads(config, is_full),
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            "logit_scale": config["logits_scaling"],
            "residual_scale": config["residual_multiplier"],
            "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        }
    )


def _granite_tensors(config: Config, tensors: Tensors) -> Tensors:
    suffix = "_shexp" if config["num_local_experts"] else ""
    names = {
        **LAYER_NAMES,
        **{f"mamba.{name}": new for name, new in _MAMBA2_NAMES.items()},
        **{f"shared_mlp.{x}_proj": f"ffn_{x}{suffix}" for x in ("gate", "up", "down")},
        "block_sparse_moe.gate_proj": "ffn_gate_exps",
        "block_sparse_moe.up_proj": "ffn_up_exps",
        "block_sparse_moe.output_linear": "ffn_down_exps",
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        "shared_mlp.output_linear": f"ffn_down{suffix}",
    }
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("input_linear.weight"):
            gate, up = tensor.chunk(2, -2)
            found[name.replace("input_linear", "gate_proj")] = gate
            found[name.replace("input_linear", "up_proj")] = up
        else:
            found[name] = tensor
    return _with_mamba2_shapes(config, renamed(_permuted(config, _converted(found)), names))


def _nemotron_metadata(config: Config) -> dict[str, Any]:
    letters = {"M": "linear_attention", "*": FULL, "-": "mlp"}
    kinds = config.get("layers_block_type") or [
        letters[letter] for letter in config["hybrid_override_pattern"]
    ]
    has_experts = "moe" in kinds
    size = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    values = text_metadata({**config, "num_hidden_layers": len(kinds)}) | {
        **_mamba2_metadata(config, config["mamba_num_heads"] * config["mamba_head_dim"]),
        "attention.head_count_kv": _kv_heads(config, [kind == FULL for kind in kinds]),
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "feed_forward_length": [size if kind in ("moe", "mlp") else 0 for kind in kinds],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
    }
    if has_experts:
        values |= {
            "expert_feed_forward_length": size,
            "expert_shared_count": config["n_shared_experts"],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
        }
    return values


def _nemotron_tensors(config: Config, tensors: Tensors) -> Tensors:
    names = {
        "norm": "attn_norm",
        **{f"mixer.{name}": new for name, new in _MAMBA2_NAMES.items()},
        **{
            f"mixer.{name.partition('.')[2]}": new
            for name, new in LAYER_NAMES.items()
            if name.startswith(("self_attn.", "mlp."))
        },
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    }
    global_names = {
        "lm_head": "output",
        "model.embeddings": "token_embd",
        "model.norm_f": "output_norm",
    }
    found = with_stacked_experts(_permuted(config, _converted(tensors)))
    found = {name.replace("backbone.", "model."): tensor for name, tensor in found.items()}
    return _with_mamba2_shapes(config, renamed(found, names, global_names))


def _jamba_metadata(config: Config) -> dict[str, Any]:
    period = config["attn_layer_period"]
    offset = config["attn_layer_offset"]
    is_full = [i % period == offset for i in range(config["num_hidden_layers"])]
    return text_metadata(config) | {
        "attention.head_count_kv": _kv_heads(config, is_full),
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
    }


def _jamba_tensors(config: Config, tensors: Tensors) -> Tensors:
    names = {
        **LAYER_NAMES,
        **{f"mamba.{name}": new for name, new in _MAMBA_NAMES.items()},
        **{f"mamba.{x}_layernorm": f"ssm_{x}_norm" for x in ("b", "c", "dt")},
        "mamba.dt_proj": "ssm_dt",
        "mamba.x_proj": "ssm_x",
        "mlp.router": "ffn_gate_inp",
        "pre_ff_layernorm": "ffn_norm",
    }
    found = with_stacked_experts(_converted(tensors))
    found = {name.replace(".feed_forward.", ".mlp."): tensor for name, tensor in found.items()}
    return renamed(found, names, GLOBAL_NAMES | {"model.final_layernorm": "output_norm"})


def _lfm2_metadata(config: Config) -> dict[str, Any]:
    is_full = [kind == FULL for kind in config["layer_types"]]
    return text_metadata(config) | {
        "attention.head_count_kv": _kv_heads(config, is_full),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_gating_func": 2,
        "leading_dense_block_count": config["num_dense_layers"],
        "shortconv.l_cache": config["conv_L_cache"],
        "vocab_size": config["vocab_size"],
    }


def _lfm2_tensors(config: Config, tensors: Tensors) -> Tensors:
    products = {"w1": "gate", "w2": "down", "w3": "up"}
    names = {
        **LAYER_NAMES,
        **{f"feed_forward.{x}": f"ffn_{new}" for x, new in products.items()},
        **{f"feed_forward.experts.{x}": f"ffn_{new}_exps" for x, new in products.items()},
        **{f"conv.{x}": f"shortconv.{x}" for x in ("conv", "in_proj", "out_proj")},
        "feed_forward.expert_bias": "exp_probs_b.bias",
        "feed_forward.gate": "ffn_gate_inp",
        "ffn_norm": "ffn_norm",
        "operator_norm": "attn_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
    }
    global_names = GLOBAL_NAMES | {"model.embedding_norm": "token_embd_norm"}
    return renamed(with_stacked_experts(_converted(tensors)), names, global_names)


def _kimi_metadata(config: Config) -> dict[str, Any]:
    linear = config["linear_attn_config"]
    full = linear["full_attn_layers"]
    rank = config["kv_lora_rank"]
    rotated = config["qk_rope_head_dim"]
    return text_metadata(config) | {
        "attention.head_count_kv": _kv_heads(
            config, [i + 1 in full for i in range(config["num_hidden_layers"])], 1
        ),
        "attention.key_length": rank + rotated,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.kv_lora_rank": rank,
        "attention.value_length_mla": config["v_head_dim"],
        "context_length": config["model_max_length"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "kda.head_dim": linear["head_dim"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "rope.dimension_count": rotated,
        "ssm.conv_kernel": linear["short_conv_kernel_size"],
        "vocab_size": config["vocab_size"],
    }


def _kimi_tensors(config: Config, tensors: Tensors) -> Tensors:
    products = {"w1": "gate", "w2": "down", "w3": "up"}
    shared = "block_sparse_moe.shared_experts"
    names = {
        **LAYER_NAMES,
        **{f"block_sparse_moe.experts.{x}": f"ffn_{new}_exps" for x, new in products.items()},
        **{f"{shared}.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
        **{f"self_attn.{x}_conv1d": f"ssm_conv1d_{x}" for x in "qkv"},
        **{f"self_attn.{x}_proj": f"ssm_{x}" for x in ("f_a", "f_b", "g_a", "g_b")},
        "block_sparse_moe.gate": "ffn_gate_inp",
        "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
        "self_attn.A_log": "ssm_a",
        "self_attn.b_proj": "ssm_beta",
        "self_attn.dt_bias": "ssm_dt.bias",
        "self_attn.k_b_proj": "attn_k_b",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.o_norm": "ssm_norm",
        "self_attn.v_b_proj": "attn_v_b",
    }
    found: Tensors = {}
    for name, tensor in with_stacked_experts(tensors).items():
        if name.endswith("A_log"):
            tensor = -exp(tensor)
        elif "conv1d" in name:
            tensor = tensor[None]
        if name.endswith("kv_b_proj.weight"):
            both = tensor.view(config["num_attention_heads"], -1, tensor.shape[1])
            keys, values = torch.split(both, [config["qk_nope_head_dim"], config["v_head_dim"]], 1)
            found[name.replace("kv_b_proj", "k_b_proj")] = keys.mT
            found[name.replace("kv_b_proj", "v_b_proj")] = values
        else:
            found[name] = tensor
    return renamed(found, names)


_METADATA: dict[str, Callable[[Config], dict[str, Any]]] = {
    "granitehybrid": _granite_metadata,
    "jamba": _jamba_metadata,
    "kimi-linear": _kimi_metadata,
    "lfm2moe": _lfm2_metadata,
    "nemotron_h": _nemotron_metadata,
    "nemotron_h_moe": _nemotron_metadata,
    "qwen35moe": _qwen_metadata,
    "qwen3next": _qwen_metadata,
    "qwen4exp": _qwen4_metadata,
}
_TENSORS: dict[str, Callable[[Config, Tensors], Tensors]] = {
    "granitehybrid": _granite_tensors,
    "jamba": _jamba_tensors,
    "kimi-linear": _kimi_tensors,
    "lfm2moe": _lfm2_tensors,
    "nemotron_h": _nemotron_tensors,
    "nemotron_h_moe": _nemotron_tensors,
    "qwen35moe": _qwen_tensors,
    "qwen3next": _qwen_tensors,
    "qwen4exp": _qwen4_tensors,
}


def _metadata(family: str, config: Config) -> dict[str, Any]:
    return _METADATA[_ARCHITECTURES[family]](config)


def _tensors(family: str, config: Config, tensors: Tensors) -> Tensors:
    return _TENSORS[_ARCHITECTURES[family]](config, tensors)


GROUP = Group(_ARCHITECTURES, _metadata, _tensors, _OPTIONS)
