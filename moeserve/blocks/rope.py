"""The specification of a rotary embedding (rope), and the conversion of layouts.

Kernels rotate the pairs (i, i + d/2) of all d elements of a head, GPT-NeoX's half layout. Other
layouts have the same pairs in another order. So the rows of the query and key products are
reordered once, when weights are loaded. Scores do not change, because they are sums over the
elements of a head. Does not import torch.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """A rotary embedding. Fields without a comment are those of config.json's rope_parameters."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn rounds its range of dimensions outwards to integers
    attention_factor: float = 1.0  # factor of cos and sin
    size: int | None = None  # rotate only the first elements of a head; None: all
    interleaved: bool = False  # pairs are adjacent elements (GPT-J, DeepSeek)
    still: int = 0  # number of the slowest pairs, which are not rotated (Gemma 4)
    # longrope: factors of the wavelengths. The long ones, and long_attention_factor, apply if
    # requests may be longer than original_max_position.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long_attention_factor: float = 1.0


def half_layout(rope: RopeSpec | None, head_dim: int) -> list[int] | None:
    """Return the order that converts a head to the half layout; None if it has it already.

    order[i] is the element of the checkpoint's head that becomes element i. For example, with 4
    elements of which the first 2 rotate -> [0, 2, 1, 3].
    """
    if rope is None or (rope.size in (None, head_dim) and not rope.interleaved):
        return None
    size = rope.size or head_dim
    firsts, seconds = (
        (range(0, size, 2), range(1, size, 2))
        if rope.interleaved
        else (range(size // 2), range(size // 2, size))
    )
    middle = (head_dim + size) // 2
    return [*firsts, *range(size, middle), *seconds, *range(middle, head_dim)]
