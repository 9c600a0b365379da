"""Paged attention, interpreted, beside its definition and bit by bit beside itself; and compiled for sm_90."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from moeserve.kernels.attention_plan import EVERYTHING, SPLIT, Bounds
from moeserve.kernels.paged_attention import AttentionShape, attention, plan_attention, space_floats
from moeserve.ops.inputs import from_entries, to_entries
from tests.kernels.aot import Case, Report, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import attention_reference

NAN = float("nan")


class Step:
    """Random contexts of some rows; whatever no row owns is NaN, block 0 too."""

    def __init__(self, shape: AttentionShape, starts: list[int], news: list[int], int8: bool = False) -> None:
        self.shape, self.starts, self.news = shape, starts, news
        random = torch.Generator().manual_seed(sum(starts) + shape.head_dim)
        size, ends = shape.block_size, [s + n for s, n in zip(starts, news, strict=True)]
        widths = [-(-end // size) for end in ends]
        numbers = torch.randperm(sum(widths) + 3, generator=random) + 1
        self.blocks = torch.zeros((len(starts), max([*widths, 1])), dtype=torch.int64)
        sizes = (len(numbers) + 1, size, shape.kv_heads, shape.head_dim)
        self.k, self.v = torch.full(sizes, NAN), torch.full(sizes, NAN)
        at = 0
        for row, (end, width) in enumerate(zip(ends, widths, strict=True)):
            self.blocks[row, :width] = numbers[at : at + width]
            at += width
            for cache in (self.k, self.v):
                for block in range(width):
                    used = min(size, end - block * size)
                    values = torch.randn((used, *sizes[2:]), generator=random)
                    cache[self.blocks[row, block], :used] = values
        self.all_blocks = self.blocks.clone().to(DEVICE)
        if shape.window is not None:  # blocks that nobody sees any more are given back
            for row, start in enumerate(starts):
                self.blocks[row, : max(0, start - shape.window + 1) // size] = 0
        self.q = torch.randn((sum(news) + 2, shape.heads, shape.head_dim), generator=random) * 0.5
        cache_dtype = torch.int8 if int8 else shape.dtype
        self.k, self.v = (to_entries(cache, cache_dtype).to(DEVICE) for cache in (self.k, self.v))
        self.q, self.blocks = self.q.to(DEVICE, shape.dtype), self.blocks.to(DEVICE)

    def run(self, invariant: bool = True, space: Tensor | None = None, **options: object) -> Tensor:
        """Two padded tokens behind the rows' own."""
        bounds = Bounds(
            len(self.news),
            max(sum(self.news), 1),
            max(self.news),
            max(map(sum, zip(self.starts, self.news, strict=True))),
        )
        plan = plan_attention(self.blocks, *self.rows(), self.shape, bounds, invariant=invariant, space=space)
        out = torch.full((len(self.q), self.q[0].numel()), NAN, dtype=self.q.dtype, device=DEVICE)
        return attention(self.q, self.k, self.v, plan, out=out, **options)  # type: ignore[arg-type]

    def rows(self) -> tuple[Tensor, Tensor]:
        starts = torch.tensor(self.starts, dtype=torch.int32, device=DEVICE)
        return starts, torch.tensor([0, *self.news], device=DEVICE).cumsum(0).int()

    def expected(self, **options: object) -> Tensor:
        k, v = (from_entries(cache) for cache in (self.k, self.v))
        return attention_reference(self.q, k, v, self.all_blocks, *self.rows(), self.shape.window, **options)  # type: ignore[arg-type]


def close(got: Tensor, expected: Tensor) -> None:
    exact = got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5 if exact else 4e-3, atol=1e-5 if exact else 2e-3)


def test_attention_example() -> None:
    shape = AttentionShape(1, 1, 1, 16, torch.float32)
    step = Step(shape, [1], [1])
    step.q.fill_(1)
    step.k.view(-1)[step.blocks[0, 0] * 16 :][:2] = torch.tensor([0, 3.0]).clamp(min=1).log()
    step.v.view(-1)[step.blocks[0, 0] * 16 :][:2] = torch.tensor([4.0, 8.0])
    torch.testing.assert_close(step.run().cpu(), torch.tensor([[7.0], [0], [0]]))


@pytest.mark.full("kernels", keep=6)
@pytest.mark.parametrize(("dtype", "invariant"), [(torch.float32, True), (torch.float16, True), (torch.float16, False)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "soft_cap", "sinks", "int8"),
    [
        (8, 1, 64, None, 0.0, False, False),
        (6, 2, 24, None, 0.0, True, True),
        (7, 1, 80, 40, 5.0, False, False),
        (2, 2, 8, 600, 0.0, True, False),
        (3, 3, 16, 1, 3.0, True, True),
    ],
)
def test_attention(
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    soft_cap: float,
    sinks: bool,
    int8: bool,
    dtype: torch.dtype,
    invariant: bool,
) -> None:
    step = Step(AttentionShape(heads, kv_heads, dim, 16, dtype, window), [600, 0, 100, 1030], [1, 0, 20, 2], int8)
    sinks_H = torch.linspace(-3, 3, heads, device=DEVICE) if sinks else None
    expected = step.expected(soft_cap=soft_cap, sinks_H=sinks_H)
    for space in (None, torch.empty(0, device=DEVICE))[: 1 if invariant else 2]:
        close(step.run(invariant, space, soft_cap=soft_cap, sinks_H=sinks_H), expected)


def test_extreme_scores() -> None:
    """Far beyond what exp can hold, far below, and all equal."""
    step = Step(AttentionShape(4, 2, 16, 16, torch.float32), [520, 10, 64], [1, 3, 1])
    step.q[0] *= 1e4
    step.q[1:4] *= 1e-30
    step.q[4] = 0
    got = step.run()
    assert got.isfinite().all()
    close(got, step.expected())


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_row_that_is_nan_stays_alone() -> None:
    step = Step(AttentionShape(4, 2, 16, 16, torch.float32), [40, 30], [1, 1])
    whole = step.run()
    step.q[0] = NAN
    assert step.run()[0].isnan().all()
    assert torch.equal(step.run()[1:], whole[1:])


@pytest.fixture
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose rows do not depend on where in the tile they lie, as a GPU's; a BLAS's do."""

    def create_dot(builder: object, a: Any, b: Any, sums: Any, *options: object) -> Any:
        product = np.stack([row @ b.data.astype(np.float32) for row in a.data.astype(np.float32)])
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.full("kernels", keep=1)
@pytest.mark.usefixtures("rows_alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 530])
def test_bits_do_not_depend_on_chunks_batch_or_space(window: int | None, dtype: torch.dtype) -> None:
    """The tokens of one prefill again as chunks, as decodes, beside a longer row, and with no room to cut."""
    step = Step(AttentionShape(3, 1, 16, 16, dtype, window), [500, 530], [20, 2])
    whole = step.run()
    assert torch.equal(step.run(space=torch.empty(0, device=DEVICE)), whole)
    q = step.q.clone()
    for at, new in ((0, 1), (13, 1), (8, 12), (19, 1)):
        step.starts, step.news = [500 + at], [new]
        step.q = q[at : at + new]
        for space in (None, torch.empty(0, device=DEVICE)):
            assert torch.equal(step.run(space=space), whole[at : at + new]), (at, new)


def test_space_for_cut_rows() -> None:
    shape = AttentionShape(32, 4, 128, 16, torch.bfloat16)
    assert space_floats(shape, Bounds(8, 8, 1, SPLIT)) == 0
    assert space_floats(shape, Bounds(8, 8, 1, 2 * SPLIT)) == 8 * 2 * 64 * 4 * 130
    assert space_floats(shape, Bounds(8, 8, 1, 2 * SPLIT), invariant=False) == 8 * 2 * 128 * 4 * 130
    assert space_floats(replace(shape, window=128), Bounds(8, 8, 1, 9999)) == 0


def _case(group: int, dim: int, block_m: int, warps: int, stages: int, int8: bool = False, plain: bool = True) -> Case:
    cache = "*i8" if int8 else "*bf16"
    signature = {"q_ptr": "*bf16", "k_ptr": cache, "v_ptr": cache, "out_ptr": "*bf16", "blocks_ptr": "*i64"}
    signature |= dict.fromkeys(("values_ptr", "stats_ptr"), "*fp32")
    signature |= dict.fromkeys(("starts_ptr", "offsets_ptr", "items_ptr", "counts_ptr"), "*i32")
    signature |= dict.fromkeys(("num_rows", "num_tokens", "q_stride", "table_stride"), "i32")
    signature |= dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), "*fp32") if int8 else {}
    signature |= {} if plain else {"sinks_ptr": "*fp32"}
    constants: dict[str, object] = {"GROUP": group, "KV_HEADS": 4, "D": dim, "D_PAD": dim, "ENTRY": dim + 4 * int8}
    constants |= {
        "FLAT": block_m == 128,
        "BLOCK_SIZE": 16,
        "SPLIT": SPLIT,
        "TILE": block_m // group,
        "BLOCK_M": block_m,
        "BLOCK_N": 64,
    }
    constants |= {"WINDOW": EVERYTHING, "SOFT_CAP": 0.0} if plain else {"WINDOW": 128, "SOFT_CAP": 30.0}
    constants |= {} if int8 else {"k_scales_ptr": None, "v_scales_ptr": None}
    constants |= {"sinks_ptr": None} if plain else {}
    return Case("attention_kernel:attend_kernel", signature, constants, ("q_stride",), warps, stages)


@pytest.mark.full("aot")
def test_attention_compiles_for_hopper() -> None:
    merge = {"values_ptr": "*fp32", "stats_ptr": "*fp32", "out_ptr": "*bf16"}
    merge |= dict.fromkeys(("offsets_ptr", "merges_ptr", "counts_ptr"), "*i32")
    sizes = {"GROUPS": 4, "HEADS": 8, "TILE": 2, "D": 128, "D_PAD": 128, "BLOCK_M": 16, "ROWS": 4, "UNROLL": 4}
    few = [_case(8, 128, 16, 4, 5), _case(8, 64, 16, 4, 5, plain=False), _case(8, 128, 16, 4, 5, int8=True)]
    many = [_case(8, 128, 128, 8, 3), _case(8, 128, 64, 4, 3), _case(8, 128, 128, 8, 3, int8=True)]
    merges = [Case("attention_sums:merge_kernel", merge, sizes | {"sinks_ptr": None})]
    reports = compile_all([*few, *many, *merges])
    # Triton's versions differ in a few numbers that they keep in memory around the loop; in it would be many more.
    assert all(report.stack_bytes <= 64 for report in reports), reports
    assert all(report.mma and fits(report, programs=2) for report in reports[: len(few)]), reports
    assert all(report.wgmma and fits(report, programs=1) for report in reports[len(few) : -1]), reports
    assert fits(reports[4], programs=2), reports[4]
    assert reports[-1].registers <= 64, reports[-1]


def fits(report: Report, programs: int) -> bool:
    """Whether a multiprocessor's shared memory holds as many programs."""
    return programs * (report.shared_bytes + 1024) <= 227 * 1024
