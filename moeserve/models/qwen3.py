"""Qwen3 (dense, 0.6B to 32B): norms on each query and key head.

Source: arXiv 2505.09388.
"""

from __future__ import annotations

from typing import Any

from moeserve.loader.fields import Fields
from moeserve.models.config_parts import QWEN_WINDOWS, attention_bias, every_layer_dense, sizes, window_per_layer
from moeserve.models.family import Family


def _fields(config: Fields, num_layers: int) -> dict[str, Any]:
    return {
        **every_layer_dense(config, num_layers),
        **window_per_layer(config, num_layers, lambda layer, limit: layer >= limit),
        **attention_bias(config),
        "qk_norm": "head",
    }


FAMILY = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    _fields,
    sizes(151936, 4096, 22016, 32, 32, 32, 32768)
    | QWEN_WINDOWS
    | {"head_dim": 128, "layer_types": None, "max_window_layers": 28},
)
