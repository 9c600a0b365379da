"""Read the rotary embedding (RopeSpec) from config.json.

transformers 4 writes `rope_theta` and an object `rope_scaling`. transformers 5 writes one object
`rope_parameters`, which may contain one such object per layer type.
"""

import math
from collections.abc import Sequence
from typing import Any

from moeserve.blocks.rope import RopeSpec
from moeserve.loader.fields import Fields

KINDS = ("default", "linear", "llama3", "yarn")
_MAX_FACTOR = 1e6
_MAX_POSITION = 2**27
_OPTIONAL = (
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "alpha",
)


def read_rope(
    config: Fields,
    head_dim: int,
    layer_type: str | None = None,
    *,
    partial: bool | None = False,
    interleaved: bool = False,
    extra_kinds: Sequence[str] = (),
) -> RopeSpec:
    """Read the rotary embedding of heads of `head_dim` elements.

    config: its defaults must have rope_theta and max_position_embeddings.
    layer_type: selects an object in `rope_parameters`, if they differ.
    partial: True: partial_rotary_factor applies. False: it is rejected unless it is 1. None: it is
        ignored, because head_dim already is the part of a head that is rotated.
    interleaved: whether the elements of a pair are neighbours.
    extra_kinds: kinds that are supported for this family only.
    """
    rope = rope_fields(config, layer_type)
    kind = rope.choice("rope_type", (*KINDS, *extra_kinds))
    theta = rope.number("rope_theta", 1.0, 1e12)
    share = rope.optional_number("partial_rotary_factor", 0, 1.0)
    if kind == "proportional":  # the factor is a share of the whole head's pairs
        return RopeSpec(theta=theta, still=head_dim // 2 - int((share or 1.0) * head_dim // 2))
    size = _rotated_size(rope, head_dim, share, partial)
    # "rope_interleaved_rows" and "rope_factors" come from GGUF files (loader/gguf_config.py).
    layout: dict[str, Any] = {
        "size": None if size == head_dim else size,
        "interleaved": interleaved or config.values.get("rope_interleaved_rows") is True,
    }
    for fields in (rope, config):
        if fields.values.get("rope_factors") is not None:
            return RopeSpec(theta=theta, **_gguf_factors(config, rope, fields, size), **layout)
    match kind:
        case "linear":
            return RopeSpec(
                theta=theta, kind="linear", factor=rope.number("factor", 1.0, _MAX_FACTOR), **layout
            )
        case "llama3":
            return RopeSpec(theta=theta, kind="llama3", **_llama3(config, rope), **layout)
        case "yarn":
            return RopeSpec(theta=theta, kind="yarn", **_yarn(config, rope), **layout)
        case "dynamic":  # with a fixed alpha (Hunyuan), which only changes the base
            return RopeSpec(
                theta=theta * rope.number("alpha", 1.0, _MAX_FACTOR) ** (size / (size - 2)),
                **layout,
            )
        case "longrope":
            return RopeSpec(theta=theta, kind="longrope", **_longrope(config, rope, size), **layout)
    return RopeSpec(theta=theta, **layout)


def rope_fields(config: Fields, layer_type: str | None = None) -> Fields:
    """Return the keys of the rotary embedding, in either spelling."""
    key, section = _section(config, layer_type)
    outer = {
        name: config.values[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if name in config.values
    }
    defaults = {
        "rope_theta": config.raw("rope_theta"),
        "rope_type": section.get("type", "default"),
        "original_max_position_embeddings": config.raw("max_position_embeddings"),
        "partial_rotary_factor": config.defaults.get("partial_rotary_factor"),
        **dict.fromkeys(_OPTIONAL),
    }
    return Fields(config.path, {**outer, **section}, defaults, prefix=f"{key}.")


def longest_context(rope: RopeSpec, max_position: int) -> int:
    """Return the longest context of a model with `max_position` positions and this embedding."""
    longest = max_position
    if rope.kind == "linear":
        longest = int(max_position * rope.factor)
    elif rope.kind == "yarn":
        longest = max(max_position, int(rope.original_max_position * rope.factor))
    return min(longest, _MAX_POSITION)


def temperature(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature for a context that is extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _section(config: Fields, layer_type: str | None) -> tuple[str, dict[str, Any]]:
    """Return the key of the rope object, and the object. Both spellings are accepted together if
    they agree.
    """
    scaling, parameters = (
        _of_layer_type(config, key, layer_type) for key in ("rope_scaling", "rope_parameters")
    )
    if "rope_parameters" not in config.values and scaling:
        parameters = {}  # a given rope_scaling replaces the family's default
    for name in scaling.keys() & parameters.keys():
        if scaling[name] != parameters[name]:
            raise config.error(
                "rope_scaling",
                f"it disagrees with rope_parameters about {name}; remove one of the two",
            )
    key = "rope_scaling" if scaling and not parameters else "rope_parameters"
    return key, {**parameters, **scaling}


def _of_layer_type(config: Fields, key: str, layer_type: str | None) -> dict[str, Any]:
    """Return the rope object of a layer type, or of all layer types if they are equal."""
    section = config.section(key)
    per_type = {name: value for name, value in section.items() if name.endswith("_attention")}
    if not per_type:
        return section
    if layer_type is not None and isinstance(chosen := per_type.get(layer_type), dict):
        return chosen
    first, *others = per_type.values()
    if (
        len(per_type) < len(section)
        or not isinstance(first, dict)
        or any(other != first for other in others)
    ):
        raise config.error(key, "layer types with different rope are not supported")
    return first


def _original_max_position(config: Fields, rope: Fields) -> int:
    """Return the length of the context before its extension.

    A value outside the rope object has precedence, as in transformers.
    """
    key = "original_max_position_embeddings"
    source = rope if config.values.get(key) is None else config
    return source.integer(key, 1, _MAX_POSITION)


def _llama3(config: Fields, rope: Fields) -> dict[str, Any]:
    low = rope.number("low_freq_factor", 0, _MAX_FACTOR)
    high = rope.number("high_freq_factor", 0, _MAX_FACTOR)
    if low > high:
        raise rope.error(
            "low_freq_factor", f"it must not be larger than high_freq_factor ({high:g})"
        )
    return {
        "factor": rope.number("factor", 1.0, _MAX_FACTOR),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position": _original_max_position(config, rope),
    }


def _yarn(config: Fields, rope: Fields) -> dict[str, Any]:
    """Read YaRN (arXiv 2309.00071). If attention_factor is omitted, it is computed here."""
    original = _original_max_position(config, rope)
    factor = rope.optional_number("factor", 1.0, _MAX_FACTOR)
    if factor is None:
        factor = config.integer("max_position_embeddings", 1, _MAX_POSITION) / original
    attention_factor = rope.optional_number("attention_factor", 0, 100.0)
    if attention_factor is None:
        mscale = rope.optional_number("mscale", 0, 100.0)
        mscale_all = rope.optional_number("mscale_all_dim", 0, 100.0)
        if mscale and mscale_all:
            attention_factor = temperature(factor, mscale) / temperature(factor, mscale_all)
        else:
            attention_factor = temperature(factor, 1.0)
    return {
        "factor": factor,
        "original_max_position": original,
        "beta_fast": rope.optional_number("beta_fast", 0, _MAX_FACTOR) or 32.0,
        "beta_slow": rope.optional_number("beta_slow", 0, _MAX_FACTOR) or 1.0,
        "truncate": rope.raw("truncate") is None or rope.boolean("truncate"),
        "attention_factor": attention_factor,
    }


def _rotated_size(rope: Fields, head_dim: int, share: float | None, partial: bool | None) -> int:
    """Return how many elements of a head are rotated."""
    if partial is False and share not in (None, 1.0):
        raise rope.error("partial_rotary_factor", "this architecture rotates the whole head")
    size = int(head_dim * share) if share and partial else head_dim
    if size < 2 or size % 2:
        raise rope.error(
            "partial_rotary_factor",
            f"{size} of {head_dim} elements would rotate, which is not even",
        )
    return size


def _gguf_factors(config: Fields, rope: Fields, factors: Fields, size: int) -> dict[str, Any]:
    """Read the factors of a GGUF file, which are the same for short and long contexts.

    factors: the one of `config` and `rope` that has them.
    """
    if rope.raw("rope_type") != "default":
        raise rope.error("rope_type", "a file with rope_freqs has no other scaling")
    numbers = _factors(factors, "rope_factors", size)
    return {
        "kind": "longrope",
        "original_max_position": config.integer("max_position_embeddings", 1, _MAX_POSITION),
        "short_factors": numbers,
        "long_factors": numbers,
    }


def _longrope(config: Fields, rope: Fields, size: int) -> dict[str, Any]:
    """Read LongRoPE (arXiv 2402.13753) with the two attention factors of Phi-3.5-MoE."""
    return {
        "original_max_position": _original_max_position(config, rope),
        "short_factors": _factors(rope, "short_factor", size),
        "long_factors": _factors(rope, "long_factor", size),
        "attention_factor": rope.number("short_mscale", 0, 100.0),
        "long_attention_factor": rope.number("long_mscale", 0, 100.0),
    }


def _factors(fields: Fields, key: str, size: int) -> tuple[float, ...]:
    """Read one factor per rotated pair."""
    values = fields.raw(key)
    has_right_length = isinstance(values, list) and len(values) == size // 2
    if not has_right_length or any(
        type(value) not in (int, float) or not 0.01 <= value <= _MAX_FACTOR for value in values
    ):
        raise fields.error(
            key, f"it must be a list of {size // 2} numbers from 0.01 to {_MAX_FACTOR:g}"
        )
    return tuple(map(float, values))
