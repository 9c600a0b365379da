"""Reads the rotary embedding (RopeSpec) from config.json, in the spelling of transformers 4 or 5.

transformers 4 writes `rope_theta` beside `rope_scaling`; transformers 5 writes one object `rope_parameters`, which may
hold one such object per layer type.
"""

from __future__ import annotations

import math
from typing import Any

from moeserve.blocks.rope import RopeSpec
from moeserve.loader.files import Fields

KINDS = ("default", "linear", "llama3", "yarn")
_MAX_FACTOR = 1e6
_MAX_POSITION = 2**27


def read_rope(config: Fields) -> RopeSpec:
    """Returns the rotary embedding; `config`'s defaults hold rope_theta and max_position_embeddings."""
    key, section = _section(config)
    outer = {name: config.values[name] for name in ("rope_theta", "partial_rotary_factor") if name in config.values}
    defaults = {
        "rope_theta": config.raw("rope_theta"),
        "rope_type": section.get("type", "default"),
        "original_max_position_embeddings": config.raw("max_position_embeddings"),
        **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")),
    }
    rope = Fields(config.path, {**outer, **section}, defaults, prefix=f"{key}.")
    kind = rope.choice("rope_type", KINDS)
    theta = rope.number("rope_theta", 1.0, 1e12)
    if rope.values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise rope.error("partial_rotary_factor", "only models that rotate the whole head are supported")
    match kind:
        case "linear":
            return RopeSpec(theta=theta, kind="linear", factor=rope.number("factor", 1.0, _MAX_FACTOR))
        case "llama3":
            return _llama3(config, rope, theta)
        case "yarn":
            return _yarn(config, rope, theta)
    return RopeSpec(theta=theta)


def longest_context(rope: RopeSpec, max_position: int) -> int:
    """Returns the tokens that a model of `max_position` positions can attend over with this rope."""
    stretched = max_position
    if rope.kind == "linear":
        stretched = int(max_position * rope.factor)
    elif rope.kind == "yarn":
        stretched = max(max_position, int(rope.original_max_position * rope.factor))
    return min(stretched, _MAX_POSITION)


def _section(config: Fields) -> tuple[str, dict[str, Any]]:
    """The rope object and its key. Both spellings may be there if they agree; per layer type if all are equal."""
    old, new = (_flat(config, key) for key in ("rope_scaling", "rope_parameters"))
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            raise config.error("rope_scaling", f"it disagrees with rope_parameters about {name}; remove one of the two")
    return ("rope_scaling" if old and not new else "rope_parameters"), {**new, **old}


def _flat(config: Fields, key: str) -> dict[str, Any]:
    section = config.section(key)
    per_type = {name: value for name, value in section.items() if name.endswith("_attention")}
    if not per_type:
        return section
    first, *others = per_type.values()
    if len(per_type) < len(section) or not isinstance(first, dict) or any(other != first for other in others):
        raise config.error(key, "layer types with different rope are not supported")
    return first


def _original(config: Fields, rope: Fields) -> int:
    """Positions before the context was stretched; beside the rope object it has precedence, as in transformers."""
    outer = config.values.get("original_max_position_embeddings") is not None
    return (config if outer else rope).integer("original_max_position_embeddings", 1, _MAX_POSITION)


def _llama3(config: Fields, rope: Fields, theta: float) -> RopeSpec:
    low, high = rope.number("low_freq_factor", 0, _MAX_FACTOR), rope.number("high_freq_factor", 0, _MAX_FACTOR)
    if low >= high:
        raise rope.error("low_freq_factor", f"it must be smaller than high_freq_factor ({high:g})")
    return RopeSpec(
        theta=theta,
        kind="llama3",
        factor=rope.number("factor", 1.0, _MAX_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_original(config, rope),
    )


def _yarn(config: Fields, rope: Fields, theta: float) -> RopeSpec:
    """YaRN (arXiv 2309.00071). The attention factor is resolved to a number here."""
    if rope.raw("truncate") not in (None, True):
        raise rope.error("truncate", "YaRN without rounding of its correction range is not supported")
    original = _original(config, rope)
    factor = rope.optional_number("factor", 1.0, _MAX_FACTOR)
    if factor is None:
        factor = config.integer("max_position_embeddings", 1, _MAX_POSITION) / original
    attention_factor = rope.optional_number("attention_factor", 0, 100.0)
    if attention_factor is None:
        mscale = rope.optional_number("mscale", 0, 100.0)
        mscale_all = rope.optional_number("mscale_all_dim", 0, 100.0)
        if mscale and mscale_all:
            attention_factor = _temperature(factor, mscale) / _temperature(factor, mscale_all)
        else:
            attention_factor = _temperature(factor, 1.0)
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.optional_number("beta_fast", 0, _MAX_FACTOR) or 32.0,
        beta_slow=rope.optional_number("beta_slow", 0, _MAX_FACTOR) or 1.0,
        attention_factor=attention_factor,
    )


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
