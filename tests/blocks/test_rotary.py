"""Rotary frequencies of every kind against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeserve.blocks.rotary import RotaryTable, inverse_frequencies
from moeserve.loader.spec import RopeSpec

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("linear", {"factor": 3.0}),
        ("llama3", LLAMA3),
        ("yarn", YARN),
        ("yarn", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25}),
    ],
)
def test_same_as_transformers(kind: str, numbers: dict[str, Any], head_dim: int) -> None:
    config = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": kind, "rope_theta": 5e5, **numbers},
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    ours = {("original_max_position" if k.startswith("original") else k): v for k, v in numbers.items()}
    freqs, factor = inverse_frequencies(RopeSpec(kind=kind, theta=5e5, **ours), head_dim)  # type: ignore[arg-type]
    assert torch.allclose(freqs, expected, rtol=1e-6)
    assert factor == pytest.approx(magnitude)


def test_bits_do_not_depend_on_the_length_of_the_table() -> None:
    rope = RopeSpec(kind="yarn", factor=4.0, original_max_position=64)
    positions = torch.tensor([0, 1, 63, 64, 99])
    short = RotaryTable(rope, 24, 100, torch.device("cpu"))(positions)
    long = RotaryTable(rope, 24, 5000, torch.device("cpu"))(positions)
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))
    assert short[0].shape == (5, 1, 24)
