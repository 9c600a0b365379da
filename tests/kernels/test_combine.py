"""The kernel of the weighted sum: interpreted against references, and compiled for sm_90."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moeserve.kernels.align import combine
from moeserve.moe.all2all.layout import group_rows_plainly, weighted_sum_plainly
from moeserve.moe.routing import Routing
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import combine_reference


def case(tokens: int, top_k: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Huge and tiny values; pairs that went nowhere hold NaN."""
    random = torch.Generator().manual_seed(width)
    y = torch.randn(tokens, top_k, width, generator=random) * 10.0 ** torch.randint(
        -3, 4, (tokens, top_k, 1)
    )
    ids = torch.randint(-1, 6, (tokens, top_k), generator=random, dtype=torch.int32)
    weights = torch.rand(tokens, top_k, generator=random)
    y[ids < 0] = math.nan
    weights[ids < 0] = math.nan
    return y.to(DEVICE, dtype), weights.to(DEVICE), ids.to(DEVICE)


def check(found: Tensor, expected: Tensor) -> None:
    """The same bits, but for bfloat16 that NumPy interprets: it cuts where devices round."""
    if found.dtype == torch.bfloat16 and DEVICE.type == "cpu":
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_combine_example() -> None:
    y = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], device=DEVICE)
    weights = torch.tensor([[0.5, 2.0]], device=DEVICE)
    for ids, expected in (([[7, 0]], [[6.5, 9]]), ([[7, -1]], [[0.5, 1]])):
        assert (
            combine(y, weights, torch.tensor(ids, dtype=torch.int32, device=DEVICE)).tolist()
            == expected
        )


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "top_k", "width"),
    [(0, 2, 8), (1, 1, 1), (3, 8, 300), (2, 32, 40), (70, 3, 17), (64, 2, 1030)],
)
def test_combine(tokens: int, top_k: int, width: int, dtype: torch.dtype) -> None:
    y, weights, ids = case(tokens, top_k, width, dtype)
    y[:, :, 0] = -0.0
    wide = torch.full((tokens, width + 5), math.nan, dtype=dtype, device=DEVICE)
    expected = combine_reference(y, weights, ids)
    assert combine(y, weights, ids, wide[:, :width]).data_ptr() == wide.data_ptr()
    check(wide[:, :width].contiguous(), expected)
    assert wide[:, width:].isnan().all()
    check(combine(y, weights, ids), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_gives_the_moe_layers_bits(dtype: torch.dtype) -> None:
    y, weights, ids = (x.cpu() for x in case(9, 4, 130, dtype))
    rows = group_rows_plainly(ids, 6)
    grouped = y.flatten(0, 1)[rows.order_P]
    weights = weights.nan_to_num(0.0)
    expected = weighted_sum_plainly(
        grouped, rows, Routing(ids, weights), torch.empty(9, 130, dtype=dtype)
    )
    check(combine(y.to(DEVICE), weights.to(DEVICE), ids.to(DEVICE)), expected.to(DEVICE))


@pytest.mark.full("aot")
def test_combine_compiles_for_hopper() -> None:
    signature = {
        "y_ptr": "*bf16",
        "weights_ptr": "*fp32",
        "ids_ptr": "*i32",
        "out_ptr": "*bf16",
        "out_stride": "i32",
        "width": "i32",
    }
    cases = [
        Case("align:combine_kernel", signature, {"K": top_k, "BLOCK": 512}, ("out_stride", "width"))
        for top_k in (8, 22)
    ]
    for report in compile_all(cases):
        assert report.stack_bytes == 0
        assert report.registers <= 64
