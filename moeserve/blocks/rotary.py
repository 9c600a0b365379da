"""Angles of the rotary embedding: one table per model, computed once, looked up by position.

T tokens, d head width. Kinds: default (Su et al. 2021), linear (position interpolation, Chen et al. 2023), llama3
(Llama 3.1's frequency-dependent scaling), yarn (Peng et al. 2023).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeserve.loader.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Returns (fp32 [d / 2] radians per position, the factor on cos and sin)."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    freqs = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return freqs / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(freqs, rope), 1.0
    if rope.kind == "yarn":
        factor = rope.attention_factor
        return _yarn(freqs, rope, head_dim), factor if factor is not None else _yarn_magnitude(rope.factor)
    return freqs, 1.0


def _llama3(freqs: Tensor, rope: RopeSpec) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / freqs
    longest, shortest = (rope.original_max_position / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    share = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * freqs / rope.factor + share * freqs
    scaled = torch.where(wavelengths > longest, freqs / rope.factor, freqs)
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), blended, scaled)


def _yarn(freqs: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Dimensions that turn often within the original context are kept, slow ones interpolated, a ramp between."""

    def dimension(turns: float) -> float:
        """Returns the dimension that turns this often within the original context."""
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return freqs / rope.factor * ramp + freqs * (1 - ramp)


def _yarn_magnitude(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


class RotaryTable:
    """cos and sin of every position below `max_position`, fp32."""

    def __init__(self, rope: RopeSpec, head_dim: int, max_position: int, device: torch.device) -> None:
        freqs, magnitude = inverse_frequencies(rope, head_dim)
        # fp32 products, as in training; cosines in double precision, so that the table's length cannot matter
        angles = (torch.arange(max_position).float()[:, None] * freqs).double()
        self._cos = (angles.cos() * magnitude).float().to(device)
        self._sin = (angles.sin() * magnitude).float().to(device)

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin) as `rotary` takes them: [T, 1, d], sin negative in the first half."""
        cos = self._cos.index_select(0, positions_T)
        sin = self._sin.index_select(0, positions_T)
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
