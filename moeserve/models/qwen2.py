"""Qwen2 and Qwen2.5 (dense): Llama with biases of queries, keys and values.

Source: arXiv 2407.10671.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family


def _fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(config, qkv_bias=True)
    mixers = family.window_per_layer(config, mixer, lambda layer, limit: layer >= limit)
    return {"layers": family.layers(config, mixers, family.dense(config))}


FAMILY = family.Family(
    "Qwen2ForCausalLM",
    "qwen2",
    _fields,
    family.sizes(151936, 4096, 22016, 32, 32, 32, 32768) | family.QWEN_WINDOWS | {"max_window_layers": 28},
)
