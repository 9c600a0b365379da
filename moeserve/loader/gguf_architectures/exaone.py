"""K-EXAONE."""

from collections.abc import Mapping
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


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    size = metadata.integer("expert_feed_forward_length", 1, 2**31)
    count = metadata.integer("expert_shared_count", 0, 2**31)
    metadata.only(**{SHARED_SIZE: count * size})
    return {
        "layer_types": layer_types(metadata, period=4),
        "mlp_layer_types": mlp_layer_types(metadata, tensors),
    }


ARCHITECTURES: dict[str, Variants] = {
    "exaone-moe": {
        "": GGUFArchitecture(
            "ExaoneMoeForCausalLM",
            keys={"expert_shared_count": "num_shared_experts"},
            required=(WINDOW, "expert_feed_forward_length", "expert_shared_count"),
            gating=SIGMOID,
            config=_config,
            other_keys=(SLIDING_PATTERN, SHARED_SIZE),
            mtp_layer="mtp.layers.{}.",
        )
    },
}
