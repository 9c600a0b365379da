"""Staged writes and a step's inputs: interpreted against loops, and compiled for sm_90."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.kernels.inputs import PIECE, StepArrays, StepWords, fill_step, pack, write
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import step_reference, write_reference


def on_device(words: np.ndarray) -> Tensor:
    return torch.from_numpy(words).to(DEVICE)


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_write_example() -> None:
    words, pieces = pack(np.array([5, 6, 9]), int32(1, 2, 3))
    assert (words.tolist(), pieces) == ([5, 9, 0, 2, 3, 1, 2, 3], 2)
    arena = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    write(arena, on_device(int32(1, 3, 0, 2, 3, 7, 8, 9)), 2)
    assert arena.tolist() == [0, 7, 8, 9]


@pytest.mark.parametrize(
    "lengths",
    [[], [1], [PIECE], [PIECE + 1, 1, 3 * PIECE - 1], [1] * 60, [7, PIECE - 1, 2]],
    ids=len,
)
def test_writes_are_those_of_a_loop(lengths: list[int]) -> None:
    rng = np.random.default_rng(len(lengths))
    places = rng.permutation(len(lengths)) * (4 * PIECE) + rng.integers(0, PIECE, len(lengths))
    offsets = np.concatenate(
        [np.arange(p, p + n) for p, n in zip(places, lengths, strict=True)] or [np.zeros(0)]
    )
    values = rng.integers(-(2**31), 2**31, len(offsets)).astype(np.int32)
    words, pieces = pack(offsets.astype(np.int64), values)
    arena = torch.full((4 * PIECE * (len(lengths) + 1),), -7, dtype=torch.int32, device=DEVICE)
    expected = arena.clone()
    expected[on_device(offsets.astype(np.int64))] = on_device(values)
    again = arena.clone()
    write(arena, on_device(words), pieces)
    write_reference(again, on_device(words), pieces)
    assert torch.equal(arena, expected)
    assert torch.equal(again, expected)


def empty(*shape: int, blocks: int) -> StepArrays:
    """Return slices of larger arrays that are full of invalid values."""
    tokens, rows, samples, groups = shape
    whole = StepArrays.empty(tokens + 3, rows + 3, samples + 3, groups, blocks + 3, DEVICE)
    for field in dataclasses.fields(whole):
        getattr(whole, field.name).fill_(-9)
    return StepArrays(
        whole.ids_T[:tokens],
        whole.positions_T[:tokens],
        whole.slot_mapping_GT[:, :tokens],
        whole.blocks_GRB[:, :rows, :blocks],
        whole.sample_N[:samples],
        whole.offsets_R1[: rows + 1],
        whole.starts_R[:rows],
    )


def test_step_example() -> None:
    words = StepWords.of(int32(4, 2), int32(0, 9), int32(0, 3, 4), np.array([3]))
    assert words.words.tolist() == [4, 2, 0, 9, 0, 3, 4, 3]
    table = torch.zeros(3, 4, dtype=torch.int32, device=DEVICE)
    table[2, :3] = torch.tensor([5, 6, 7])
    blocks = torch.tensor([[[1, 1], [2, 2], [4, 9]]], dtype=torch.int32, device=DEVICE)
    step = StepWords.of(int32(2), int32(1), int32(0, 2), np.array([1]))
    out = empty(3, 2, 2, 1, blocks=2)
    fill_step(table, blocks, 2, step, on_device(step.words), out)
    assert [x.tolist() for x in (out.ids_T, out.positions_T, out.slot_mapping_GT)] == [
        [6, 7, 0],
        [1, 2, 0],
        [[9, 18, 0]],
    ]
    assert out.blocks_GRB.tolist() == [[[4, 9], [0, 0]]]
    assert [out.offsets_R1.tolist(), out.starts_R.tolist(), out.sample_N.tolist()] == [
        [0, 2, 2],
        [1, 0],
        [1, 0],
    ]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("counts", ["mixed", "ones", "long"])
def test_step_inputs_are_those_of_a_loop(counts: str, padded: bool) -> None:
    rng = np.random.default_rng(len(counts))
    slots = 9
    width = 2600
    block_size = 16
    groups = 2
    table = torch.from_numpy(rng.integers(0, 1000, (slots, width)).astype(np.int32)).to(DEVICE)
    max_blocks = -(-width // block_size)
    blocks = torch.from_numpy(
        rng.integers(0, 2**31 // 16, (groups, slots, max_blocks)).astype(np.int32)
    ).to(DEVICE)
    rows = 6
    counts_R = {
        "mixed": rng.integers(1, 40, rows),
        "ones": np.ones(rows),
        "long": int32(1, 2100, 1, 30, 1, 1),
    }[counts]
    starts_R = rng.integers(0, 400, rows).astype(np.int32)
    offsets_R1 = np.concatenate(([0], counts_R.cumsum())).astype(np.int32)
    sample_N = np.flatnonzero(rng.random(offsets_R1[-1]) < 0.6)
    step = StepWords.of(
        rng.permutation(slots)[:rows].astype(np.int32), starts_R, offsets_R1, sample_N
    )
    extra = 1 if padded else 0
    shape = (step.tokens + 1500 * extra, rows + 4 * extra, step.samples + 2 * extra, groups)
    actual = empty(*shape, blocks=max_blocks - 3)
    expected = empty(*shape, blocks=max_blocks - 3)
    fill_step(table, blocks, block_size, step, on_device(step.words), actual)
    step_reference(table, blocks, block_size, step, expected)
    for field in dataclasses.fields(actual):
        ours = getattr(actual, field.name)
        theirs = getattr(expected, field.name)
        assert torch.equal(ours, theirs), field.name
        # Nothing beyond the slice was touched.
        assert ours._base is not None
        assert (ours._base == -9).sum() >= ours._base.numel() - ours.numel(), field.name


@pytest.mark.full("aot")
def test_compiles_for_hopper() -> None:
    integers = (
        "table_stride",
        "group_stride",
        "blocks_stride",
        "slot_mapping_stride",
        "out_group_stride",
        "out_stride",
        "rows",
        "tokens",
        "samples",
        "all_rows",
        "all_tokens",
        "all_samples",
        "num_blocks",
    )
    pointers = {
        "table": "i32",
        "blocks": "i32",
        "words": "i32",
        "ids": "i64",
        "positions": "i64",
        "slot_mapping": "i64",
    }
    pointers |= {"rows": "i32", "sample": "i64", "offsets": "i32", "starts": "i32"}
    signature = {f"{name}_ptr": f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(
        integers, "i32"
    )
    writes = {"arena_ptr": "*i32", "words_ptr": "*i32", "pieces": "i32"}
    reports = compile_all(
        [
            Case("inputs:step_kernel", signature, {"BLOCK_SIZE": 16, "BLOCK": 1024}),
            Case("inputs:write_kernel", writes, {"PIECE": PIECE}),
        ]
    )
    assert [report.stack_bytes for report in reports] == [0, 0]
    assert max(report.registers for report in reports) <= 128
