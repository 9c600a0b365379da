"""Paged attention: interpreted against torch, bits against other batches, compiled for sm_90."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from moeserve.kernels import paged_attention
from moeserve.kernels.attention_plan import SPLIT, Bounds
from moeserve.kernels.paged_attention import (
    AttentionShape,
    attention,
    launch_of,
    plan_attention,
    space_floats,
    tile_positions,
)
from moeserve.ops.inputs import HeadShape, from_entries, to_entries
from moeserve.ops.pick import pick_ops
from moeserve.ops.probe import host_step
from tests.kernels.aot import Case, Report, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import attention_reference

NAN = float("nan")


class Step:
    """Random contexts of some rows; whatever no row owns is NaN, block 0 too."""

    def __init__(
        self, shape: AttentionShape, starts: list[int], news: list[int], int8: bool = False
    ) -> None:
        self.shape = shape
        self.starts = starts
        self.news = news
        random = torch.Generator().manual_seed(sum(starts) + shape.dim)
        size = shape.block_size
        ends = [s + n for s, n in zip(starts, news, strict=True)]
        widths = [-(-end // size) for end in ends]
        numbers = torch.randperm(sum(widths) + 3, generator=random) + 1
        self.blocks = torch.zeros((len(starts), max([*widths, 1])), dtype=torch.int64)
        sizes = (len(numbers) + 1, size, shape.kv_heads)
        self.k = torch.full((*sizes, shape.dim), NAN)
        self.v = torch.full((*sizes, shape.v_dim), NAN)
        at = 0
        for row, (end, width) in enumerate(zip(ends, widths, strict=True)):
            self.blocks[row, :width] = numbers[at : at + width]
            at += width
            for cache in (self.k, self.v):
                for block in range(width):
                    used = min(size, end - block * size)
                    values = torch.randn((used, *cache.shape[2:]), generator=random)
                    cache[self.blocks[row, block], :used] = values
        self.all_blocks = self.blocks.clone().to(DEVICE)
        window, chunk = shape.limits
        for row, start in enumerate(starts):  # blocks that nobody sees any more are given back
            self.blocks[row, : max(0, start - window + 1, start // chunk * chunk) // size] = 0
        self.q = torch.randn((sum(news) + 2, shape.heads, shape.dim), generator=random) * 0.5
        cache_dtype = torch.int8 if int8 else shape.dtype
        self.k, self.v = (to_entries(cache, cache_dtype).to(DEVICE) for cache in (self.k, self.v))
        self.q, self.blocks = self.q.to(DEVICE, shape.dtype), self.blocks.to(DEVICE)

    def share(self) -> Step:
        """Make the first elements of the keys the values."""
        self.v = self.k[..., : self.shape.v_dim]
        return self

    def run(self, invariant: bool = True, space: Tensor | None = None, **options: object) -> Tensor:
        """Run the kernel with two tokens of padding after the rows."""
        bounds = Bounds(
            len(self.news),
            max(sum(self.news), 1),
            max(self.news),
            max(map(sum, zip(self.starts, self.news, strict=True))),
        )
        plan = plan_attention(
            self.blocks, *self.rows(), self.shape, bounds, invariant=invariant, space=space
        )
        size = (len(self.q), self.shape.heads * self.shape.v_dim)
        out = torch.full(size, NAN, dtype=self.q.dtype, device=DEVICE)
        return attention(self.q, self.k, self.v, plan, out=out, **options)  # type: ignore[arg-type]

    def rows(self) -> tuple[Tensor, Tensor]:
        starts = torch.tensor(self.starts, dtype=torch.int32, device=DEVICE)
        return starts, torch.tensor([0, *self.news], device=DEVICE).cumsum(0).int()

    def expected(self, **options: object) -> Tensor:
        k, v = (from_entries(cache) for cache in (self.k, self.v))
        where = self.all_blocks, *self.rows(), *self.shape.limits
        return attention_reference(self.q, k, v, *where, **options)  # type: ignore[arg-type]


def close(got: Tensor, expected: Tensor) -> None:
    exact = got.dtype == torch.float32
    torch.testing.assert_close(
        got, expected, rtol=1e-5 if exact else 4e-3, atol=1e-5 if exact else 2e-3
    )


def test_attention_example() -> None:
    shape = AttentionShape(1, 1, 1, 1, 16, torch.float32)
    step = Step(shape, [1], [1])
    step.q.fill_(1)
    step.k.view(-1)[step.blocks[0, 0] * 16 :][:2] = torch.tensor([0, 3.0]).clamp(min=1).log()
    step.v.view(-1)[step.blocks[0, 0] * 16 :][:2] = torch.tensor([4.0, 8.0])
    torch.testing.assert_close(step.run().cpu(), torch.tensor([[7.0], [0], [0]]))


@pytest.mark.full("kernels", keep=6)
@pytest.mark.parametrize(
    ("dtype", "invariant"), [(torch.float32, True), (torch.float16, True), (torch.float16, False)]
)
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
    step = Step(
        AttentionShape(heads, kv_heads, dim, dim, 16, dtype, window),
        [600, 0, 100, 1030],
        [1, 0, 20, 2],
        int8,
    )
    sinks_H = torch.linspace(-3, 3, heads, device=DEVICE) if sinks else None
    expected = step.expected(soft_cap=soft_cap, sinks_H=sinks_H)
    for space in (None, torch.empty(0, device=DEVICE))[: 1 if invariant else 2]:
        close(step.run(invariant, space, soft_cap=soft_cap, sinks_H=sinks_H), expected)


@pytest.mark.full("kernels", keep=2)
@pytest.mark.parametrize(
    ("dtype", "invariant"), [(torch.float32, True), (torch.float16, True), (torch.float16, False)]
)
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(2, 2, 48, 32, 16, torch.float32, chunk=544),
        AttentionShape(5, 1, 24, 8, 16, torch.float32, chunk=32),
        AttentionShape(4, 2, 40, 40, 16, torch.float32, 70, 1040),
    ],
    ids=["wide keys", "odd widths", "window and chunk"],
)
def test_chunks_and_narrow_values(
    shape: AttentionShape, dtype: torch.dtype, invariant: bool
) -> None:
    """Tiles and splits cross a chunk's border, and one row has just begun a chunk."""
    step = Step(replace(shape, dtype=dtype), [600, 0, 530, 1030, 544], [1, 0, 20, 14, 1])
    sinks_H = torch.linspace(-3, 3, shape.heads, device=DEVICE)
    close(step.run(invariant, sinks_H=sinks_H), step.expected(sinks_H=sinks_H))


@pytest.mark.full("kernels", keep=2)
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "v_dim", "invariant"),
    [
        (torch.float32, 24, 48, 40, True),
        (torch.float16, 5, 48, 32, True),
        (torch.float32, 5, 40, 24, True),
        (torch.float16, 5, 48, 40, False),
        (torch.float16, 96, 40, 32, False),
    ],
)
def test_latent_attention(
    dtype: torch.dtype,
    heads: int,
    dim: int,
    v_dim: int,
    invariant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cases: no, one and many new tokens; contexts of one split, exactly one, and more."""
    monkeypatch.setattr(paged_attention, "WIDE", 39)
    step = Step(
        AttentionShape(heads, 1, dim, v_dim, 16, dtype), [40, 5, 511, 1030], [0, 9, 1, 2]
    ).share()
    step.q *= dim**-0.5
    for space in (None, torch.empty(0, device=DEVICE))[: 1 if invariant else 2]:
        close(step.run(invariant, space), step.expected())


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the tables are made for the processor here")
def test_the_table_s_attention_is_the_plain_one() -> None:
    """Chunks, narrow values, soft cap and sinks, planned from a step's inputs."""
    step = Step(AttentionShape(4, 2, 24, 16, 16, torch.float32, chunk=32), [40, 0, 95], [1, 20, 3])
    group, inputs = host_step(step.blocks, 16, step.starts, [0, 1, 21, 24], chunk=32)
    sinks_H = torch.linspace(-3, 3, 4)
    found = []
    for kernels in ("triton", "torch"):
        ops = pick_ops("cpu", torch.float32, kernels)  # type: ignore[arg-type]
        plan = ops.plan_attention(
            group, replace(inputs, rows_on_device=step.rows()), HeadShape(4, 2, 24, 16)
        )
        found.append(ops.attention(step.q, step.k, step.v, plan, sinks_H=sinks_H, soft_cap=5.0))
    close(*found)


def test_extreme_scores() -> None:
    """Far beyond what exp can hold, far below, and all equal."""
    step = Step(AttentionShape(4, 2, 16, 16, 16, torch.float32), [520, 10, 64], [1, 3, 1])
    step.q[0] *= 1e4
    step.q[1:4] *= 1e-30
    step.q[4] = 0
    got = step.run()
    assert got.isfinite().all()
    close(got, step.expected())


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_row_that_is_nan_stays_alone() -> None:
    step = Step(AttentionShape(4, 2, 16, 16, 16, torch.float32), [40, 30], [1, 1])
    whole = step.run()
    step.q[0] = NAN
    assert step.run()[0].isnan().all()
    assert torch.equal(step.run()[1:], whole[1:])


@pytest.fixture
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make products independent of a row's place in the tile, as on a GPU but unlike BLAS."""

    def create_dot(builder: object, a: Any, b: Any, sums: Any, *options: object) -> Any:
        product = np.stack([row @ b.data.astype(np.float32) for row in a.data.astype(np.float32)])
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.full("kernels", keep=1)
@pytest.mark.usefixtures("rows_alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("window", "chunk", "v_dim"),
    [(None, None, 8), (None, None, 16), (530, None, 16), (None, 516, 16)],
)
def test_bits_do_not_depend_on_chunks_batch_or_space(
    window: int | None, chunk: int | None, v_dim: int, dtype: torch.dtype
) -> None:
    """Compute the tokens of one prefill in several ways.

    They come as chunks, as decodes, beside a longer row, and without workspace for splits.
    """
    step = Step(AttentionShape(3, 1, 16, v_dim, 16, dtype, window, chunk), [500, 530], [20, 2])
    if v_dim < 16:
        step.share()
    whole = step.run()
    assert torch.equal(step.run(space=torch.empty(0, device=DEVICE)), whole)
    q = step.q.clone()
    for at, new in ((0, 1), (13, 1), (8, 12), (19, 1)):
        step.starts = [500 + at]
        step.news = [new]
        step.q = q[at : at + new]
        for space in (None, torch.empty(0, device=DEVICE)):
            assert torch.equal(step.run(space=space), whole[at : at + new]), (at, new)


def test_space_for_cut_rows() -> None:
    shape = AttentionShape(32, 4, 128, 128, 16, torch.bfloat16)
    assert space_floats(shape, Bounds(8, 8, 1, SPLIT)) == 0
    assert space_floats(shape, Bounds(8, 8, 1, 2 * SPLIT)) == 8 * 2 * 64 * 4 * 130
    assert space_floats(shape, Bounds(8, 8, 1, 2 * SPLIT), invariant=False) == 8 * 2 * 128 * 4 * 130
    assert space_floats(replace(shape, window=128), Bounds(8, 8, 1, 9999)) == 0


def _case(
    shape: AttentionShape,
    block_m: int,
    how: tuple[int, int],
    int8: bool = False,
    extras: bool = False,
) -> Case:
    """how: warps, stages. extras: soft cap and sinks."""
    kind = "*bf16" if shape.dtype == torch.bfloat16 else "*fp16"
    cache = "*i8" if int8 else kind
    shared = shape.kv_heads == 1
    signature = {"q_ptr": kind, "k_ptr": cache, "out_ptr": kind, "blocks_ptr": "*i64"}
    signature |= dict.fromkeys(("values_ptr", "stats_ptr"), "*fp32")
    signature |= dict.fromkeys(("starts_ptr", "offsets_ptr", "items_ptr", "counts_ptr"), "*i32")
    signature |= dict.fromkeys(("num_rows", "num_tokens", "q_stride", "table_stride"), "i32")
    signature |= {} if shared else {"v_ptr": cache}
    signature |= dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), "*fp32") if int8 else {}
    signature |= {"sinks_ptr": "*fp32"} if extras else {}
    window, chunk = shape.limits
    constants: dict[str, object] = {
        "KV_HEADS": shape.kv_heads,
        "GROUPS": shape.groups,
        "HEADS": shape.group,
        "D": shape.dim,
        "V_D": shape.v_dim,
        "BLOCK_SIZE": shape.block_size,
        "WINDOW": window,
        "CHUNK": chunk,
        "SOFT_CAP": 30.0 * extras,
        "SPLIT": SPLIT,
        "TILE": block_m // shape.group,
        "BLOCK_M": block_m,
        "BLOCK_N": tile_positions(shape, block_m),
        "FLAT": block_m == 128,
    }
    optional = ("v_ptr", "k_scales_ptr", "v_scales_ptr", "sinks_ptr")
    constants |= {name: None for name in optional if name not in signature}
    return Case("attention_kernel:attend_kernel", signature, constants, ("q_stride",), *how)


BF16 = torch.bfloat16
FP16 = torch.float16
QWEN = AttentionShape(32, 4, 128, 128, 16, BF16)
NARROW = AttentionShape(32, 4, 64, 64, 16, BF16, 128)
GPT_OSS = AttentionShape(64, 8, 64, 64, 16, FP16, 128)
MIMO = AttentionShape(64, 4, 192, 128, 16, BF16, 128)
LLAMA4 = AttentionShape(40, 8, 128, 128, 16, BF16, chunk=8192)
GEMMA4 = AttentionShape(16, 2, 512, 512, 16, BF16)
DEEPSEEK_V3 = AttentionShape(128, 1, 576, 512, 16, BF16)
DEEPSEEK_V2_LITE = AttentionShape(16, 1, 576, 512, 16, FP16)


def _default(shape: AttentionShape, block_m: int, int8: bool = False, extras: bool = False) -> Case:
    how = launch_of(shape, torch.int8 if int8 else shape.dtype, block_m, "")
    return _case(shape, block_m, (how["num_warps"], how["num_stages"]), int8, extras)


@pytest.mark.full("aot")
def test_attention_compiles_for_hopper() -> None:
    merge = {"values_ptr": "*fp32", "stats_ptr": "*fp32", "out_ptr": "*bf16"}
    merge |= dict.fromkeys(("offsets_ptr", "merges_ptr", "counts_ptr"), "*i32")
    sizes = {"GROUPS": 4, "HEADS": 8, "TILE": 2, "D": 128, "BLOCK_M": 16, "ROWS": 4, "UNROLL": 4}
    few = [_default(QWEN, 16), _default(NARROW, 16, extras=True), _default(QWEN, 16, int8=True)]
    many = [_default(QWEN, 128), _default(QWEN, 64), _default(QWEN, 128, int8=True)]
    merges = [Case("attention_sums:merge_kernel", merge, sizes | {"sinks_ptr": None})]
    reports = compile_all([*few, *many, *merges])
    # Triton's versions differ in a few numbers that they keep in memory around the loop; in it
    # would be many more.
    assert all(report.stack_bytes <= 64 for report in reports), reports
    assert all(report.mma and fits(report, programs=2) for report in reports[: len(few)]), reports
    assert all(report.wgmma and fits(report, programs=1) for report in reports[len(few) : -1]), (
        reports
    )
    assert fits(reports[4], programs=2), reports[4]
    assert reports[-1].registers <= 64, reports[-1]


@pytest.mark.full("aot")
def test_other_shapes_compile_for_hopper() -> None:
    shapes = GPT_OSS, MIMO, LLAMA4, DEEPSEEK_V2_LITE, GEMMA4, DEEPSEEK_V3
    reports = compile_all(
        [_default(shape, 64, extras=shape.window is not None) for shape in shapes]
    )
    assert all(report.wgmma and fits(report, programs=1) for report in reports), reports
    assert all(report.stack_bytes <= 64 for report in reports[:3]), reports
    # Sums of 64 x 512 fill the registers: those of earlier splits wait in memory while the next
    # split is added up.
    assert all(report.stack_bytes <= 1152 for report in reports[3:]), reports
    small = compile_all(
        [_default(shape, 16, extras=shape.window is not None) for shape in shapes[:5]]
    )
    assert all(
        report.mma and report.stack_bytes <= 128 and fits(report, programs=2) for report in small
    ), small


def fits(report: Report, programs: int) -> bool:
    """Return whether so many programs fit in a multiprocessor's shared memory."""
    return programs * (report.shared_bytes + 1024) <= 227 * 1024
