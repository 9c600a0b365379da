"""Attention's work lists made on the device equal those made by a loop."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels.attention_plan import (
    ANY,
    EVERYTHING,
    SPLIT,
    SPLIT_TILES,
    Bounds,
    list_work,
    most_splits,
)
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE

Lists = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]


def listed(
    starts: list[int],
    news: list[int],
    tile: int,
    window: int = EVERYTHING,
    chunk: int = EVERYTHING,
    capacity: int = ANY,
    *limits: int,
) -> Lists:
    bounds = Bounds(
        len(news),
        max(1, sum(news)),
        max(news),
        max(s + n for s, n in zip(starts, news, strict=True)),
    )
    offsets = torch.tensor([0, *news], device=DEVICE).cumsum(0).int()
    work = list_work(
        torch.tensor(starts, device=DEVICE).int(),
        offsets,
        bounds,
        tile,
        window,
        chunk,
        capacity,
        *limits,
    )
    num_items, num_merges = work.counts_2.tolist()
    assert num_items <= work.items_I4.shape[0]
    assert num_merges <= work.merges_M4.shape[0]
    items = work.items_I4[:num_items].tolist()
    merges = work.merges_M4[:num_merges].tolist()
    return [tuple(item) for item in items], [tuple(merge) for merge in merges]


def expected(
    starts: list[int],
    news: list[int],
    tile: int,
    window: int = EVERYTHING,
    chunk: int = EVERYTHING,
    capacity: int = ANY,
    least: int = 1,
    most: int = ANY,
) -> Lists:
    items = []
    merges = []
    slot = 0
    for row, (start, new) in enumerate(zip(starts, news, strict=True)):
        if not least <= new <= most:
            continue
        tiles = -(-new // tile)
        begin = max(0, start - window + 1, start // chunk * chunk)
        splits = range(begin // SPLIT, (start + new - 1) // SPLIT + 1)
        wanted = start + new - begin > SPLIT and tiles <= SPLIT_TILES
        cut = wanted and slot + tiles * len(splits) <= capacity
        for t in reversed(range(tiles)):
            at = slot + t * len(splits)
            items += (
                [(row, t, s, at + i) for i, s in enumerate(splits)] if cut else [(row, t, -1, -1)]
            )
        if cut:
            merges += [(row, t, slot + t * len(splits), len(splits)) for t in range(tiles)]
        if wanted:
            slot += tiles * len(splits)
    return items, merges


def test_work_list_example() -> None:
    items = [(0, 0, 0, 0), (0, 0, 1, 1), (1, 1, -1, -1), (1, 0, -1, -1)]
    assert listed([600, 5], [1, 3], 2) == (items, [(0, 0, 0, 2)])


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize(
    ("starts", "news", "tile"),
    [
        ([0], [0], 4),
        ([0, 511, 512, 3], [512, 1, 1, 0], 16),
        ([0, 511, 512, 3], [513, 1, 1, 0], 128),
        ([100_000, 9, 70_000, 0, 5000], [1, 1, 5, 700, 30], 4),
        ([1000 + 37 * i for i in range(9)], [i % 3 for i in range(9)], 1),
    ],
)
@pytest.mark.parametrize(
    ("window", "chunk"), [(EVERYTHING, EVERYTHING), (128, EVERYTHING), (700, 48), (EVERYTHING, 999)]
)
def test_work_list(starts: list[int], news: list[int], tile: int, window: int, chunk: int) -> None:
    for limits in ((ANY,), (8,), (ANY, 2, 6)):
        args = starts, news, tile, window, chunk, *limits
        assert listed(*args) == expected(*args)


def test_splits_of_a_window() -> None:
    assert most_splits(Bounds(1, 1, 1, 512), EVERYTHING, 1) == 1
    assert most_splits(Bounds(1, 1, 1, 513), EVERYTHING, 1) == 2
    assert most_splits(Bounds(1, 1, 1, 9999), 1000, 1) == 3
    assert most_splits(Bounds(1, 1, 1, 9999), 512, 1) == 1


@pytest.mark.full("aot")
def test_planning_compiles_for_hopper() -> None:
    pointers = dict.fromkeys(
        ("starts_ptr", "offsets_ptr", "items_ptr", "merges_ptr", "counts_ptr"), "*i32"
    )
    numbers = dict.fromkeys(("num_rows", "least", "most", "capacity", "window", "chunk"), "i32")
    constants = {"TILE": 2, "SPLIT": SPLIT, "SPLIT_TILES": SPLIT_TILES, "BLOCK": 128}
    reports = compile_all(
        [
            Case("attention_plan:plan_kernel", pointers | numbers, constants | {"BLOCK_R": rows})
            for rows in (256, 4096)
        ]
    )
    assert all(report.stack_bytes <= 64 for report in reports), reports
