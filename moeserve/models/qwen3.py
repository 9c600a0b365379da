"""Qwen3 (dense, 0.6B to 32B): norms on each query and key head.

Source: arXiv 2505.09388.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family


def _fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(config, qk_norm="head", **family.attention_bias(config))
    mixers = family.window_per_layer(config, mixer, lambda layer, limit: layer >= limit)
    return {"layers": family.layers(config, mixers, family.dense(config))}


FAMILY = family.Family(
    "Qwen3ForCausalLM",
    "qwen3",
    _fields,
    family.sizes(151936, 4096, 22016, 32, 32, 32, 32768)
    | family.QWEN_WINDOWS
    | {"head_dim": 128, "max_window_layers": 28},
)
