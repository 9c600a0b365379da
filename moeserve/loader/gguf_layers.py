"""Reads what differs between the layers of a GGUF model: attention, heads, and experts.

Metadata are those of one architecture, without the prefix "ARCHITECTURE.".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import SLIDING_PATTERN, Shape

FULL = "full_attention"
SLIDING = "sliding_attention"
WINDOW = "attention.sliding_window"
RECURRENT = "linear_attention"
_MAX_LAYERS = 1000


def num_layers(metadata: Fields) -> int:
    """Return the number of decoder layers, without those for multi-token prediction (MTP)."""
    count = metadata.integer("block_count", 1, _MAX_LAYERS)
    return count - metadata.integer("nextn_predict_layers", 0, count - 1)


def layer_values(metadata: Fields, key: str) -> list[Any]:
    """Return the value of each decoder layer.

    `metadata` has an array, or one value for all layers.
    """
    count = num_layers(metadata)
    value = metadata.raw(key)
    if not isinstance(value, list):
        return [value] * count
    lengths = (count, metadata.integer("block_count", 1, _MAX_LAYERS))  # without, with MTP layers
    if len(value) not in lengths:
        raise metadata.error(key, f"it must have a value for each of {count} layers")
    return value[:count]


def layer_types(
    metadata: Fields, period: int | None = None, *, full_first: bool = False
) -> list[str]:
    """Return the type of attention of each decoder layer.

    period: one of so many layers has full attention, if the file does not say. None: it must say.
    full_first: it is the first layer of a period, not the last.
    """
    if SLIDING_PATTERN not in metadata.values and period is not None:
        metadata = replace(metadata, values={**metadata.values, SLIDING_PATTERN: period})
    if not isinstance(metadata.raw(SLIDING_PATTERN), list):
        period = metadata.integer(SLIDING_PATTERN, 1, _MAX_LAYERS)
        full = 0 if full_first else period - 1
        return [FULL if i % period == full else SLIDING for i in range(num_layers(metadata))]
    slides = layer_values(metadata, SLIDING_PATTERN)
    if any(each not in (0, 1) for each in slides):
        raise metadata.error(SLIDING_PATTERN, "it must be a list of true and false")
    return [SLIDING if each else FULL for each in slides]


def values_by_type(metadata: Fields, key: str, types: Sequence[str]) -> dict[str, Any]:
    """Return the value of the layers of each type: type -> value.

    types: the type of each layer.
    """
    found: dict[str, Any] = {}
    for kind, value in zip(types, layer_values(metadata, key), strict=True):
        if found.setdefault(kind, value) != value:
            raise metadata.error(key, f"it must be the same for all layers with {kind}")
    return found


def mlp_layer_types(metadata: Fields, tensors: Mapping[str, Shape]) -> list[str]:
    """Return for each decoder layer whether it has experts ("sparse"), or is "dense"."""
    return [
        "sparse" if f"blk.{i}.ffn_gate_inp.weight" in tensors else "dense"
        for i in range(num_layers(metadata))
    ]


def rotated_share(rotated: int, size: int) -> float:
    """Return partial_rotary_factor: the share of `size` elements of a head that are rotated.

    It is rounded so that int(size * share) is `rotated`.
    """
    share = rotated / size
    return share if int(size * share) == rotated else math.nextafter(share, 1.0)


def recurrent_layers(metadata: Fields) -> dict[str, Any]:
    """Return the keys of config.json for layers of which those without KV heads are recurrent."""
    key = "attention.head_count_kv"
    counts = layer_values(metadata, key)
    if any(type(count) is not int or count < 0 for count in counts):
        raise metadata.error(key, "it must have an integer from 0 for each layer")
    if len({*counts} - {0}) > 1:
        raise metadata.error(key, "layers with attention must have the same number of KV heads")
    return {
        "layer_types": [FULL if count else RECURRENT for count in counts],
        "num_key_value_heads": max(counts) or metadata.raw("attention.head_count"),
    }


def depthwise(shape: Shape) -> Shape:
    """Return the shape of a convolution's weight or bias in a Hugging Face checkpoint.

    [channels, inputs] -> [channels, 1, inputs]
    """
    return (shape[0], 1, shape[1]) if len(shape) == 2 else shape


def flat(shape: Shape) -> Shape:
    """Return the shape of a vector that llama.cpp stores as a matrix: [4, 32] -> [128]."""
    return (math.prod(shape),)
