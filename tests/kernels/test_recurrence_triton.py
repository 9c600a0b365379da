"""Convolutions and recurrences over paged states: interpreted, and compiled for sm_90."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.kernels.recurrence import CHANNELS, TileMetadata, block_sizes, causal_conv, recurrence
from moeserve.ops import recurrence as plain
from moeserve.ops.pick import pick_ops
from moeserve.ops.probe import host_step
from moeserve.ops.rules import TILE
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE

NAN = float("nan")
BLOCK = 2 * TILE  # so that tiles have places in a block


@dataclass(frozen=True)
class Heads:
    """The sizes of a layer. K inputs of a convolution whose channels are those of queries, keys and
    values.
    """

    keys: int
    heads: int
    d: int
    v: int
    decays: int
    beta: bool
    conv: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.keys * self.d + self.heads * self.v

    def conv_caches(self, blocks: int) -> tuple[Tensor, ...]:
        """Return caches full of NaN, which shows reads of unwritten entries."""
        shapes = (BLOCK, 1, self.channels), (BLOCK // TILE, self.conv - 1, self.channels)
        return tuple(torch.full((blocks, *shape), NAN, device=DEVICE) for shape in shapes)

    def caches(self, blocks: int) -> tuple[Tensor, ...]:
        state = (BLOCK // TILE, self.heads, self.d * self.v)
        rows = (self.keys, self.d), (self.heads, self.v), (self.heads, self.decays)
        return tuple(
            torch.full((blocks, *s), NAN, device=DEVICE)
            for s in (state, *((BLOCK, *row) for row in rows))
        )


class Inputs:
    """Random inputs of both operations for the positions of one request."""

    def __init__(self, sizes: Heads, length: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def some(*shape: int) -> Tensor:
            return torch.randn((length, *shape), generator=random)

        self.x = some(sizes.channels)
        self.q, self.k = (
            torch.nn.functional.normalize(some(sizes.keys, sizes.d), dim=-1) for _ in range(2)
        )
        self.v = some(sizes.heads, sizes.v)
        self.decay = -some(sizes.heads, sizes.decays).exp()
        self.beta = some(sizes.heads).sigmoid()
        if length > 3:  # nothing is left of the state; all of it is
            self.decay[2] = -200
            self.decay[3] = 0

    @property
    def all(self) -> list[Tensor]:
        return [self.x, self.q, self.k, self.v, self.decay, self.beta]


class Layer:
    """Caches of one layer, and steps of rows (request, first position, tokens) on them, by the
    kernels or plain.
    """

    def __init__(self, sizes: Heads, tables: dict[str, list[int]], *, plain: bool = False) -> None:
        self.sizes = sizes
        self.tables = tables
        self.plain = plain
        self.conv_caches = sizes.conv_caches(12)
        self.caches = sizes.caches(12)
        random = torch.Generator().manual_seed(9)
        self.weight = torch.randn((sizes.channels, sizes.conv), generator=random).to(DEVICE)
        self.bias = torch.randn(sizes.channels, generator=random).to(DEVICE) if sizes.beta else None

    def step(
        self, inputs: dict[str, Inputs], rows: list[tuple[str, int, int]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Results of both operations of each row; three tokens of NaN follow the rows' own."""
        width = max(map(len, self.tables.values()))
        table = torch.tensor(
            [self.tables[key] + [0] * (width - len(self.tables[key])) for key, _, _ in rows]
        )
        starts = [start for _, start, _ in rows]
        counts = [count for _, _, count in rows]
        offsets = [0, *torch.tensor(counts).cumsum(0).tolist()]
        parts = [[x[start : start + count] for x in inputs[key].all] for key, start, count in rows]
        padded = [
            [*some, torch.full((3, *some[0].shape[1:]), NAN)] for some in zip(*parts, strict=True)
        ]
        x, *heads = (torch.cat(some).to(DEVICE) for some in padded)
        beta = heads.pop()
        group, host = host_step(table.to(DEVICE), BLOCK, starts, offsets)
        on_device = tuple(
            torch.tensor(array, dtype=torch.int32, device=DEVICE) for array in (starts, offsets)
        )
        if self.plain:
            plan: Any = plain.plan_tiles(group, host)
            operations: Any = plain.causal_conv, plain.recurrence
        else:
            plan = TileMetadata(group.blocks_RN, *on_device, BLOCK, TILE)
            operations = causal_conv, recurrence
        conv = operations[0](x, self.weight, self.bias, self.sizes.beta, self.conv_caches, plan)
        out = operations[1](*heads, beta if self.sizes.beta else None, self.caches, plan)
        for result in (conv, out):
            assert result[offsets[-1] :].count_nonzero() == 0
        return [(conv[a:b], out[a:b]) for a, b in pairwise(offsets)]


SIZES = [
    Heads(1, 2, 20, 24, 1, True),
    Heads(1, 1, 24, 7, 24, True, conv=2),
    Heads(2, 2, 8, 40, 1, False, conv=16),
    Heads(1, 3, 16, 16, 16, False),
]
TABLES = {"a": [3, 7, 0], "b": [5, 1, 0], "c": [2, 9, 4], "null": [0, 6, 0]}


@pytest.mark.full("kernels", keep=2)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_close_to_the_specification(sizes: Heads) -> None:
    """Prefills, decodes and chunks of several requests, one of which keeps nothing but in its
    second block.
    """
    inputs = {key: Inputs(sizes, 40, seed) for seed, key in enumerate(TABLES)}
    mine = Layer(sizes, TABLES)
    theirs = Layer(sizes, TABLES, plain=True)
    steps = [
        [("a", 0, 19), ("b", 0, 16), ("null", 0, 34)],
        [("b", 16, 1), ("c", 0, 3), ("a", 19, 13)],
        [("a", 32, 1), ("null", 34, 1), ("b", 17, 0), ("c", 3, 15)],
    ]
    for rows in steps:
        for found, expected in zip(mine.step(inputs, rows), theirs.step(inputs, rows), strict=True):
            for got, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    for got, wanted in zip(
        mine.conv_caches + mine.caches, theirs.conv_caches + theirs.caches, strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.full("kernels", keep=2)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_depend_on_nothing_else(sizes: Heads) -> None:
    """One call; chunks of any size in company; steps that run again; another block table."""
    inputs = {key: Inputs(sizes, 40, seed) for seed, key in enumerate(TABLES)}
    ((conv, out),) = Layer(sizes, TABLES).step(inputs, [("c", 0, 35)])
    layer = Layer(sizes, TABLES | {"c": [8, 2, 0]})
    at = 0
    parts = []
    for step, count in enumerate((1, 14, 1, 1, 18)):
        rows = [("c", at, count), ("a", step, 1)]
        for _ in range(2 - step % 2):
            found = layer.step(inputs, rows[:: 1 if step % 2 else -1])[0 if step % 2 else 1]
        parts.append(found)
        at += count
    assert at == 35
    assert torch.equal(torch.cat([part for part, _ in parts]), conv)
    assert torch.equal(torch.cat([part for _, part in parts]), out)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_what_is_not_finite_stays_in_its_request_and_behind_it(value: float) -> None:
    sizes = SIZES[1]
    inputs = {key: Inputs(sizes, 20, seed) for seed, key in enumerate("ab")}
    whole = Layer(sizes, TABLES).step(inputs, [("a", 0, 20), ("b", 0, 5)])
    for x in inputs["a"].all:
        x[11] = value
    found = Layer(sizes, TABLES).step(inputs, [("a", 0, 20), ("b", 0, 5)])
    for i in range(2):
        assert torch.equal(found[0][i][:11], whole[0][i][:11])
        assert not found[0][i][11].isfinite().all()
        assert torch.equal(found[1][i], whole[1][i])


def test_examples() -> None:
    def device(*values: float) -> Tensor:
        return torch.tensor(values, device=DEVICE)

    on_device = device(0).int(), device(0, 3).int()
    plan = TileMetadata(
        torch.zeros((1, 1), dtype=torch.int64, device=DEVICE), *on_device, TILE, TILE
    )
    caches = tuple(torch.zeros((1, rows, 1, 1), device=DEVICE)[:, :, :1] for rows in (TILE, 1))
    y = causal_conv(device(1, 2, 3)[:, None], device(10, 1)[None], device(5), False, caches, plan)
    assert y[:, 0].tolist() == [6, 17, 28]
    plan = replace(plan, offsets_R1=device(0, 2).int())
    caches = tuple(torch.zeros((1, rows, 1, 1), device=DEVICE) for rows in (1, TILE, TILE, TILE))
    ones = torch.ones((2, 1, 1), device=DEVICE)
    v = device(3.0, 5)[:, None, None]
    torch.testing.assert_close(
        recurrence(ones, ones, v, ones * -0.6931472, None, caches, plan).flatten(), device(3, 6.5)
    )


def test_tokens_may_be_any_distance_apart() -> None:
    """Mamba-2's B and C are parts of wider rows; lightning attention has the same decays for all
    tokens.
    """
    sizes = SIZES[2]
    plan = TileMetadata(
        torch.tensor([[3, 1]]), torch.tensor([0]).int(), torch.tensor([0, 18]).int(), BLOCK, TILE
    )
    plan = replace(
        plan,
        **{
            name: getattr(plan, name).to(DEVICE) for name in ("blocks_RN", "starts_R", "offsets_R1")
        },
    )
    some = Inputs(sizes, 18, 0)
    q, k, v = (x.to(DEVICE) for x in (some.q, some.k, some.v))
    decay = some.decay[:1].to(DEVICE).expand(18, -1, -1)
    wide_q, wide_k = torch.cat((q.flatten(1), k.flatten(1)), 1).chunk(2, 1)
    parts = wide_q.view(q.shape), wide_k.view(k.shape), v, decay
    assert parts[0].stride(0) == 2 * q.stride(0)
    whole = q, k, v, decay.contiguous()
    found, expected = (
        recurrence(*inputs, None, sizes.caches(5), plan) for inputs in (parts, whole)
    )
    assert torch.equal(found, expected)
    assert expected.any()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the table is made for the processor here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_table_s_operations(dtype: torch.dtype) -> None:
    """Inputs of a model's type that are part of wider rows; no tokens at all."""
    ops = pick_ops("cpu", dtype, "triton")
    sizes = SIZES[0]
    group, host = host_step(torch.tensor([[4, 2]]), BLOCK, [0], [0, 20])
    step = replace(host, rows_on_device=(torch.tensor([0]).int(), torch.tensor([0, 20]).int()))
    inputs = Inputs(sizes, 20, 0)
    weight = torch.ones((sizes.channels, sizes.conv))
    x = torch.nn.functional.pad(inputs.x, (0, 5)).to(dtype)[:, :-5]
    found = ops.causal_conv(
        x, weight, None, True, sizes.conv_caches(5), ops.plan_tiles(group, step)
    )
    wanted = plain.causal_conv(
        x, weight, None, True, sizes.conv_caches(5), plain.plan_tiles(group, host)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    nothing = ops.causal_conv(
        x[:0], weight, None, True, sizes.conv_caches(5), ops.plan_tiles(group, step)
    )
    assert nothing.shape == (0, sizes.channels)


def _case(keys: int, heads: int, d: int, v: int, decays: int, beta: bool) -> Case:
    rows = dict.fromkeys(
        ("k_rows_ptr", "u_rows_ptr", "s_rows_ptr", "states_ptr", "out_ptr"), "*fp32"
    )
    pointers = rows | dict.fromkeys(
        ("q_ptr", "k_ptr", "v_ptr", "decay_ptr", *("beta_ptr",) * beta), "*fp32"
    )
    pointers |= {"blocks_ptr": "*i64", "starts_ptr": "*i32", "offsets_ptr": "*i32"}
    strides = [f"{name}_stride" for name in ("q", "k", "v", "decay", "beta", "table")]
    sizes = {
        "KEY_HEADS": keys,
        "HEADS": heads,
        "D": d,
        "V": v,
        "DECAYS": decays,
        "BLOCK_SIZE": 16,
        "TILE": TILE,
    }
    constants = sizes | block_sizes(d, v, decays) | ({} if beta else {"beta_ptr": None})
    return Case(
        "recurrence:recurrence_kernel",
        pointers | dict.fromkeys(strides, "i32"),
        constants,
        strides[:3],
    )


@pytest.mark.full("aot")
def test_recurrence_compiles_for_hopper() -> None:
    """Qwen3-Next, Kimi Linear, Ling 2.6, and Mamba-2 with one and with eight groups."""
    qwen3_next = _case(16, 32, 128, 128, 1, True)
    kimi = _case(32, 32, 128, 128, 128, True)
    mamba = [_case(groups, 64, 128, 64, 1, False) for groups in (1, 8)]
    reports = compile_all([qwen3_next, kimi, _case(32, 32, 128, 128, 1, False), *mamba])
    # A few of what loops do not change wait in memory: the state, 32 numbers of a thread, does not.
    assert all(
        report.stack_bytes <= 112 and report.shared_bytes <= 32 << 10 for report in reports
    ), reports


@pytest.mark.full("aot")
def test_convolution_compiles_for_hopper() -> None:
    pointers = dict.fromkeys(("weight_ptr", "rows_ptr", "borders_ptr", "out_ptr"), "*fp32")
    pointers |= {
        "x_ptr": "*bf16",
        "blocks_ptr": "*i64",
        "starts_ptr": "*i32",
        "offsets_ptr": "*i32",
    }
    strides = dict.fromkeys(("num_rows", "x_stride", "table_stride"), "i32")
    sizes = {
        "C": 8192,
        "K": 4,
        "SILU": True,
        "BLOCK_SIZE": 16,
        "TILE": TILE,
        "BLOCK_R": 256,
        "BLOCK_C": CHANNELS,
    }
    case = Case(
        "recurrence:causal_conv_kernel",
        pointers | strides,
        sizes | {"bias_ptr": None},
        ["x_stride"],
    )
    (report,) = compile_all([case])
    assert report.stack_bytes == 0, report
    assert report.registers <= 128, report
    assert "ld.global.v4.b32" in report.accesses, report
