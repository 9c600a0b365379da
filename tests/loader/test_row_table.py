"""Rows of tables that stay in the checkpoint's files."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.load_plan import LoadPlan, Param, Piece, check_plan
from moeserve.loader.row_table import MemoryRows, RowFiles, RowTable, TableShard
from moeserve.loader.safetensors_file import read_header
from moeserve.loader.weights import Params

ROWS = 50
WIDTH = 6
VALUES = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def table_of(path: Path, values: Tensor = VALUES, cached_rows: int = ROWS) -> RowTable:
    """Write a table in three shards, in two files."""
    parts = values.split(20)
    save_file({"b": parts[1].clone(), "c": parts[2].clone()}, path / "one.safetensors")
    save_file({"other": torch.zeros(3), "a": parts[0].clone()}, path / "two.safetensors")
    tensors = read_header(path / "one.safetensors") | read_header(path / "two.safetensors")
    shards = [TableShard(20 * i, tensors[name]) for i, name in enumerate("abc")]
    files = RowFiles(shards)
    return RowTable(files, lambda rows: rows.view(values.dtype), cached_rows * files.row_bytes)


@pytest.mark.parametrize("cached_rows", [1, 7, ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_table(tmp_path: Path, cached_rows: int, dtype: torch.dtype) -> None:
    """Also those that share a place of the cache, in one step and in later ones."""
    table = table_of(tmp_path, VALUES.to(dtype), cached_rows)
    assert table.count == ROWS
    rng = np.random.default_rng(cached_rows)
    for count in (0, 1, 3, 20, 200, 1):
        rows = torch.from_numpy(rng.integers(0, ROWS, count))
        table.prefetch(rows)
        assert torch.equal(table.read(rows), VALUES.to(dtype)[rows])


def test_cached_rows_are_not_read_again(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    rows = torch.arange(10)
    table.read(rows)
    for name in ("one", "two"):
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(table.read(rows), VALUES[rows])
    assert not table.read(torch.tensor([10])).any()


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    (tmp_path / "two.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"two.safetensors ended inside a table"):
        table.read(torch.tensor([3]))
    assert torch.equal(table.read(torch.tensor([30])), VALUES[30:31])


def test_threads_read_at_once(tmp_path: Path) -> None:
    table = table_of(tmp_path, cached_rows=5)
    wrong = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            rows = torch.from_numpy(rng.integers(0, ROWS, 8))
            if not torch.equal(table.read(rows), VALUES[rows]):
                wrong.append(rows)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_table_takes_its_place(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    table = table_of(folders[0])
    rows = torch.arange(ROWS)
    table.read(rows)
    table.replace(table_of(folders[1], -VALUES))
    assert torch.equal(table.read(rows), -VALUES)
    in_memory = MemoryRows(VALUES.clone())
    in_memory.replace(table)
    assert torch.equal(in_memory.read(rows), -VALUES)


def test_parameters_on_disk_and_exact_integers(tmp_path: Path) -> None:
    """Integers of 45 bits would be rounded as floats."""
    numbers = torch.tensor([2**45 + 1, -3], dtype=torch.int64)
    save_file({"table": VALUES.bfloat16(), "numbers": numbers}, tmp_path / "model.safetensors")
    plan = LoadPlan(
        (Param("t", (ROWS, WIDTH), on_disk=True), Param("n", (2,), int64=True)),
        (
            Piece("table", (ROWS, WIDTH), "t", at=(slice(0, ROWS),), take=(slice(0, ROWS),)),
            Piece("numbers", (2,), "n", at=(slice(0, 2),), take=(slice(0, 2),)),
        ),
    )
    with Params(open_checkpoint(tmp_path), plan, torch.float32) as params:
        table = params["t"]
        assert torch.equal(params["n"], numbers)
    rows = torch.tensor([49, 0, 49])  # after the reader has closed its files
    assert torch.equal(table.read(rows), VALUES.bfloat16()[rows].float())


def test_integers_stored_as_floats_are_refused(tmp_path: Path) -> None:
    save_file({"numbers": torch.zeros(2)}, tmp_path / "model.safetensors")
    plan = LoadPlan((Param("n", (2,), int64=True),), (Piece("numbers", (2,), "n", at=()),))
    with pytest.raises(CheckpointError, match=r"'numbers' in model.safetensors is F32; .* I64"):
        check_plan(open_checkpoint(tmp_path), plan)
