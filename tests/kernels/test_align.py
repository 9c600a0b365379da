"""Kernels that sort pairs and cut tiles: interpreted against references, compiled for sm_90."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.kernels import align as module
from moeserve.kernels.align import Alignment, align, align_groups, tile_bound
from moeserve.moe.all2all.layout import group_rows_plainly
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import align_reference

ROUTINGS = ["even", "skewed", "all_to_one", "none", "some_nowhere"]


def ids_of(routing: str, pairs: int, experts: int) -> Tensor:
    random = np.random.default_rng(pairs)
    ids = {
        "even": np.arange(pairs) % experts,
        "skewed": np.minimum(random.geometric(0.3, pairs) - 1, experts - 1),
        "all_to_one": np.full(pairs, experts - 1),
        "none": np.full(pairs, -1),
        "some_nowhere": random.integers(-2, experts, pairs).clip(min=-1),
    }[routing]
    return torch.from_numpy(ids.astype(np.int32)).to(DEVICE)


def check(found: Alignment, expected: Alignment, num_rows: int) -> None:
    """Equal where it is defined; what was left over is marked."""
    if expected.order_N is not None and found.order_N is not None:
        assert torch.equal(found.order_N[: len(expected.order_N)], expected.order_N)
    assert torch.equal(found.counts_e, expected.counts_e)
    assert torch.equal(found.ends_e, expected.ends_e)
    tiles = len(expected.expert_Z)
    assert (
        tiles <= len(found.expert_Z) == tile_bound(num_rows, len(expected.ends_e), expected.block_m)
    )
    assert torch.equal(found.expert_Z[:tiles], expected.expert_Z)
    assert torch.equal(found.row_Z[:tiles], expected.row_Z)
    assert (found.expert_Z[tiles:] == -1).all()


def test_align_example() -> None:
    found = align(torch.tensor([[1], [0], [-1], [1]], dtype=torch.int32, device=DEVICE), 2, 1)
    assert found.order_N is not None
    assert found.order_N.tolist()[:3] == [1, 0, 3]
    assert (found.counts_e.tolist(), found.ends_e.tolist()) == ([1, 2], [1, 3])
    assert (found.expert_Z.tolist(), found.row_Z.tolist()[:3]) == ([0, 1, 1, -1], [0, 1, 2])
    found = align_groups(torch.tensor([1, 3], dtype=torch.int32, device=DEVICE), 4, 2)
    assert (found.counts_e.tolist(), found.ends_e.tolist()) == ([1, 2], [1, 3])
    assert (found.expert_Z.tolist(), found.row_Z.tolist()[:2]) == ([0, 1, -1], [0, 1])
    found = align_groups(torch.tensor([1, 3], dtype=torch.int32, device=DEVICE), 4, 2, room=8)
    assert (found.counts_e.tolist(), found.ends_e.tolist()) == ([1, 3], [1, 11])
    assert (found.expert_Z.tolist(), found.row_Z.tolist()) == ([0, 1, 1], [0, 8, 10])


def test_the_definition_is_that_of_the_moe_layer() -> None:
    ids = ids_of("some_nowhere", 120, 7).view(40, 3)
    rows = group_rows_plainly(ids, 7)
    found = align_reference(ids, 7, 4)
    assert found.order_N is not None
    assert torch.equal(found.order_N.long(), rows.order_P)
    assert found.counts_e.tolist() == rows.counts_e.tolist()


def test_tile_bound() -> None:
    """No routing makes more tiles than the bound, and some routing reaches it."""
    assert tile_bound(5, 3, 4) == 3
    for rows, experts, block_m in [
        (0, 3, 4),
        (1, 3, 4),
        (7, 2, 4),
        (9, 9, 2),
        (30, 4, 16),
        (5, 8, 16),
    ]:
        bound = tile_bound(rows, experts, block_m)
        lonely = (
            min(rows, experts) - 1
        )  # experts with one row, while all other rows are in one expert
        assert bound == (lonely + -(-(rows - lonely) // block_m) if rows else 0)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("pairs", "experts", "block_m"), [(1, 1, 16), (8, 5, 16), (130, 40, 16), (3000, 3, 64)]
)
def test_few_pairs(pairs: int, experts: int, block_m: int, routing: str) -> None:
    ids = ids_of(routing, pairs, experts).view(-1, 2 if pairs % 2 == 0 else 1)
    check(align(ids, experts, block_m), align_reference(ids, experts, block_m), pairs)


MANY = [(200, 5, 64, routing) for routing in ROUTINGS] + [
    (1050, 3, 16, "skewed"),
    (700, 9, 512, "some_nowhere"),
]


@pytest.mark.full("kernels", keep=3)
@pytest.mark.parametrize(("pairs", "experts", "chunk", "routing"), MANY)
def test_many_pairs(pairs: int, experts: int, chunk: int, routing: str) -> None:
    """Among them more chunks than are added up at a time, and a last one with few pairs."""
    ids = ids_of(routing, pairs, experts)
    with patch.object(module, "FEW", 0), patch.object(module, "CHUNK", chunk):
        check(align(ids, experts, 32), align_reference(ids, experts, 32), pairs)


def test_ids_of_no_slot_go_nowhere() -> None:
    ids = torch.tensor([7, 0, 2**31 - 1, -(2**31), 3, 0], dtype=torch.int32, device=DEVICE)
    expected = align_reference(
        torch.tensor([-1, 0, -1, -1, -1, 0], dtype=torch.int32, device=DEVICE), 3, 16
    )
    check(align(ids, 3, 16), expected, 6)
    with patch.object(module, "FEW", 0), patch.object(module, "CHUNK", 4):
        check(align(ids, 3, 16), expected, 6)


def test_no_pairs() -> None:
    found = align(torch.empty(0, 8, dtype=torch.int32, device=DEVICE), 5, 16)
    assert (found.counts_e.tolist(), found.ends_e.tolist(), len(found.expert_Z)) == (
        [0] * 5,
        [0] * 5,
        0,
    )


@pytest.mark.parametrize("counts", [[0, 0, 0], [5, 0, 17], [16, 1, 0], [0, 33, 0]])
def test_groups(counts: list[int]) -> None:
    ids = torch.arange(3, device=DEVICE).repeat_interleave(torch.tensor(counts, device=DEVICE))
    check(
        align_groups(torch.tensor(counts, device=DEVICE).cumsum(0).int(), 40, 16),
        align_reference(ids, 3, 16),
        40,
    )


@pytest.mark.parametrize("room", [33, 40])
@pytest.mark.parametrize("counts", [[0, 0, 0], [5, 0, 33], [16, 1, 0], [33, 33, 33], [0, 0, 17]])
def test_groups_with_room_of_their_own(counts: list[int], room: int) -> None:
    """The tiles of rows that follow each other, each expert's moved to where its rows are."""
    counts_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    wanted = align_reference(torch.arange(3, device=DEVICE).repeat_interleave(counts_e), 3, 16)
    moved_e = torch.arange(3, dtype=torch.int32, device=DEVICE) * room - (wanted.ends_e - counts_e)
    rows = wanted.row_Z + moved_e[wanted.expert_Z.long()]
    check(
        align_groups(counts_e, 99, 16, room),
        replace(wanted, ends_e=wanted.ends_e + moved_e, row_Z=rows),
        99,
    )


@pytest.mark.full("aot")
def test_align_compiles_for_hopper() -> None:
    tables = dict.fromkeys(("counts_ptr", "ends_ptr", "expert_ptr", "row_ptr"), "*i32")
    numbers = dict.fromkeys(("num_experts", "num_tiles", "block_m"), "i32")
    ids = {"ids_ptr": "*i32", "num_pairs": "i32"}
    order = {"order_ptr": "*i32", **tables, **numbers}
    count = {**ids, "counts_ptr": "*i32", "num_experts": "i32"}
    scan = {"counts_ptr": "*i32", "totals_ptr": "*i32", "num_chunks": "i32"}
    place = {**ids, **order, "before_ptr": "*i32", "totals_ptr": "*i32", "num_chunks": "i32"}
    sizes = {"CHUNK": 1024, "EXPERTS": 512}
    cases = [
        Case("align:few_kernel", {**ids, **order}, {"PAIRS": 64, "EXPERTS": 128}),
        Case("align:few_kernel", {**ids, **order}, {"PAIRS": 4096, "EXPERTS": 512}),
        Case("align:count_kernel", count, sizes),
        Case("align:scan_kernel", scan, {"COLUMNS": 32, "EXPERTS": 512}),
        Case("align:place_kernel", place, sizes),
        *(
            Case(
                "align:groups_kernel",
                {"given_ptr": "*i32", **tables, **numbers},
                sizes,
                num_warps=1,
            )
            for sizes in ({"EXPERTS": 512, "ROOM": 0}, {"EXPERTS": 32, "ROOM": 1024})
        ),
    ]
    for report in compile_all(cases):
        assert report.stack_bytes == 0
        assert report.registers <= 168
