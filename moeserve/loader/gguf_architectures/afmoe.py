"""AFMoE (Trinity)."""

from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import (
    SIGMOID,
    SLIDING_PATTERN,
    GGUFArchitecture,
    Shape,
    Variants,
)
from moeserve.loader.gguf_layers import WINDOW, layer_types


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    metadata.only(expert_weights_norm=True)
    return {"layer_types": layer_types(metadata, period=4)}


ARCHITECTURES: dict[str, Variants] = {
    "afmoe": {
        "": GGUFArchitecture(
            "AfmoeForCausalLM",
            keys={
                "expert_shared_count": "num_shared_experts",
                "expert_weights_scale": "route_scale",
                "leading_dense_block_count": "num_dense_layers",
            },
            defaults={"mup_enabled": True, "num_dense_layers": 0, "route_scale": 1.0},
            required=(WINDOW, "expert_shared_count", "expert_weights_norm"),
            gating=SIGMOID,
            config=_config,
            other_keys=(SLIDING_PATTERN,),
            names={
                "attn_gate": "self_attn.gate_proj",
                "ffn_norm": "pre_mlp_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
        )
    },
}
