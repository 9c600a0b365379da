"""Qwen3 (dense, 0.6B to 32B): norms on each query and key head.

Source: arXiv 2505.09388.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family


def _fields(config: Fields, num_layers: int) -> family.SpecFields:
    return {
        **family.every_layer_dense(config, num_layers),
        **family.window_per_layer(config, num_layers, lambda layer, limit: layer >= limit),
        **family.attention_bias(config),
        "qk_norm": "head",
    }


FAMILY = family.Family(
    "Qwen3ForCausalLM",
    "qwen3",
    _fields,
    family.sizes(151936, 4096, 22016, 32, 32, 32, 32768)
    | family.QWEN_WINDOWS
    | {"head_dim": 128, "layer_types": None, "max_window_layers": 28},
)
