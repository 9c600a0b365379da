"""Hunyuan-A13B, and Hy3."""

import math
from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import (
    SHARED_SIZE,
    SIGMOID,
    GGUFArchitecture,
    Shape,
    Variants,
)
from moeserve.loader.gguf_layers import mlp_layer_types

_BASE = 10_000.0  # rotary base of published models, before alpha scales it
_ALPHA = 1000.0
_FP32_STEP = 2**-23


def _hunyuan(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return `rope_parameters` with the alpha that the converter has replaced by another base.

    The base in the file is rounded to fp32.
    """
    metadata.only(expert_weights_norm=True, expert_weights_scale=1.0, expert_group_count=1)
    size = metadata.integer("attention.key_length", 4, 4096)
    scaled = _BASE * _ALPHA ** (size / (size - 2))
    base = metadata.values.get("rope.freq_base")
    if isinstance(base, float) and math.isclose(base, scaled, rel_tol=_FP32_STEP):
        rope = {"rope_type": "dynamic", "alpha": _ALPHA, "rope_theta": _BASE}
        return {"rope_parameters": rope}
    return {}


def _hy_3(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return which layers have experts, as their tensors tell, and the number of shared experts."""
    metadata.only(expert_weights_norm=True, expert_group_count=1)
    size = metadata.integer("expert_feed_forward_length", 1, 2**20)
    shared_size = metadata.values.get(SHARED_SIZE, size)
    if type(shared_size) is not int or shared_size % size:
        raise metadata.error(SHARED_SIZE, f"it must be a multiple of {size}, an expert's width")
    return {
        "mlp_layer_types": mlp_layer_types(metadata, tensors),
        "num_shared_experts": shared_size // size,
    }


ARCHITECTURES: dict[str, Variants] = {
    "hunyuan-moe": {
        "": GGUFArchitecture(
            "HunYuanMoEV1ForCausalLM",
            keys={"expert_shared_count": "num_shared_expert"},
            required=("attention.key_length",),
            shared="mlp.shared_mlp",
            config=_hunyuan,
            other_keys=(SHARED_SIZE,),  # feed_forward_length, which check_plan verifies
        )
    },
    "hy_v3": {
        "": GGUFArchitecture(
            "HYV3ForCausalLM",
            keys={"expert_weights_scale": "router_scaling_factor"},
            defaults={"router_scaling_factor": 1.0},
            required=("attention.key_length", "expert_feed_forward_length", "expert_weights_norm"),
            gating=SIGMOID,
            shared="mlp.shared_mlp",
            config=_hy_3,
            other_keys=(SHARED_SIZE,),
        )
    },
}
