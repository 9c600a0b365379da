"""Qwen3.8-Flash-Next: the constants of its n-grams' hash, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.blocks.ngram_embedding import NgramEmbedding
from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec

from .conftest import Driver

NAME = "qwen4_exp_text"
PROMPT = torch.randint(0, 250, (70,), generator=torch.Generator().manual_seed(1)).tolist()
CONSTANTS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def changed(
    path: Path, folder: Path, change: Callable[[dict[str, Any]], None] | None, **config: Any
) -> Path:
    """Copy a checkpoint, with other tensors and other keys of config.json."""
    values = json.loads((path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    tensors = load_file(path / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def embeddings_of(path: Path) -> dict[int, NgramEmbedding]:
    """Return the n-gram embeddings, by the number of their layer in the checkpoint."""
    return {
        layer.stored_as[0]: layer.mixer
        for layer in read_model_spec(path).layers
        if isinstance(layer.mixer, NgramEmbedding) and layer.stored_as
    }


def test_constants_are_those_that_transformers_writes(make_checkpoint: Any) -> None:
    path = make_checkpoint(NAME).path
    tensors = load_file(path / "model.safetensors")
    embeddings = embeddings_of(path)
    assert list(embeddings) == [0, 2]
    for layer, embedding in embeddings.items():
        for name, values in embedding.constants.items():
            stored = tensors[f"model.layers.{layer}.ple.ple_embedding.{name}"]
            assert stored.dtype == torch.int64
            assert stored.tolist() == list(values)


def test_the_checkpoints_constants_have_precedence(make_checkpoint: Any, tmp_path: Path) -> None:
    """Without them, those that follow from config.json are used."""
    path = make_checkpoint(NAME).path
    expected = Driver(path).prefill("a", PROMPT)

    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(CONSTANTS)]:
            del tensors[name]

    def other(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.ple.ple_embedding.layer_multipliers"] += 2**40

    logits = []
    for change, seed in ((None, 5), (drop, 1234), (drop, 5), (other, 1234)):
        folder = tmp_path / f"{len(logits)}"
        folder.mkdir()
        logits.append(Driver(changed(path, folder, change, seed=seed)).prefill("a", PROMPT))
    assert [torch.equal(each, expected) for each in logits] == [True, True, False, False]


def test_rows_beyond_the_table_are_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    def far(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.ple.ple_embedding.ngram_heads_offsets"] += 100

    path = changed(make_checkpoint(NAME).path, tmp_path, far)
    with pytest.raises(CheckpointError, match=r"lead beyond the table of 672 rows; download"):
        Driver(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("indexer_kv_heads", 2, "an integer from 1 to 1"),
        ("indexer_budget", 50, r"indexer_compress_ratio \(4\) must divide it"),
        ("indexer_head_dim", 12, "it must be at least 16"),
        ("indexer_compress_ratio", 3, "it must divide 16"),
        ("hc_count", 1, "an integer from 2 to"),
        ("output_gate_type", "tanh", "silu, swish, sigmoid"),
        ("ple_layer_ids", [0], "a list of integers from 1 to 4"),
        ("heads_per_ngram", 4096, "an integer from 1 to 64"),
        # of which 12 heads look for prime numbers
        ("ngram_vocab_size_base", 2**31, rf"an integer from 1 to {2**34 // 12}"),
        ("heads_per_ngram", 5, r"10 heads must divide ple_embed_dim \(48\)"),
        ("ple_conv_kernel_size", 7, "its 6 earlier tokens, 3 apart, exceed 16"),
        ("eos_token_id", None, "n-gram embeddings .* need it"),
    ],
)
def test_what_is_refused(
    key: str, value: Any, message: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    values = json.loads((make_checkpoint(NAME).path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {key: value}))
    with pytest.raises(CheckpointError, match=rf"config.json: {key} is .*{message}"):
        read_model_spec(tmp_path)
