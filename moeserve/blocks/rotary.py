"""Angles of the rotary embedding: one table per model, computed once, looked up by position.

T tokens, d head width. Kinds: default (Su et al. 2021), linear (position interpolation, Chen et al. 2023), llama3
(Llama 3.1's frequency-dependent scaling), yarn (Peng et al. 2023).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeserve.loader.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Returns the radians per position, fp32 [d / 2]."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    freqs = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "llama3":
        return _llama3(freqs, rope)
    return _yarn(freqs, rope, head_dim) if rope.kind == "yarn" else freqs


def _llama3(freqs: Tensor, rope: RopeSpec) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns, low = rope.original_max_position / (2 * math.pi / freqs), rope.low_freq_factor
    kept = ((turns - low) / (rope.high_freq_factor - low)).clamp(0, 1)
    return (1 - kept) * freqs / rope.factor + kept * freqs


def _yarn(freqs: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Dimensions that turn often within the original context are kept, slow ones interpolated, a ramp between."""

    def dimension(turns: float) -> float:
        """Returns the dimension that turns this often within the original context."""
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return freqs / rope.factor * ramp + freqs * (1 - ramp)


def rotary_tables(rope: RopeSpec, head_dim: int, max_position: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of every position below `max_position`, fp32 [max_position, d / 2] each."""
    freqs, magnitude = inverse_frequencies(rope, head_dim), rope.attention_factor
    # fp32 products, as in training; cosines in double precision, so that the tables' length cannot matter
    angles = (torch.arange(max_position).float()[:, None] * freqs).double()
    return (angles.cos() * magnitude).float().to(device), (angles.sin() * magnitude).float().to(device)
