"""Command A+ and other models with the layers of Cohere2-MoE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import (
    SHARED_SIZE,
    SIGMOID,
    SLIDING_PATTERN,
    GGUFArchitecture,
    Shape,
    Variants,
)
from moeserve.loader.gguf_layers import WINDOW, layer_types, mlp_layer_types

_NORM = "attention.layer_norm_epsilon"
_RMS_NORM = "attention.layer_norm_rms_epsilon"


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    size = metadata.integer("expert_feed_forward_length", 1, 2**31)
    count = 0
    if "expert_shared_count" in metadata.values:
        count = metadata.integer("expert_shared_count", 0, 2**31)
    metadata.only(**{SHARED_SIZE: count * size}, expert_weights_scale=1.0)
    return {
        "expert_selection_fn": "sigmoid",
        "layer_types": layer_types(metadata, period=4, full_first=True),
        "mlp_layer_types": mlp_layer_types(metadata, tensors),
    }


_RMS = GGUFArchitecture(
    "Cohere2MoeForCausalLM",
    keys={
        "expert_feed_forward_length": "intermediate_size",
        "expert_shared_count": "num_shared_experts",
        "feed_forward_length": "prefix_dense_intermediate_size",
        "logit_scale": "logit_scale",
    },
    required=("attention.key_length", WINDOW, "logit_scale"),
    gating=SIGMOID,
    config=_config,
    other_keys=(SHARED_SIZE, SLIDING_PATTERN),
)
ARCHITECTURES: dict[str, Variants] = {
    "cohere2moe": {
        _RMS_NORM: _RMS,
        "": replace(_RMS, keys={**_RMS.keys, _NORM: "layer_norm_eps"}, norm_key=_NORM),
    },
}
