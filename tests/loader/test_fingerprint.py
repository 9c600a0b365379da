"""Fingerprints: equal files have equal ones in any folder.

Other weights under the same names have a different one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import fingerprint, open_checkpoint
from tests.runner.expert_checkpoint import write_experts


def write(folder: Path, **settings: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Some"]}')
    write_experts(folder, torch.bfloat16, fused=False, **settings)  # type: ignore[arg-type]
    return folder


def test_copies_are_equal_and_other_weights_are_not(tmp_path: Path) -> None:
    first = write(tmp_path / "a")
    other = write(tmp_path / "b", seed=1)
    copy = Path(shutil.copytree(first, tmp_path / "c"))
    os.utime(copy / "model.safetensors", (1, 1))
    prints = [fingerprint(open_checkpoint(folder)) for folder in (first, copy, other)]
    assert prints[0] == prints[1] != prints[2]
    assert (first / "model.safetensors").stat().st_size == (
        other / "model.safetensors"
    ).stat().st_size
    (copy / "config.json").write_text('{"architectures": ["Some"], "rope_theta": 7}')
    assert fingerprint(open_checkpoint(copy)) not in prints


def test_one_tensor_that_differs_is_seen_where_there_are_few(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    before = fingerprint(checkpoint)
    seen = 0
    assert len(load_file(path)) == len(checkpoint.tensors)
    for tensor in checkpoint.tensors.values():
        whole = bytearray(path.read_bytes())
        whole[tensor.offset + tensor.num_bytes // 2] ^= 1
        kept = path.read_bytes()
        path.write_bytes(whole)
        seen += fingerprint(checkpoint) != before
        path.write_bytes(kept)
    assert seen == len(checkpoint.tensors)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "a"))
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read.*model\.safetensors"):
        fingerprint(checkpoint)
