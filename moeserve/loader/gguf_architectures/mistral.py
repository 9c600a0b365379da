"""Mistral 4: Mistral-Small-4, and Mistral-Large-3, whose architecture is `deepseek2`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import GGUFArchitecture, Shape, Variants

SLOPE = "attention.temperature_scale"  # slope of the scale of queries
_EVERY = "attention.temperature_length"  # positions after which that scale grows
_ORIGINAL_LENGTH = "rope.scaling.original_context_length"


def _check_queries(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return {}: reject a scale of queries that grows at other positions than YaRN's."""
    every = metadata.values.get(_EVERY)
    original = metadata.values.get(_ORIGINAL_LENGTH)
    if every not in (None, original):
        raise metadata.error(_EVERY, f"supported: {original}, {_ORIGINAL_LENGTH}")
    return {}


MISTRAL_4 = GGUFArchitecture(
    "Mistral4ForCausalLM",
    required=("attention.q_lora_rank", _ORIGINAL_LENGTH),
    rope_keys={SLOPE: "llama_4_scaling_beta"},
    config=_check_queries,
    other_keys=(_EVERY,),
)
ARCHITECTURES: dict[str, Variants] = {
    # The converter omits the slope. Every published model has this one.
    "mistral4": {"": replace(MISTRAL_4, rope_defaults={"llama_4_scaling_beta": 0.1})},
}
