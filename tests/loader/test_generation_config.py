"""generation_config.json: which sampling defaults apply, which tokens end an answer, and what is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeserve.errors import CheckpointError
from moeserve.loader.generation_config import generation_defaults
from moeserve.models.hf_config import read_model_spec
from tests.loader.conftest import WriteConfig


def write(model_dir: Path, **values: Any) -> Path:
    (model_dir / "generation_config.json").write_text(json.dumps(values))
    return model_dir


def test_only_sampling_keys_apply_and_null_means_unset(tmp_path: Path) -> None:
    write(
        tmp_path, temperature=0.6, top_p=0.95, top_k=20, min_p=None, repetition_penalty=1.05,
        do_sample=False, max_new_tokens=5, bos_token_id=1, transformers_version="5",
    )  # fmt: skip
    assert generation_defaults(tmp_path) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
    }


def test_without_the_file_nothing_applies(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.6"),
        ("temperature", True),
        ("temperature", 1e300),
        ("top_p", -0.1),
        ("top_p", False),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"generation_config\.json: {key}.*generation_config: none"
    ):
        generation_defaults(write(tmp_path, **{key: value}))


def test_defaults_may_exceed_the_limits_of_requests(tmp_path: Path) -> None:
    """So it is in transformers and vLLM.

    top_p 0 keeps the most likely token, as in transformers.
    """
    write(tmp_path, temperature=3, top_p=0, repetition_penalty=2.5)
    found = generation_defaults(tmp_path)
    assert (found["temperature"], found["repetition_penalty"]) == (3, 2.5)
    assert 0 < found["top_p"] <= 1e-6


def test_a_dangling_file_is_not_taken_for_an_absent_one(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="missing"):
        generation_defaults(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (7, [8, 9], (8, 9)),
        (7, 8, (8,)),
        ([7, 6], None, (7, 6)),
        (None, None, ()),
        (None, [4, 4, 3], (4, 3)),
    ],
)
def test_generation_config_names_the_end_tokens_before_config(
    config: Any, generation: Any, ends: tuple[int, ...], write_config: WriteConfig
) -> None:
    model_dir = write(write_config(eos_token_id=config), eos_token_id=generation)
    assert read_model_spec(model_dir).eos_token_ids == ends
