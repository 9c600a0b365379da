"""Choices of index selectors by a kernel: bits that belong to the query; compiled for sm_90.
tests/ops/test_selected.py compares them with a plain sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeserve.kernels.latent import KEYS, index_select
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE

SIZE = 16
BLOCKS = 12
TOP_K = 30
NAN = float("nan")
BOTH = [torch.float32, torch.float16]  # the interpreter computes bfloat16 products wrongly


@pytest.mark.parametrize("dtype", BOTH)
def test_a_choice_depends_on_query_and_context_alone(dtype: torch.dtype) -> None:
    """Alone and in company, of longer contexts and in other parts. Keys differ in the order of
    their elements and queries have equal ones, so that only roundings make scores differ."""
    random = torch.Generator().manual_seed(0)
    orders = torch.rand(BLOCKS * SIZE, 40, generator=random).argsort(-1)
    cache = torch.randn(40, generator=random)[orders].view(BLOCKS, SIZE, 1, 40).to(DEVICE, dtype)
    q = torch.randn(9, 3, 1, generator=random).expand(-1, -1, 40)
    weights = torch.randn(9, 3, generator=random)
    q = q.to(DEVICE, dtype).contiguous()
    weights = weights.to(DEVICE)
    table = torch.tensor(
        [[0] * 9, [3, 1, 11, 2, 8, 5, 4, 9, 7], [6, 10, 2, 8, 1, 9, 3, 5, 11]], device=DEVICE
    )
    positions = torch.arange(100, 109, device=DEVICE)

    def choose(queries: list[int], rows: Tensor, row: int, context: int, most: int) -> Tensor:
        of = torch.full((len(queries),), row, device=DEVICE)
        return index_select(
            q[queries], weights[queries], cache, of, positions[queries], rows, context, TOP_K, most
        )  # fmt: skip

    whole = choose(list(range(9)), table, 1, 109, 9)
    assert torch.equal(choose(list(range(8, -1, -1)), table[1:].int(), 0, 140, 2), whole.flip(0))
    assert torch.equal(choose([4], table[:2], 1, 105, 16), whole[4:5])
    assert not torch.equal(choose([4], table, 2, 105, 16), whole[4:5])


def test_a_query_that_sees_few_tokens_chooses_all_of_them_first() -> None:
    random = torch.Generator().manual_seed(0)
    cache, q = (
        torch.randn(shape, generator=random).to(DEVICE)
        for shape in ((BLOCKS, SIZE, 1, 8), (2, 3, 8))
    )
    table = torch.tensor([[5, 1, 7, 2], [3, 6, 8, 9]], device=DEVICE)
    rows = torch.arange(2, device=DEVICE)
    cache[[7, 2, 8, 9]] = NAN  # behind what is seen
    found = index_select(q, q[..., 0].contiguous(), cache, rows, rows + 19, table, 60, TOP_K, 1)
    seen = [
        [block * SIZE + i for block in blocks for i in range(SIZE)] for blocks in ([5, 1], [3, 6])
    ]
    assert found[0, :20].tolist() == seen[0][:20]
    assert found[1, :21].tolist() == seen[1][:21]


def test_example() -> None:
    cache = torch.zeros((1, SIZE, 1, 1), device=DEVICE)
    cache[0, :3, 0, 0] = torch.tensor([5.0, 1, 7])
    one = torch.ones((1, 1), device=DEVICE)
    row = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert index_select(one[None], one, cache, row, row + 2, row[None], 3, 2, 1).tolist() == [
        [0, 2]
    ]


@pytest.mark.full("aot")
def test_choice_compiles_for_hopper() -> None:
    """DeepSeek-V3.2 and GLM-5; products on tensor cores."""
    pointers = {
        "q_ptr": "*bf16",
        "weights_ptr": "*fp32",
        "cache_ptr": "*bf16",
        "blocks_ptr": "*i32",
        "rows_ptr": "*i64",
    }
    pointers |= {"positions_ptr": "*i64", "out_ptr": "*i64", "length": "i32", "table_stride": "i32"}
    sizes = {"D": 128, "BLOCK_SIZE": 64, "BLOCK_D": 128, "BLOCK_L": KEYS}
    cases = [
        Case("latent:order_kernel", pointers, sizes | {"HEADS": heads, "BLOCK_J": heads})
        for heads in (64, 32)
    ]
    for report in compile_all(cases):
        assert report.stack_bytes == 0, report
        assert report.wgmma, report
        assert report.shared_bytes <= 48 << 10, report
