"""Llama (2, 3, 3.1 and what shares their shape): dense, with every kind of rotary scaling.

Source: arXiv 2302.13971, 2407.21783.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family


def _fields(config: Fields, num_layers: int) -> family.SpecFields:
    return {
        **family.every_layer_dense(config, num_layers),
        **family.no_window(config, num_layers),
        **family.attention_bias(config),
        "mlp_bias": config.boolean("mlp_bias"),
    }


FAMILY = family.Family(
    "LlamaForCausalLM",
    "llama",
    _fields,
    family.sizes(32000, 4096, 11008, 32, 32, None, 2048) | {"eos_token_id": 2, "mlp_bias": False},
)
