"""Gemma 4, dense and MoE."""

import math
from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import (
    ROPE_FACTORS,
    SLIDING_PATTERN,
    SLIDING_THETA,
    GGUFArchitecture,
    Shape,
    Variants,
)
from moeserve.loader.gguf_layers import FULL, SLIDING, WINDOW, layer_types, values_by_type

_SLIDING_HEAD = "attention.key_length_swa"
_SLIDING_KEYS = (
    _SLIDING_HEAD,
    "attention.value_length_swa",
    "rope.dimension_count_swa",
    SLIDING_THETA,
)
_UNROTATED = 1e20  # a factor from which a pair is not rotated; the converter writes 1e30


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the keys of layers with full attention, and of those with a window."""
    types = layer_types(metadata)
    if FULL not in types:
        raise metadata.error(SLIDING_PATTERN, "at least one layer must have full attention")
    kv_heads = values_by_type(metadata, "attention.head_count_kv", types)
    head_dim = metadata.integer(_SLIDING_HEAD, 2, 2**31)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if metadata.values.get(key, head_dim) != head_dim:
            raise metadata.error(key, f"supported: {head_dim}, the value of {_SLIDING_HEAD}")
    full_layers = [i for i, kind in enumerate(types) if kind == FULL]
    return {
        "layer_types": types,
        "head_dim": head_dim,
        "global_head_dim": metadata.raw("attention.key_length"),
        "num_key_value_heads": kv_heads.get(SLIDING, kv_heads[FULL]),
        "num_global_key_value_heads": kv_heads[FULL],
        "attention_k_eq_v": not any(f"blk.{i}.attn_v.weight" in tensors for i in full_layers),
        "enable_moe_block": "blk.0.ffn_gate_inp.weight" in tensors,
        "rope_factors": None,  # read by _rotated_share
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": metadata.raw("rope.freq_base"),
                "partial_rotary_factor": _rotated_share(metadata),
            },
            SLIDING: {"rope_type": "default", "rope_theta": metadata.raw(SLIDING_THETA)},
        },
    }


def _rotated_share(metadata: Fields) -> float:
    """Return the share of pairs that full attention rotates: those with a factor of 1."""
    size = metadata.integer("attention.key_length", 2, 2**31)
    factors = metadata.raw(ROPE_FACTORS)
    num_rotated = factors.count(1.0) if factors else 0
    first, rest = (factors or [])[:num_rotated], (factors or [])[num_rotated:]
    is_known = set(first) == {1.0} and all(x >= _UNROTATED for x in rest)  # not NaN
    if len(first + rest) != size // 2 or not is_known:
        raise metadata.error(
            ROPE_FACTORS,
            f"it must have {size // 2} numbers: 1 for each rotated pair, then 1e30; download the "
            "file again",
        )
    return min(1.0, math.nextafter(2 * num_rotated / size, 2.0))


ARCHITECTURES: dict[str, Variants] = {
    "gemma4": {
        "": GGUFArchitecture(
            "Gemma4ForCausalLM",
            keys={
                "attention.shared_kv_layers": "num_kv_shared_layers",
                "embedding_length_per_layer_input": "hidden_size_per_layer_input",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            defaults={"hidden_size_per_layer_input": 0},
            required=(
                "attention.key_length",
                "attention.head_count_kv",
                WINDOW,
                SLIDING_PATTERN,
                "rope.freq_base",
                *_SLIDING_KEYS,
            ),
            per_layer=("attention.head_count_kv",),
            config=_config,
            other_keys=(SLIDING_PATTERN, *_SLIDING_KEYS),
            names={
                "ffn_norm": "pre_feedforward_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
            },
            exact_names={
                "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
                "layer_output_scale.weight": "layer_scalar",
            },
        )
    },
}
