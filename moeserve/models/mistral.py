"""Mistral (7B, Nemo, Large 2; dense): Llama with a sliding window in some releases.

Source: arXiv 2310.06825.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family


def _fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(config, rule=family.same_window(config, family.sliding_window(config)))
    return {"layers": family.layers(config, mixer, family.dense(config))}


FAMILY = family.Family(
    "MistralForCausalLM",
    "mistral",
    _fields,
    family.sizes(32000, 4096, 14336, 32, 32, 8, 131072) | {"eos_token_id": 2, "sliding_window": 4096},
)
