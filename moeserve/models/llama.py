"""Llama (2, 3, 3.1 and what shares their shape): dense, with every kind of rotary scaling.

Source: arXiv 2302.13971, 2407.21783.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family


def _fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(config, rule=family.no_window(config), **family.attention_bias(config))
    mlp = family.dense(config, bias=config.boolean("mlp_bias"))
    return {"layers": family.layers(config, mixer, mlp)}


FAMILY = family.Family(
    "LlamaForCausalLM",
    "llama",
    _fields,
    family.sizes(32000, 4096, 11008, 32, 32, None, 2048) | {"eos_token_id": 2, "mlp_bias": False},
)
