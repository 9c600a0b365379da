"""Tables of rotary angles, computed once per model and looked up by position.

Shapes: T tokens, d width of a head. Kinds: default (Su et al. 2021), linear (position
interpolation, Chen et al. 2023), llama3 (Llama 3.1's frequency-dependent scaling), yarn (Peng et
al. 2023), longrope (Ding et al. 2024).
"""

import math

import torch
from torch import Tensor

from moeserve.blocks.rope import RopeSpec
from moeserve.ops.inputs import Positions


def inverse_frequencies(rope: RopeSpec, head_dim: int, *, long: bool = False) -> Tensor:
    """Return the radians per position, fp32 [d / 2].

    long: whether requests may be longer than the original context (longrope).
    """
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    if rope.kind == "longrope":
        return 1.0 / (
            torch.tensor(rope.long_factors if long else rope.short_factors) * rope.theta**exponents
        )
    freqs = 1.0 / rope.theta**exponents
    if rope.still:
        freqs[-rope.still :] = 0.0
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "llama3":
        return _llama3(freqs, rope)
    return _yarn(freqs, rope, head_dim) if rope.kind == "yarn" else freqs


def _llama3(freqs: Tensor, rope: RopeSpec) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those in between."""
    turns = rope.original_max_position / (2 * math.pi / freqs)
    low = rope.low_freq_factor
    band = max(rope.high_freq_factor - low, 1e-9)  # Llama-4 has none
    kept = ((turns - low) / band).clamp(0, 1)
    return (1 - kept) * freqs / rope.factor + kept * freqs


def _yarn(freqs: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Keep dimensions that turn often in the original context, interpolate slow ones, and blend."""

    def dimension(turns: float) -> float:
        """Return the dimension with this number of turns in the original context."""
        return (
            head_dim
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    first = dimension(rope.beta_fast)
    last = dimension(rope.beta_slow)
    if rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    low = max(first, 0)
    high = min(last, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return freqs / rope.factor * ramp + freqs * (1 - ramp)


class RotaryTable:
    """cos and sin of every position below `max_position`, fp32 [max_position, d / 2] each.

    Elements that do not rotate have cos 1 and sin 0. Without rope the table has one row of these,
    for all positions.
    """

    def __init__(
        self, rope: RopeSpec | None, head_dim: int, max_position: int, device: torch.device
    ) -> None:
        self._has_one_row = rope is None
        if rope is None:
            self.cos, self.sin = (
                torch.full((1, head_dim // 2), value, device=device) for value in (1.0, 0.0)
            )
            return
        size = rope.size or head_dim
        long = rope.kind == "longrope" and max_position > rope.original_max_position
        magnitude = rope.long_attention_factor if long else rope.attention_factor
        freqs = inverse_frequencies(rope, size, long=long)
        padding = (0, (head_dim - size) // 2)  # for elements that do not rotate
        # Products are fp32, as in training. Cosines are double: vectorized fp32 code may give other
        # bits for another length of the table.
        angles = (torch.arange(max_position).float()[:, None] * freqs).double()
        cos, sin = ((table * magnitude).float() for table in (angles.cos(), angles.sin()))
        self.cos = torch.nn.functional.pad(cos, padding, value=1.0).to(device)
        self.sin = torch.nn.functional.pad(sin, padding).to(device)

    def __call__(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions, fp32 [T, d / 2] each."""
        positions_T = positions.text_T
        rows_T = torch.zeros_like(positions_T) if self._has_one_row else positions_T
        return self.cos.index_select(0, rows_T), self.sin.index_select(0, rows_T)

    def of_heads(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return cos and sin for `rotary` of ops/elementwise.py, fp32 [T, 1, d] each."""
        cos, sin = self(positions)
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
