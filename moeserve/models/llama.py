"""Llama (2, 3, 3.1 and what shares their shape): dense, with every kind of rotary scaling.

Source: arXiv 2302.13971, 2407.21783.
"""

from __future__ import annotations

from typing import Any

from moeserve.loader.fields import Fields
from moeserve.models.config_parts import attention_bias, every_layer_dense, no_window, sizes
from moeserve.models.family import Family


def _fields(config: Fields, num_layers: int) -> dict[str, Any]:
    return {
        **every_layer_dense(config, num_layers),
        **no_window(config, num_layers),
        **attention_bias(config),
        "mlp_bias": config.boolean("mlp_bias"),
    }


FAMILY = Family(
    "LlamaForCausalLM",
    "llama",
    _fields,
    sizes(32000, 4096, 11008, 32, 32, None, 2048) | {"eos_token_id": 2, "mlp_bias": False},
)
