"""Phi-3.5-MoE."""

from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import (
    ROPE_FACTORS_LONG,
    ROPE_FACTORS_SHORT,
    GGUFArchitecture,
    Shape,
    Variants,
)
from moeserve.loader.gguf_layers import WINDOW

_ATTENTION_FACTOR = "rope.scaling.attn_factor"
_ORIGINAL_CONTEXT = "rope.scaling.original_context_length"


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the keys of LongRoPE, of biases, and of the window, where 0 is none."""
    config = {
        "lm_head_bias": "output.bias" in tensors,
        "sliding_window": metadata.values.get(WINDOW) or None,
    }
    factors = {
        "short_factor": metadata.raw(ROPE_FACTORS_SHORT),
        "long_factor": metadata.raw(ROPE_FACTORS_LONG),
    }
    if not any(factors.values()):
        return config
    for key in (_ATTENTION_FACTOR, _ORIGINAL_CONTEXT):
        metadata.raw(key)  # CheckpointError if it is missing
    rope = {
        "rope_type": "longrope",
        "rope_theta": metadata.raw("rope.freq_base"),
        "short_mscale": metadata.raw(_ATTENTION_FACTOR),
        "long_mscale": metadata.raw(_ATTENTION_FACTOR),
        "original_max_position_embeddings": metadata.raw(_ORIGINAL_CONTEXT),
    }
    return {**config, "rope_parameters": rope | factors}


ARCHITECTURES: dict[str, Variants] = {
    "phimoe": {
        "": GGUFArchitecture(
            "PhimoeForCausalLM",
            required=("rope.freq_base",),
            config=_config,
            other_keys=(_ATTENTION_FACTOR, ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG),
        )
    },
}
