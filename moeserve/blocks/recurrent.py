"""What the recurrent mixers have in common, in numbers: the rule of their caches, and the tensors in them."""

from dataclasses import dataclass

from moeserve.blocks.mixer import CacheTensor, Mixer
from moeserve.blocks.rope import RopeSpec
from moeserve.engine.kv_rule import KVRule
from moeserve.ops.rules import TILE

TILED = KVRule(tile=TILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentMixer(Mixer):
    """The part of `Mixer` that is alike for all blocks with a state. States are fp32 whatever the other caches are."""

    rope: RopeSpec | None = None
    rule: KVRule = TILED


def conv_cache(channels: int, inputs: int) -> tuple[CacheTensor, ...]:
    """Returns what `ops.causal_conv` keeps: a tile's inputs, and those before its border that it still reads."""
    return CacheTensor("conv", 1, channels), CacheTensor("conv_border", inputs - 1, channels, per_tile=True)


def recurrence_cache(groups: int, heads: int, dim: int, v_dim: int, decays: int = 1) -> tuple[CacheTensor, ...]:
    """Returns what `ops.recurrence` keeps: the state at a tile's border, and k, u and s of its tokens."""
    return (
        CacheTensor("state", heads, dim * v_dim, per_tile=True),
        CacheTensor("k", groups, dim),
        CacheTensor("u", heads, v_dim),
        CacheTensor("decay", heads, decays),
    )
