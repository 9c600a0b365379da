"""Selective scans over paged states: interpreted against references, compiled for sm_90."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.kernels.recurrence import TileMetadata
from moeserve.kernels.selective_scan import CHANNELS as AT_ONCE
from moeserve.kernels.selective_scan import selective_scan
from moeserve.ops import selective_scan as plain
from moeserve.ops.recurrence import Caches, plan_tiles
from moeserve.ops.rules import TILE
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tests.ops.test_selective_scan import (
    A_NC,
    BLOCK,
    CHANNELS,
    SKIP_C,
    Inputs,
    caches_of,
    inputs_of,
    step_of,
)

Row = tuple[int, int, list[int]]
NAN = float("nan")


def on_device(tensors: Any) -> Any:
    return tuple(tensor.to(DEVICE) for tensor in tensors)


def scan(inputs: Inputs, caches: Caches, *rows: Row, share: slice = slice(None)) -> Tensor:
    """Run the kernel.

    Rows of x, dt, B and C are slices of wider ones, and four tokens of NaN follow them.
    """
    wide = [torch.nn.functional.pad(part, (0, 3, 0, 4), value=NAN) for part in inputs]
    x, dt, b, c = on_device(part[:, :-3] for part in wide)
    group, step = step_of(list(rows))
    integers = torch.from_numpy(step.starts_R), torch.from_numpy(step.offsets_R1)
    plan = TileMetadata(group.blocks_RN.to(DEVICE), *on_device(integers), BLOCK, TILE)
    a, skip = on_device((A_NC[:, share].contiguous(), SKIP_C[share].contiguous()))
    found = selective_scan(x[:, share], dt[:, share], a, b, c, skip, caches, plan)
    count = int(step.offsets_R1[-1])
    assert not found[count:].any()
    return found[:count]


def part_of(inputs: Inputs, start: int, end: int) -> Inputs:
    x, dt, b, c = (part[start:end] for part in inputs)
    return x, dt, b, c


def joined(*parts: Inputs) -> Inputs:
    x, dt, b, c = (torch.cat(some) for some in zip(*parts, strict=True))
    return x, dt, b, c


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
@pytest.mark.parametrize("hostile", [False, True])
def test_close_to_the_specification(hostile: bool) -> None:
    """A prefill that stores only its second block, then a chunk and a decode."""
    mine = on_device(caches_of())
    theirs = caches_of()
    ours = inputs_of(45)
    others = inputs_of(41, seed=1)
    if hostile:
        values = torch.tensor([NAN, float("inf"), -float("inf"), 1e38, -0.0])
        ours[0][9, :5] = values
        ours[1][20, 35:] = values
        others[2][36, 1] = NAN
    steps: list[tuple[Inputs, list[Row]]] = [
        (joined(part_of(ours, 0, 20), part_of(others, 0, 34)), [(0, 20, [3, 1]), (0, 34, [0, 6])]),
        (
            joined(part_of(others, 34, 41), part_of(ours, 20, 32)),
            [(34, 7, [0, 6]), (20, 12, [3, 1])],
        ),
        (part_of(ours, 32, 33), [(32, 1, [3, 1]), (5, 0, [2, 2])]),
        (part_of(ours, 33, 45), [(33, 12, [3, 1])]),
    ]
    near = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}
    for inputs, rows in steps:
        x, dt, b, c = inputs
        expected = plain.selective_scan(
            x, dt, A_NC, b, c, SKIP_C, theirs, plan_tiles(*step_of(rows))
        )
        torch.testing.assert_close(scan(inputs, mine, *rows).cpu(), expected, **near)
    for found, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found.cpu(), wanted, **near)


def test_bits_depend_on_nothing_else() -> None:
    """Chunks of any size in company; steps that run again; another block table; a share of the
    channels.
    """
    ours = inputs_of(40)
    others = inputs_of(40, seed=1)
    expected = scan(ours, on_device(caches_of()), (0, 40, [3, 1]))
    caches = on_device(caches_of())
    at = 0
    for step, count in enumerate((1, 14, 1, 1, 18, 5)):
        mine = part_of(ours, at, at + count)
        company = part_of(others, step, step + 1)
        pair: list[tuple[Inputs, Row]] = [(mine, (at, count, [2, 7])), (company, (step, 1, [5, 0]))]
        pair = pair[:: -1 if step % 2 else 1]
        for _ in range(1 + step % 2):
            found = scan(joined(*(inputs for inputs, _ in pair)), caches, *(row for _, row in pair))
        assert torch.equal(found[-count:] if step % 2 else found[:count], expected[at : at + count])
        at += count
    share = slice(8, 20)
    whole = caches_of()
    part = on_device([*(cache[..., share].contiguous() for cache in whole[:3]), whole[3]])
    assert torch.equal(scan(ours, part, (0, 40, [3, 1]), share=share), expected[:, share])


def test_example() -> None:
    def device(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=DEVICE)

    plan = TileMetadata(device(0)[None].long(), device(0).int(), device(0, 2).int(), TILE, TILE)
    caches = tuple(torch.zeros((1, rows, 1, 1), device=DEVICE) for rows in (1, TILE, TILE, TILE))
    x = device(3, 5)[:, None]
    ones = torch.ones((2, 1), device=DEVICE)
    a = device(0.5).log()[:, None]
    y = selective_scan(x, ones, a, ones, ones, device(10), caches, plan)
    torch.testing.assert_close(y.flatten(), device(33, 56.5))
    assert selective_scan(
        x[:0], ones[:0], a, ones[:0], ones[:0], device(10), caches, plan
    ).shape == (0, 1)


@pytest.mark.full("aot")
def test_selective_scan_compiles_for_hopper() -> None:
    """Jamba, and a channel count that is no multiple of a program's."""
    names = ("x", "dt", "a", "b", "c", "skip", "states", "x_rows", "dt_rows", "b_rows", "out")
    pointers = dict.fromkeys((f"{name}_ptr" for name in names), "*fp32")
    pointers |= {"blocks_ptr": "*i32", "starts_ptr": "*i32", "offsets_ptr": "*i32"}
    strides = dict.fromkeys((f"{name}_stride" for name in ("x", "dt", "b", "c", "table")), "i32")
    sizes = {"N": 16, "BLOCK_SIZE": 16, "TILE": TILE, "BLOCK_C": AT_ONCE, "BLOCK_N": 16}
    cases = [
        Case(
            "selective_scan:selective_scan_kernel",
            pointers | strides,
            sizes | {"C": channels},
            num_warps=1,
        )
        for channels in (8192, CHANNELS)
    ]
    for report in compile_all(cases):
        assert report.stack_bytes == 0, report
        assert report.registers <= 128, report
