"""Qwen2 and Qwen2.5 (dense): Llama with biases of queries, keys and values.

Source: arXiv 2407.10671.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.models.spec import layer_specs


def _fields(config: Fields) -> family.SpecFields:
    windows = family.window_per_layer(config, lambda layer, limit: layer >= limit)
    mixers = family.with_windows(family.attention(config, qkv_bias=True), windows)
    return {"layers": layer_specs(mixers, [family.dense(config)] * len(mixers))}


FAMILY = family.Family(
    "Qwen2ForCausalLM",
    "qwen2",
    _fields,
    family.sizes(151936, 4096, 22016, 32, 32, 32, 32768) | family.QWEN_WINDOWS | {"max_window_layers": 28},
)
