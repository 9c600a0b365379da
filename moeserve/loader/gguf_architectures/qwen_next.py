"""Qwen3-Next, and Qwen3.5 and 3.6 MoE."""

from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import SHARED_SIZE, GGUFArchitecture, Shape, Variants
from moeserve.loader.gguf_layers import (
    FULL,
    RECURRENT,
    depthwise,
    layer_values,
    num_layers,
    rotated_share,
)

_IS_RECURRENT = "attention.recurrent_layers"
_INTERVAL = "full_attention_interval"
_SECTIONS = "rope.dimension_sections"  # axes of the rotary embedding, which are the same for text
_MAX_SIZE = 2**20
_SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def _layer_types(metadata: Fields) -> list[str]:
    """Return the type of each decoder layer. llama.cpp takes 4 for an absent interval."""
    if _IS_RECURRENT in metadata.values:
        is_recurrent = layer_values(metadata, _IS_RECURRENT)
        if any(type(each) is not bool for each in is_recurrent):
            raise metadata.error(_IS_RECURRENT, "it must be true or false for each layer")
    else:
        interval = 4
        if _INTERVAL in metadata.values:
            interval = metadata.integer(_INTERVAL, 1, _MAX_SIZE)
        is_recurrent = [(i + 1) % interval != 0 for i in range(num_layers(metadata))]
    return [RECURRENT if each else FULL for each in is_recurrent]


def hybrid_config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the keys of layers with gated delta nets and of those with attention."""
    num_value_heads = metadata.integer("ssm.time_step_rank", 1, _MAX_SIZE)
    inner_size = metadata.integer("ssm.inner_size", 1, _MAX_SIZE)
    if inner_size % num_value_heads:
        raise metadata.error(
            "ssm.inner_size", f"ssm.time_step_rank ({num_value_heads}) must divide it"
        )
    num_heads = metadata.integer("attention.head_count", 1, _MAX_SIZE)
    head_dim = metadata.values.get("attention.key_length")
    head_dim = head_dim or metadata.integer("embedding_length", 1, _MAX_SIZE) // num_heads
    return {
        "decays_exponentiated": True,
        "layer_types": _layer_types(metadata),
        "linear_value_head_dim": inner_size // num_value_heads,
        "norm_shift_added": True,
        # The family has another default than 1.
        "partial_rotary_factor": rotated_share(
            metadata.integer("rope.dimension_count", 1, head_dim), head_dim
        ),
    }


def _qwen3_next(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    return hybrid_config(metadata, tensors) | {
        "linear_inputs_by_head": any(name.endswith(".ssm_in.weight") for name in tensors)
    }


def _qwen3_5(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    return hybrid_config(metadata, tensors) | {
        "linear_value_heads_tiled": True,
        "mtp_num_hidden_layers": metadata.raw("nextn_predict_layers"),
    }


OPTIONS: dict[str, Any] = {
    "keys": {SHARED_SIZE: "shared_expert_intermediate_size", **_SIZES},
    "defaults": {"norm_topk_prob": True},
    "required": (*_SIZES, "ssm.inner_size", "rope.dimension_count", SHARED_SIZE),
    "shared": "mlp.shared_expert",
    "other_keys": (_INTERVAL, _IS_RECURRENT, _SECTIONS, "ssm.inner_size"),
    "names": {
        "attn_gate": "linear_attn.in_proj_z",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_in": "linear_attn.in_proj_qkvz",  # of older files
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    "exact_names": {"ssm_a": "linear_attn.A", "ssm_dt.bias": "linear_attn.dt_bias"},
    "shapes": {"ssm_conv1d": depthwise},
    "mtp_layer": "mtp.layers.{}.",
    "mtp_names": {
        "nextn.eh_proj": "mtp.fc",
        "nextn.embed_tokens": "mtp.embed_tokens",
        "nextn.enorm": "mtp.pre_fc_norm_embedding",
        "nextn.hnorm": "mtp.pre_fc_norm_hidden",
        "nextn.shared_head_head": "mtp.head",
        "nextn.shared_head_norm": "mtp.norm",
    },
}
ARCHITECTURES: dict[str, Variants] = {
    "qwen35moe": {"": GGUFArchitecture("Qwen3_5MoeForCausalLM", config=_qwen3_5, **OPTIONS)},
    "qwen3next": {"": GGUFArchitecture("Qwen3NextForCausalLM", config=_qwen3_next, **OPTIONS)},
}
