"""Step-3.5 and the text model of Step-3.7."""

import math
from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import (
    ROPE_FACTORS,
    SHARED_SIZE,
    SIGMOID,
    SLIDING_PATTERN,
    SLIDING_THETA,
    GGUFArchitecture,
    Shape,
    Variants,
)
from moeserve.loader.gguf_layers import (
    FULL,
    SLIDING,
    WINDOW,
    layer_types,
    layer_values,
    mlp_layer_types,
    rotated_share,
    values_by_type,
)

_HEADS = "attention.head_count"
_KV_HEADS = "attention.head_count_kv"
_SLIDING_THETA = 10_000.0  # llama.cpp's, if the file omits it
_ROTATED = ("rope.dimension_count", "rope.dimension_count_swa")
_LIMITS = {
    "swiglu_clamp_exp": "swiglu_limits",
    "swiglu_clamp_shexp": "swiglu_limits_shared",
}


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the keys of layers with full attention, and of those with a window."""
    metadata.only(expert_weights_norm=True)
    types = layer_types(metadata)
    heads = values_by_type(metadata, _HEADS, types)
    if len(set(values_by_type(metadata, _KV_HEADS, types).values())) > 1:
        raise metadata.error(_KV_HEADS, "it must be the same for all layers")
    limits = {name: _limits(metadata, key) for key, name in _LIMITS.items()}
    return {
        "layer_types": types,
        "mlp_layer_types": mlp_layer_types(metadata, tensors),
        "need_fp32_gate": True,  # routers of files are in fp32
        "norm_shift_added": True,
        "num_attention_heads": heads.get(FULL, heads.get(SLIDING)),
        "num_key_value_heads": layer_values(metadata, _KV_HEADS)[0],
        "num_sliding_attention_heads": heads.get(SLIDING),
        "rope_factors": None,  # of full attention only
        "rope_parameters": _rope(metadata),
        **limits,
    }


def _limits(metadata: Fields, key: str) -> list[float] | None:
    """Return the limit of each layer's activation, where 0 is none."""
    if key not in metadata.values:
        return None
    limits = layer_values(metadata, key)
    if not all(type(limit) in (int, float) and 0 <= limit < math.inf for limit in limits):
        raise metadata.error(key, "it must have a number from 0 for each layer")
    return limits


def _rope(metadata: Fields) -> dict[str, Any]:
    """Return `rope_parameters`: full attention rotates one half of a head, the other all of it.

    llama.cpp computes the half. A file may have more factors than full attention uses.
    """
    size = metadata.integer("attention.key_length", 4, 2**31)
    rotated, rotated_in_window = (
        metadata.integer(key, 4, size) if key in metadata.values else size for key in _ROTATED
    )
    factors = metadata.raw(ROPE_FACTORS)
    theta = metadata.raw("rope.freq_base")
    return {
        FULL: {
            "rope_theta": theta,
            "partial_rotary_factor": rotated_share(rotated // 2, size),
            "rope_factors": factors and factors[: rotated // 4],
        },
        SLIDING: {
            "rope_theta": metadata.values.get(SLIDING_THETA, _SLIDING_THETA),
            "partial_rotary_factor": rotated_share(rotated_in_window, size),
        },
    }


ARCHITECTURES: dict[str, Variants] = {
    "step35": {
        "": GGUFArchitecture(
            "Step3p5ForCausalLM",
            keys={
                SHARED_SIZE: "share_expert_dim",
                "expert_weights_scale": "moe_router_scaling_factor",
            },
            required=(
                "attention.key_length",
                WINDOW,
                SLIDING_PATTERN,
                "expert_weights_norm",
                "rope.freq_base",
            ),
            gating=SIGMOID,
            shared="share_expert",
            per_layer=(_HEADS, _KV_HEADS),
            config=_config,
            other_keys=(
                SLIDING_PATTERN,
                SLIDING_THETA,
                *_ROTATED,
                "moe_every_n_layers",  # the tensors tell which layers have experts
                *_LIMITS,
            ),
            names={"attn_gate": "self_attn.g_proj"},
        )
    },
}
