"""Multi-head latent attention, interpreted, beside its definition; and compiled for sm_90."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeserve.kernels.attention_plan import SPLIT, Bounds
from moeserve.kernels.mla import MlaShape, mla, mla_space_floats, plan_mla
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import mla_reference

NAN = float("nan")


class Step:
    """Random contexts of some rows and one padded token; whatever no row owns is NaN, block 0 too."""

    def __init__(self, shape: MlaShape, starts: list[int], news: list[int]) -> None:
        self.shape, self.starts, self.news = shape, starts, news
        random = torch.Generator().manual_seed(sum(starts))
        ends = [start + new for start, new in zip(starts, news, strict=True)]
        widths = [-(-end // shape.block_size) for end in ends]
        numbers = (torch.randperm(sum(widths) + 2, generator=random) + 1).tolist()
        width = shape.latent + shape.rotated
        self.cache = torch.full((len(numbers) + 1, shape.block_size, width), NAN)
        self.blocks = torch.zeros((len(starts), max(widths)), dtype=torch.int32)
        for row, end in enumerate(ends):
            mine = [numbers.pop() for _ in range(widths[row])]
            self.blocks[row, : len(mine)] = torch.tensor(mine)
            for i, block in enumerate(mine):
                used = min(shape.block_size, end - i * shape.block_size)
                self.cache[block, :used] = torch.randn((used, width), generator=random)
        self.q = torch.randn((sum(news) + 1, shape.heads, width), generator=random) * 0.3
        self.q, self.cache = self.q.to(DEVICE, shape.dtype), self.cache.to(DEVICE, shape.dtype)
        self.blocks = self.blocks.to(DEVICE)
        self.offsets = torch.tensor([0, *news], device=DEVICE).cumsum(0).int()

    def run(self, invariant: bool = True) -> Tensor:
        starts = torch.tensor(self.starts, dtype=torch.int32, device=DEVICE)
        context = max(start + new for start, new in zip(self.starts, self.news, strict=True))
        bounds = Bounds(len(self.news), sum(self.news), max(self.news), context)
        space = torch.full((mla_space_floats(self.shape, bounds, invariant),), NAN, device=DEVICE)
        plan = plan_mla(self.blocks, starts, self.offsets, self.shape, bounds, invariant=invariant, space=space)
        size = (len(self.q), self.shape.heads, self.shape.latent)
        return mla(self.q, self.cache, plan, torch.full(size, NAN, dtype=self.q.dtype, device=DEVICE))

    def expected(self) -> Tensor:
        starts = torch.tensor(self.starts)
        return mla_reference(self.q, self.cache, self.blocks, starts, self.offsets, self.shape.latent)


def close(got: Tensor, expected: Tensor) -> None:
    exact = got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5 if exact else 4e-3, atol=2e-6 if exact else 2e-3)


def test_mla_example() -> None:
    step = Step(MlaShape(1, 1, 1, 16, torch.float32), [1], [1])
    step.q[0, 0] = torch.tensor([0.0, 1.0])
    step.cache[step.blocks[0, 0], :2] = torch.tensor([[4.0, 0], [8, torch.tensor(3.0).log()]])
    torch.testing.assert_close(step.run().flatten().cpu(), torch.tensor([7.0, 0.0]))


@pytest.mark.full("kernels", keep=2)
@pytest.mark.parametrize(
    ("dtype", "heads", "latent", "rotated", "invariant"),
    [
        (torch.float32, 32, 32, 16, True),
        (torch.float32, 5, 40, 8, True),
        (torch.float16, 5, 40, 8, True),
        (torch.float16, 5, 40, 8, False),
        (torch.float16, 128, 16, 16, False),
    ],
)
def test_mla(dtype: torch.dtype, heads: int, latent: int, rotated: int, invariant: bool) -> None:
    """No, one and several new tokens; contexts of one split, of exactly one, and of more."""
    step = Step(MlaShape(heads, latent, rotated, 16, dtype), [40, 5, 511, 512, 1030], [0, 1, 2, 1, 2])
    close(step.run(invariant), step.expected())


@pytest.mark.full("kernels", keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    many = Step(MlaShape(16, 32, 16, 16, dtype), [520, 30, 1030], [1, 2, 1])
    together = many.run()
    q, blocks = many.q, many.blocks
    for row, (start, token, new) in enumerate(((520, 0, 1), (30, 1, 2), (1030, 3, 1))):
        many.starts, many.news, many.blocks = [start], [new], blocks[row : row + 1]
        many.q, many.offsets = q[token : token + new], torch.tensor([0, new], dtype=torch.int32, device=DEVICE)
        assert torch.equal(many.run(), together[token : token + new])


@pytest.mark.full("aot")
def test_mla_compiles_for_hopper() -> None:
    pointers = {"q_ptr": "*bf16", "cache_ptr": "*bf16", "out_ptr": "*bf16", "blocks_ptr": "*i32"}
    pointers |= dict.fromkeys(("values_ptr", "stats_ptr"), "*fp32")
    pointers |= dict.fromkeys(("starts_ptr", "offsets_ptr", "items_ptr", "counts_ptr"), "*i32")
    numbers = dict.fromkeys(("num_rows", "num_tokens", "q_stride", "table_stride"), "i32")
    sizes = {"L": 512, "P": 64, "L_PAD": 512, "P_PAD": 64, "BLOCK_SIZE": 16, "SPLIT": SPLIT, "TILE": 1}
    large = {"GROUPS": 2, "HEADS": 64, "BLOCK_M": 64, "BLOCK_N": 64}
    small = {"GROUPS": 1, "HEADS": 16, "BLOCK_M": 16, "BLOCK_N": 32}
    wide, narrow = compile_all(
        [
            Case("mla:latent_kernel", pointers | numbers, sizes | large, ("q_stride",), 8, 2),
            Case("mla:latent_kernel", pointers | numbers, sizes | small, ("q_stride",), 4, 5),
        ]
    )
    assert wide.wgmma
    assert wide.shared_bytes <= 227 * 1024
    assert wide.stack_bytes <= 288, wide  # sums of 64 x 512 fill the registers; what spills is little beside them
    assert narrow.mma
    assert narrow.stack_bytes <= 64, narrow
    assert 2 * (narrow.shared_bytes + 1024) <= 227 * 1024, narrow
