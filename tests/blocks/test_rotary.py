"""Rotary frequencies of every kind against transformers' own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeserve.blocks.rope import RopeSpec
from moeserve.blocks.rotary import RotaryTable, inverse_frequencies
from moeserve.ops.inputs import Positions

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("linear", {"factor": 3.0}),
        ("llama3", LLAMA3),
        ("yarn", {**YARN, "attention_factor": 0.1 * math.log(4) + 1}),
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
    ours = {
        ("original_max_position" if k.startswith("original") else k): v for k, v in numbers.items()
    }
    rope = RopeSpec(kind=kind, theta=5e5, **ours)  # type: ignore[arg-type]
    assert torch.allclose(inverse_frequencies(rope, head_dim), expected, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(magnitude)


def test_bits_do_not_depend_on_the_length_of_the_table() -> None:
    rope = RopeSpec(kind="yarn", factor=4.0, original_max_position=64)
    short, long = (RotaryTable(rope, 24, length, torch.device("cpu")) for length in (100, 5000))
    assert torch.equal(short.cos, long.cos[:100])
    assert torch.equal(short.sin, long.sin[:100])


def test_positions_of_several_axes_are_not_read_as_text() -> None:
    positions = torch.arange(6)
    text = Positions.of_text(positions)
    assert text.text_T.tolist() == positions.tolist()
    assert text.part(slice(2, 5)).text_T.tolist() == [2, 3, 4]
    with pytest.raises(AssertionError):
        _ = Positions(positions.view(3, 2)).text_T
