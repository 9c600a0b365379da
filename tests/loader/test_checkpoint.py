"""A model's files, and what is rejected: missing shards, duplicates, bad indexes, pickles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import first_dtype, open_checkpoint
from moeserve.loader.load_plan import LoadPlan, Param, Piece, check_plan


def shard(model_dir: Path, name: str, *tensors: str) -> None:
    save_file({tensor: torch.zeros(2) for tensor in tensors}, model_dir / name)


def index(model_dir: Path, weight_map: Any) -> None:
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


A = "model-00001-of-00002.safetensors"
B = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("with_index", [False, True])
def test_shards_are_one_checkpoint_with_or_without_index(with_index: bool, tmp_path: Path) -> None:
    shard(tmp_path, A, "x", "y")
    shard(tmp_path, B, "z")
    if with_index:
        index(tmp_path, {"x": A, "y": A, "z": B})
    checkpoint = open_checkpoint(tmp_path)
    assert {name: tensor.path.name for name, tensor in checkpoint.tensors.items()} == {
        "x": A,
        "y": A,
        "z": B,
    }


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    shard(tmp_path, A, "x")
    shard(tmp_path, "consolidated.safetensors", "x", "other")
    index(tmp_path, {"x": A})
    assert set(open_checkpoint(tmp_path).tensors) == {"x"}


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    shard(tmp_path, "model.safetensors", "x")
    shard(tmp_path, A, "y")
    index(tmp_path, {"y": A})
    assert set(open_checkpoint(tmp_path).tensors) == {"x"}


def test_a_shard_that_the_index_names_but_is_not_there(tmp_path: Path) -> None:
    shard(tmp_path, A, "x")
    index(tmp_path, {"x": A, "z": B})
    with pytest.raises(CheckpointError, match=f"{B} is missing"):
        open_checkpoint(tmp_path)


def test_an_index_that_has_a_tensor_in_another_file(tmp_path: Path) -> None:
    shard(tmp_path, A, "x")
    shard(tmp_path, B, "z")
    index(tmp_path, {"x": B, "z": B, "y": A})
    with pytest.raises(
        CheckpointError,
        match=f"'x' in .*, but it is in {A}; index and files are of different models",
    ):
        open_checkpoint(tmp_path)


def test_an_index_may_name_a_tensor_that_no_file_has(tmp_path: Path) -> None:
    """Quantizers leave such an entry for a tied head.

    If the model needs the tensor, the load plan reports that it is missing.
    """
    shard(tmp_path, A, "x")
    index(tmp_path, {"x": A, "lm_head.weight": A})
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == {"x"}
    names = ("x", "lm_head.weight")
    params = tuple(Param(name, (2,)) for name in names)
    pieces = tuple(Piece(name, (2,), name) for name in names)
    check_plan(checkpoint, LoadPlan(params[:1], pieces[:1]))
    with pytest.raises(
        CheckpointError,
        match=rf"tensor 'lm_head.weight' \[2\] is missing from {A}, where the index has it",
    ):
        check_plan(checkpoint, LoadPlan(params, pieces))


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    shard(tmp_path, A, "x", "y")
    shard(tmp_path, B, "y")
    with pytest.raises(CheckpointError, match=f"'y' is in {A} and in {B}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {},
        [],
        *(
            {"x": file}
            for file in (3, "model.bin", "../u.safetensors", "/x.safetensors", "\0.safetensors")
        ),
    ],
    ids=repr,
)
def test_a_bad_index_is_refused(weight_map: Any, tmp_path: Path) -> None:
    shard(tmp_path, A, "x")
    index(tmp_path, weight_map)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_never_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(
        CheckpointError, match=r"can run code .* save_pretrained, which writes safetensors"
    ):
        open_checkpoint(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors"):
        open_checkpoint(tmp_path)


def test_first_dtype_is_in_the_words_of_config_json(tmp_path: Path) -> None:
    assert first_dtype(tmp_path) is None
    save_file(
        {"ids": torch.zeros(1, dtype=torch.int64), "w": torch.zeros(4).bfloat16()},
        tmp_path / "a.safetensors",
    )
    assert first_dtype(tmp_path) == "bfloat16"
