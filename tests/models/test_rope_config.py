"""Rope settings in every spelling, against transformers' own functions, and the refusal of what we
do not compute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeserve.blocks.attention import Attention
from moeserve.blocks.rope import RopeSpec
from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec
from tests.loader.conftest import LLAMA, WriteConfig

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def old(**rope: Any) -> dict[str, Any]:
    return {"rope_theta": 5e5, "rope_scaling": rope}


def new(**rope: Any) -> dict[str, Any]:
    return {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, **rope}}


@pytest.mark.parametrize("spell", [old, new])
@pytest.mark.parametrize(
    ("rope", "means"),
    [
        ({"rope_type": "default"}, RopeSpec(theta=5e5)),
        ({"type": "linear", "factor": 2}, RopeSpec(theta=5e5, kind="linear", factor=2.0)),
        (LINEAR, RopeSpec(theta=5e5, kind="linear", factor=4.0)),
        (LLAMA3, RopeSpec(theta=5e5, kind="llama3", factor=8.0, original_max_position=128)),
    ],
    ids=["default", "type", "linear", "llama3"],
)
def test_both_spellings_are_one_rope(
    spell: Any, rope: dict[str, Any], means: RopeSpec, write_config: WriteConfig
) -> None:
    assert rope_of(write_config(**spell(**rope))) == means


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 1.0},
        {"factor": None},
        {"attention_factor": 1.25},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"mscale": 0.7},
        {"beta_fast": 16, "beta_slow": 2.0},
        {"original_max_position_embeddings": 100},
    ],
    ids=str,
)
def test_yarn_scales_attention_as_transformers_does(
    changes: dict[str, Any], write_config: WriteConfig
) -> None:
    rope = {**YARN, **changes}
    config = transformers.LlamaConfig(
        **{
            key: LLAMA[key]
            for key in ("hidden_size", "num_attention_heads", "max_position_embeddings")
        },
        rope_parameters={"rope_theta": 5e5, **rope},
    )
    read = rope_of(write_config(**new(**rope)))
    assert read.attention_factor == ROPE_INIT_FUNCTIONS["yarn"](config)[1]
    assert read.original_max_position == rope["original_max_position_embeddings"]
    assert (read.beta_fast, read.beta_slow) == (
        changes.get("beta_fast", 32),
        changes.get("beta_slow", 1),
    )


def test_original_length_defaults_to_max_position(write_config: WriteConfig) -> None:
    rope = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    assert rope_of(write_config(**old(**rope))).original_max_position == 512


def test_original_length_beside_the_rope_object_wins(write_config: WriteConfig) -> None:
    model_dir = write_config(original_max_position_embeddings=64, **old(**LLAMA3))
    assert rope_of(model_dir).original_max_position == 64


def test_stretched_rope_lengthens_the_context(write_config: WriteConfig) -> None:
    assert read_model_spec(write_config(**old(**LINEAR))).max_position == 2048
    assert read_model_spec(write_config(**old(**YARN))).max_position == 1024
    assert read_model_spec(write_config(**old(**LLAMA3))).max_position == 512


def test_equal_ropes_per_layer_type_are_one(write_config: WriteConfig) -> None:
    nested = {"full_attention": LLAMA3, "sliding_attention": dict(LLAMA3)}
    assert rope_of(write_config(rope_parameters=nested)).kind == "llama3"


def test_both_spellings_at_once_may_complete_each_other(write_config: WriteConfig) -> None:
    rope = rope_of(
        write_config(rope_theta=..., rope_scaling=LINEAR, rope_parameters={"rope_theta": 7e4})
    )
    assert rope == RopeSpec(theta=7e4, kind="linear", factor=4.0)


def rope_of(path: Path) -> RopeSpec:
    mixer = read_model_spec(path).layers[0].mixer
    assert isinstance(mixer, Attention)
    assert mixer.rope
    return mixer.rope


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_scaling": {"rope_type": "longrope"}},
        "rope_scaling.rope_type is 'longrope'; supported: default, linear",
    ),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ({"rope_scaling": {"type": None}}, "rope_type"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object or null"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": True}}, "factor"),
    (
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.5}},
        "must not be larger than high_freq_factor",
    ),
    (
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}},
        "original_max_position_embeddings",
    ),
    ({"rope_scaling": {**YARN, "attention_factor": -1}}, "attention_factor"),
    (
        {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 8.0}},
        "disagrees with rope_parameters about",
    ),
    (
        {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": LINEAR}},
        "layer types with different rope",
    ),
    ({"rope_parameters": {"full_attention": 3, "sliding_attention": 3}}, "layer types"),
    ({"rope_theta": 0}, "rope_parameters.rope_theta is 0"),
    ({"rope_theta": "10000"}, "rope_theta"),
    ({"rope_theta": 10**400}, "rope_theta"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
]


@pytest.mark.parametrize(("changes", "says"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_rope_is_refused(changes: dict[str, Any], says: str, write_config: WriteConfig) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model_spec(write_config(**changes))
    assert says in str(caught.value)
    assert "config.json" in str(caught.value)
