"""Staged writes to device tables equal those to a plain dictionary."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch

from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.plan import BlockDiff, NewRequest
from moeserve.errors import ConfigError
from moeserve.runner.gpu import RingUpload
from moeserve.runner.tables import Tables, Upload, _last_writes, host_upload
from moeserve.sampling import TokenSampling

CPU = torch.device("cpu")
GROUPS = (KVGroup(KVRule(), 4, (0,)), KVGroup(KVRule(8), 4, (1,)))


def diff(*entries: tuple[int, int, int]) -> BlockDiff:
    columns = np.array(entries, dtype=np.int32).reshape(-1, 3).T
    return BlockDiff(columns[0], columns[1], columns[2])


@pytest.mark.parametrize(
    "upload", [host_upload, RingUpload(CPU, 3, pinned=False)], ids=["host", "ring"]
)
@pytest.mark.parametrize("seed", range(5))
def test_random_writes_match_a_naive_table(upload: Upload, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = 6
    max_len = 30
    tables = Tables(slots, max_len, GROUPS, CPU, upload)
    tokens = np.zeros((slots, max_len + 1), dtype=np.int32)
    blocks = [np.zeros((slots, 8), dtype=np.int32) for _ in GROUPS]
    lengths = [0] * slots
    for _ in range(60):
        for slot in rng.choice(slots, rng.integers(0, 4), replace=False).tolist():
            new = rng.integers(0, 1000, rng.integers(1, max_len)).astype(np.int32)
            tables.add(slot, new)
            tokens[slot, : len(new)] = new
            lengths[slot] = len(new)
            for table in blocks:
                table[slot] = 0
        for group, table in enumerate(blocks):
            entries = {
                (int(rng.integers(slots)), int(rng.integers(8))): int(rng.integers(1, 99))
                for _ in range(5)
            }
            tables.update(group, diff(*((s, i, b) for (s, i), b in entries.items())))
            for (s, i), b in entries.items():
                table[s, i] = b
        tables.apply()
        chosen = rng.choice(slots, 3, replace=False)
        at = np.array([lengths[s] for s in chosen])
        sampled = rng.integers(0, 1000, 3).astype(np.int32)
        tables.append(torch.from_numpy(tables.token_offsets(chosen, at)), torch.from_numpy(sampled))
        tokens[chosen, at] = sampled
        for s in chosen.tolist():
            lengths[s] = min(lengths[s] + 1, max_len)
        for slot in range(slots):
            np.testing.assert_array_equal(
                tables.tokens[slot, : lengths[slot]], tokens[slot, : lengths[slot]]
            )
        for view, table in zip(tables.blocks, blocks, strict=True):
            np.testing.assert_array_equal(view, table)


def test_a_new_occupant_finds_no_blocks_of_the_last_one() -> None:
    tables = Tables(2, 30, GROUPS, CPU, host_upload)
    tables.update(0, diff((1, 0, 5), (1, 1, 6), (1, 2, 7)))
    tables.apply()
    tables.add(1, np.array([3], dtype=np.int32))
    tables.update(0, diff((1, 0, 9)))
    tables.apply()
    assert tables.blocks[0][1].tolist() == [9, 0, 0, 0, 0, 0, 0, 0]


def test_of_several_writes_to_one_place_only_the_last_is_sent() -> None:
    offsets, values = _last_writes(
        np.array([5, 6, 5, 6, 1]), np.array([1, 2, 3, 4, 9], dtype=np.int32)
    )
    assert dict(zip(offsets.tolist(), values.tolist(), strict=True)) == {1: 9, 5: 3, 6: 4}


def test_tables_beyond_32_bit_offsets_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs=100000 times max_model_len=100000"):
        Tables(100_000, 100_000, GROUPS, CPU, host_upload)


def test_ring_sections_survive_later_uploads_and_growth() -> None:
    ring = RingUpload(CPU, 2, pinned=False)
    rng = np.random.default_rng(0)
    kept = []
    for size in (3, 70_000, 1, 0, 5):
        arrays = [
            rng.integers(0, 9, size).astype(np.int32),
            rng.random((size, 2)).astype(np.float32),
            np.arange(size),
        ]
        kept.append((arrays, ring(*arrays)))
    for arrays, tensors in kept:
        for array, tensor in zip(arrays, tensors, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
            assert tensor.numpy().dtype == array.dtype


def test_sampling_of_an_added_request_does_not_touch_the_tables() -> None:
    new_requests = NewRequest(
        0, np.array([1, 2], dtype=np.int32), 2, TokenSampling(seed=1, max_tokens=1)
    )
    tables = Tables(1, 4, GROUPS[:1], CPU, host_upload)
    tables.add(new_requests.slot, new_requests.tokens)
    assert tables.tokens[0].tolist() == [0] * 5, "staged only"
    tables.apply()
    assert tables.tokens[0].tolist() == [1, 2, 0, 0, 0]


def test_tables_take_memory_only_where_they_are_used() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    tables = Tables(1024, 131_072, GROUPS, CPU, host_upload)
    tables.add(1023, np.arange(5, dtype=np.int32))
    tables.apply()
    assert tables.tokens[1023, :6].tolist() == [0, 1, 2, 3, 4, 0]
    assert process.memory_info().rss - before < tables.arena.nbytes // 20
