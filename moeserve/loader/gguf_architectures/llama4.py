"""Llama 4 (Scout, Maverick)."""

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
from moeserve.loader.gguf_layers import FULL, WINDOW, layer_types

_CHUNK = 8192  # llama.cpp's, whatever the file says
_MAVERICK_EXPERTS = 128


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the keys for which files have none, with the values of llama.cpp."""
    if metadata.values.get(WINDOW) == 0:
        raise metadata.error(WINDOW, "a Llama 4 without chunked attention is not supported")
    types = layer_types(metadata, period=4)
    return {
        "attention_chunk_size": _CHUNK,
        "floor_scale": _CHUNK,
        "layer_types": [kind if kind == FULL else "chunked_attention" for kind in types],
        "use_qk_norm": metadata.raw("expert_count") != _MAVERICK_EXPERTS,
    }


ARCHITECTURES: dict[str, Variants] = {
    "llama4": {
        "": GGUFArchitecture(
            "Llama4ForCausalLM",
            keys={
                "expert_feed_forward_length": "intermediate_size",
                "feed_forward_length": "intermediate_size_mlp",
                "interleave_moe_layer_step": "interleave_moe_layer_step",
            },
            required=("expert_count", "interleave_moe_layer_step"),
            gating=SIGMOID,
            shared="feed_forward.shared_expert",
            config=_config,
            other_keys=(SLIDING_PATTERN,),
            names={
                "ffn_gate": "feed_forward.gate_proj",
                "ffn_up": "feed_forward.up_proj",
                "ffn_down": "feed_forward.down_proj",
            },
        )
    },
}
