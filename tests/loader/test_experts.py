"""Experts read one by one: the same bits as at start, whatever the checkpoint; files that change
are noticed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moeserve.errors import CheckpointError
from moeserve.loader import experts as module
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.experts import ExpertFiles
from moeserve.models.load_plan import expert_load_plan
from tests.runner.expert_checkpoint import DTYPES, SPEC, E, write_experts


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_has_the_bits_of_the_file(
    tmp_path: Path,
    fused: bool,
    stored: torch.dtype,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 500)
    w13, w2 = write_experts(tmp_path, stored, fused)
    files = expert_files(tmp_path, dtype)
    read_bytes = 0

    def work(num_bytes: int) -> None:
        nonlocal read_bytes
        read_bytes += num_bytes

    for layer in (1, 0):
        for expert in (3, 0, E - 1, 3):
            got13, got2 = files.read(layer, expert, work)
            assert torch.equal(got13, w13[layer, expert].to(dtype))
            assert torch.equal(got2, w2[layer, expert].to(dtype))
            assert got13.untyped_storage().nbytes() == got13.nbytes
    assert read_bytes == 2 * 8 * (w13[0, 0].nbytes + w2[0, 0].nbytes)  # each one twice
    files.check()
    files.close()


def expert_files(folder: Path, dtype: torch.dtype = torch.float32) -> ExpertFiles:
    checkpoint = open_checkpoint(folder)
    names = checkpoint.tensors.keys()
    return ExpertFiles(
        checkpoint, lambda layer, e: expert_load_plan(SPEC, names, layer, [e]), dtype
    )


def change_bytes(path: Path) -> None:
    """Other weights, the same size and the same time of modification: as a program does that maps
    the file.
    """
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(os.urandom(4096))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 1))


@pytest.mark.parametrize("harm", [truncate, touch])
def test_a_file_that_is_written_to_is_refused(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    write_experts(tmp_path, torch.float32, fused=False)
    files = expert_files(tmp_path)
    files.read(0, 0)
    harm(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since the start"):
        files.read(0, 1)
    with pytest.raises(CheckpointError, match="has changed since the start"):
        files.check()


@pytest.mark.parametrize("harm", [truncate, touch, change_bytes])
def test_a_write_in_the_middle_of_a_read_is_noticed(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    write_experts(tmp_path, torch.float32, fused=True)
    files = expert_files(tmp_path)
    files.read(1, E - 1)
    reads = 0

    def work(num_bytes: int) -> None:
        nonlocal reads
        reads += 1
        if reads == 2:  # the first pass is over
            harm(tmp_path / "model.safetensors")

    with pytest.raises(
        CheckpointError,
        match=r"has changed since the start|two reads of .* differ|ended inside",
    ):
        files.read(1, E - 1, work)


def test_an_expert_that_comes_back_must_be_the_same(tmp_path: Path) -> None:
    write_experts(tmp_path, torch.float32, fused=True)
    files = expert_files(tmp_path)
    last = (1, E - 1)
    files.read(*last)
    change_bytes(tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"expert 7 of MoE layer 1 has CRC-32 [0-9a-f]{8}, earlier [0-9a-f]{8}",
    ):
        files.read(*last)


def test_a_file_replaced_under_its_name_does_no_harm(tmp_path: Path) -> None:
    w13, w2 = write_experts(tmp_path, torch.float32, fused=False)
    files = expert_files(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    write_experts(other, torch.float32, fused=False, seed=9)
    shutil.move(other / "model.safetensors", tmp_path / "model.safetensors")
    got13, got2 = files.read(0, 5)
    assert torch.equal(got13, w13[0, 5])
    assert torch.equal(got2, w2[0, 5])
    with pytest.raises(CheckpointError, match="was replaced while the model was loaded"):
        files.check()
    (tmp_path / "model.safetensors").unlink()
    files.read(0, 4)
    with pytest.raises(CheckpointError, match="No such file"):
        files.check()


def test_nan_is_equal_to_itself(tmp_path: Path) -> None:
    w13, _ = write_experts(tmp_path, torch.bfloat16, fused=False, poison=float("nan"))
    got13, _ = expert_files(tmp_path, torch.bfloat16).read(0, 0)
    assert torch.equal(got13.view(torch.int16), w13[0, 0].view(torch.int16))
