"""Mellum 2."""

from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import (
    SLIDING_PATTERN,
    SLIDING_THETA,
    GGUFArchitecture,
    Shape,
    Variants,
)
from moeserve.loader.gguf_layers import WINDOW, layer_types


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the types of layers. Without a window, all have full attention."""
    return {"layer_types": layer_types(metadata, period=4)} if WINDOW in metadata.values else {}


ARCHITECTURES: dict[str, Variants] = {
    "mellum": {
        "": GGUFArchitecture(
            "MellumForCausalLM",
            defaults={"norm_topk_prob": True},
            required=("attention.key_length",),
            sliding_rope=True,
            config=_config,
            other_keys=(SLIDING_PATTERN, SLIDING_THETA),
        )
    },
}
