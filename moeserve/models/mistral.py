"""Mistral (7B, Nemo, Large 2; dense): Llama with a sliding window in some releases.

Source: arXiv 2310.06825.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.models.spec import layer_specs


def _fields(config: Fields) -> family.SpecFields:
    window = config.optional_integer("sliding_window", 1, family.MAX_POSITION)
    mixers = family.with_windows(family.attention(config), family.same_window(config, window))
    return {"layers": layer_specs(mixers, [family.dense(config)] * len(mixers))}


FAMILY = family.Family(
    "MistralForCausalLM",
    "mistral",
    _fields,
    family.sizes(32000, 4096, 14336, 32, 32, 8, 131072) | {"eos_token_id": 2, "sliding_window": 4096},
)
