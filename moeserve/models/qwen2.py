"""Qwen2, Qwen2.5 and Qwen3 (dense): Llama with biases of queries, keys and values, or with norms on each query and key
head.

Source: arXiv 2407.10671, 2505.09388.
"""

from typing import Any

from moeserve.loader.files import Fields
from moeserve.models import family


def _fields(config: Fields, **options: Any) -> family.SpecFields:
    mixer = family.attention(config, **options)
    mixers = family.window_per_layer(config, mixer, lambda layer, limit: layer >= limit)
    return {"layers": family.layers(config, mixers, family.dense(config))}


_DEFAULTS = family.sizes(151936, 4096, 22016, 32, 32, 32, 32768) | family.QWEN_WINDOWS | {"max_window_layers": 28}
FAMILIES = (
    family.Family("Qwen2ForCausalLM", "qwen2", lambda config: _fields(config, qkv_bias=True), _DEFAULTS),
    family.Family(
        "Qwen3ForCausalLM",
        "qwen3",
        lambda config: _fields(config, qk_norm="head", **family.attention_bias(config)),
        _DEFAULTS | {"head_dim": 128},
    ),
)
