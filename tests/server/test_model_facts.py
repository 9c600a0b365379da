"""What the files of a model say about it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeserve.server.model_facts import ModelFacts, facts_of
from tests.checkpoints import write_checkpoint
from tests.gguf_files import as_f32, matrices, write_gguf

WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "head_dim": 64}


def facts(path: Path) -> ModelFacts:
    ready = SimpleNamespace(architecture="Qwen3MoeForCausalLM", dtype="float32")
    front: Any = SimpleNamespace(ready=ready, model_dir=path)
    return facts_of(front)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint as it is in the Hugging Face cache."""
    path = tmp_path_factory.mktemp("hub") / "models--some-org--some-model" / "snapshots" / "1234"
    return write_checkpoint("qwen3_moe", path, **WIDE).path


def test_a_directory(folder):
    (folder / "LICENSE.txt").write_text("Do what you want.")
    found = facts(folder)
    assert (found.architecture, found.format, found.quantization) == (
        "qwen3_moe",
        "safetensors",
        "F32",
    )
    assert found.publisher == "some-org"
    assert found.license == "Do what you want."
    assert found.num_bytes == (folder / "model.safetensors").stat().st_size
    assert found.modified_s == (folder / "model.safetensors").stat().st_mtime
    assert found.metadata["qwen3_moe.embedding_length"] == 256


def test_a_license_that_is_a_link_out_of_the_directory_is_not_read(folder, tmp_path):
    other = write_checkpoint("qwen3_moe", tmp_path / "other").path
    os.symlink(folder / "config.json", other / "LICENSE")
    assert facts(other).license == ""


def test_a_gguf_file(folder, tmp_path):
    path = write_gguf("qwen3_moe", folder, tmp_path / "model.gguf", matrices("Q4_K"))
    found = facts(path)
    assert (found.architecture, found.format, found.quantization) == ("qwen3moe", "gguf", "Q4_K")
    assert found.num_bytes == path.stat().st_size
    assert found.metadata["qwen3moe.embedding_length"] == 256
    assert not any(key.startswith("tokenizer.ggml.tokens") for key in found.metadata)


def test_a_split_gguf_file_has_the_bytes_of_all_parts(folder, tmp_path):
    path = write_gguf("qwen3_moe", folder, tmp_path / "model.gguf", as_f32, split=9)
    parts = list(tmp_path.glob("model-*"))
    assert len(parts) > 1
    assert facts(path).num_bytes == sum(part.stat().st_size for part in parts)


@pytest.mark.parametrize("name", ["gone", "gone.gguf"])
def test_files_that_are_gone_leave_what_the_engine_says(tmp_path, name):
    found = facts(tmp_path / name)
    assert (found.architecture, found.quantization) == ("qwen3moe", "F32")
    assert found.format == ("gguf" if name.endswith("gguf") else "safetensors")
