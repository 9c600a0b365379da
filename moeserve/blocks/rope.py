"""A rotary embedding in numbers, and how every published layout becomes the one that kernels know.
No torch here.

Kernels rotate the pairs (i, i + d/2) of all d elements of a head (GPT-NeoX's half layout). Other
layouts are orders of the same pairs, so the rows of the query and key products are reordered once,
while weights are loaded: scores are sums over a head's elements and do not depend on their order.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding. kind: `default`, `linear`, `llama3`, `yarn` or `longrope`; numbers as in
    config.json's rope_parameters.

    size: elements of a head that rotate, the first ones; None: all. interleaved: pairs lie side by
    side (GPT-J, DeepSeek) and not half a head apart. still: so many of the slowest pairs do not
    rotate (Gemma 4). short_factors, long_factors: of each wavelength (longrope); the long ones, and
    long_attention_factor, where requests may have more than the original positions.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # whether yarn rounds its range of dimensions outwards
    attention_factor: float = 1.0  # on cos and sin
    size: int | None = None
    interleaved: bool = False
    still: int = 0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long_attention_factor: float = 1.0


def half_layout(rope: RopeSpec | None, head_dim: int) -> list[int] | None:
    """Return the published element that each element of a head in the half layout is; None where
    nothing moves.

    4 elements, 2 of which rotate: (0, 1), the others in between -> [0, 2, 1, 3]
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
