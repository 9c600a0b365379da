"""MiMo-V2-Flash."""

from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import (
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
    mlp_layer_types,
    rotated_share,
    values_by_type,
)

_ROTATED = "rope.dimension_count"
_MTP = "model.mtp.layers.{}."


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the keys of layers with full attention, and of those with a window."""
    types = layer_types(metadata)
    kv_heads = values_by_type(metadata, "attention.head_count_kv", types)
    for kind in (FULL, SLIDING):
        if kind not in kv_heads:
            raise metadata.error(SLIDING_PATTERN, f"at least one layer must have {kind}")
    size = metadata.integer("attention.key_length", 2, 2**31)
    share = rotated_share(metadata.integer(_ROTATED, 2, size), size)
    thetas = {FULL: "rope.freq_base", SLIDING: SLIDING_THETA}
    return {
        "layer_types": types,
        "mlp_layer_types": mlp_layer_types(metadata, tensors),
        "num_key_value_heads": kv_heads[FULL],
        "swa_num_key_value_heads": kv_heads[SLIDING],
        "sliding_window_size": metadata.raw(WINDOW),
        "rope_parameters": {
            kind: {"rope_theta": metadata.raw(key), "partial_rotary_factor": share}
            for kind, key in thetas.items()
        },
    }


ARCHITECTURES: dict[str, Variants] = {
    "mimo2": {
        "": GGUFArchitecture(
            "MiMoV2FlashForCausalLM",
            keys={
                "attention.value_length": "v_head_dim",
                "attention.value_scale": "attention_value_scale",
            },
            defaults={"attention_value_scale": None, "norm_topk_prob": True},
            required=(
                "attention.key_length",
                "attention.value_length",
                "attention.head_count_kv",
                WINDOW,
                SLIDING_PATTERN,
                "rope.freq_base",
                _ROTATED,
                SLIDING_THETA,
            ),
            gating=SIGMOID,
            per_layer=("attention.head_count_kv",),
            config=_config,
            other_keys=(SLIDING_PATTERN, SLIDING_THETA),
            mtp_layer=_MTP,
            mtp_names={
                "nextn.eh_proj": f"{_MTP}eh_proj",
                "nextn.enorm": f"{_MTP}enorm",
                "nextn.hnorm": f"{_MTP}hnorm",
                "nextn.shared_head_norm": f"{_MTP}final_layernorm",
                "layer_output_norm": f"{_MTP}final_layernorm",
            },
        )
    },
}
