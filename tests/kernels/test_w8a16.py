"""The experts' products with weights in 8 bits and wider rows, interpreted, beside their meaning; and for sm_90."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moeserve.kernels.align import align, align_groups, align_rows
from moeserve.kernels.configs import Config
from moeserve.kernels.fp8 import E4M3
from moeserve.kernels.grouped_gemm import down_reference, gate_up_reference
from moeserve.kernels.grouped_w8a16 import FAMILY, Bytes, down_w8a16, gate_up_w8a16, widen_bytes
from moeserve.kernels.tiles import launch_weight_only
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, which interprets
SIXTEEN = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16  # whose products the interpreter computes wrongly
SMALL: Config = {
    "block_m": 16, "tma": 1, "group": 2, "up_block_n": 64, "up_warps": 4, "up_stages": 2,
    "down_block_n": 64, "down_warps": 4, "down_stages": 2,
}  # fmt: skip


def weights(slots: int, outputs: int, inputs: int, group: int, kind: torch.dtype, seed: int) -> Bytes:
    """Every byte that is a number."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (slots, outputs, inputs), generator=random, dtype=torch.int8)
    if kind == E4M3:
        values = values.where(values & 127 != 127, 0).view(torch.uint8).view(E4M3)
    groups = -(-inputs // (group or inputs))
    scales = torch.rand(slots, groups, outputs, generator=random) / 128 / math.sqrt(inputs)
    return Bytes(group, values.to(DEVICE), scales.to(DEVICE))


def test_products_example() -> None:
    """Both docstrings'."""
    to = align(torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), 1, 16)
    ones, scales = torch.ones(1, 2, 16, dtype=torch.int8, device=DEVICE), torch.full((1, 1, 2), 1 / 16, device=DEVICE)
    x = torch.ones(1, 16, device=DEVICE)
    found = gate_up_w8a16(x, Bytes(0, ones, scales), to, SMALL)
    torch.testing.assert_close(found.cpu(), torch.tensor([[0.7311]]), atol=1e-4, rtol=0)
    out = torch.empty(1, 2, device=DEVICE)
    assert down_w8a16(x * 2, Bytes(0, -ones, scales), to, SMALL, out).tolist() == [[-2, -2]]
    assert [Bytes(g, ones.new_empty(1, 1, k), scales).depth for g, k in ((0, 2048), (48, 96))] == [128, 16]


@pytest.mark.parametrize(
    ("group", "kind", "tma", "dtype"),
    [
        (0, torch.int8, 1, SIXTEEN),
        (48, torch.int8, 0, torch.float32),
        (0, E4M3, 0, torch.float32),
        (64, E4M3, 1, SIXTEEN),
    ],
)
@pytest.mark.parametrize("ids", [[[0, 1], [2, 0]], [[1, -1]] * 17, [[2, -1], [-1, 0], [-1, -1]], [[-1, -1]]])
def test_both_products(ids: list[list[int]], group: int, kind: torch.dtype, tma: int, dtype: torch.dtype) -> None:
    """Through the order of pairs; then over the same rows sorted before, which must give the same bits."""
    (tokens, top_k), slots, dim, width, config = (len(ids), 2), 3, 208, 112, {**SMALL, "tma": tma}
    to = align(torch.tensor(ids, dtype=torch.int32, device=DEVICE), slots, 16)
    assert to.order_N is not None
    rows = int(to.counts_e.sum())
    order = to.order_N[:rows].long()
    x = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    w13, w2 = weights(slots, 2 * width, dim, group, kind, 2), weights(slots, 71, width, group, kind, 3)
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]

    def close(found: Tensor, expected: Tensor) -> None:
        scale = expected.float().abs().amax().clamp(min=1e-3) if rows else 1.0
        torch.testing.assert_close(found / scale, expected / scale, rtol=tolerance, atol=tolerance)

    hidden = gate_up_w8a16(x, w13, to, config, top_k)
    close(hidden[:rows], gate_up_reference(x, widen_bytes(w13), to, top_k))
    hidden[rows:] = math.nan
    y = torch.full((tokens * top_k, 71), math.nan, dtype=dtype, device=DEVICE)
    down_w8a16(hidden, w2, to, config, y)
    close(y[order], down_reference(hidden, widen_bytes(w2), to))
    assert y.isnan().all(1).sum() == len(y) - rows

    groups = align_groups(to.ends_e, rows + 3, 16)
    sorted_x = torch.full((rows + 3, dim), math.nan, dtype=dtype, device=DEVICE)
    sorted_x[:rows] = x[order // top_k]
    again = gate_up_w8a16(sorted_x, w13, groups, config)
    assert torch.equal(again[:rows], hidden[:rows])
    out = torch.empty(rows + 3, 71, dtype=dtype, device=DEVICE)
    assert torch.equal(down_w8a16(again, w2, groups, config, out)[:rows], y[order])


def test_all_rows_of_one_slot() -> None:
    """As its example; and what a kernel reads lies at addresses that are all multiples of 16."""
    to = align_rows(3, 2, DEVICE)
    assert (to.ends_e.tolist(), to.slot_Z.tolist(), to.row_Z.tolist()) == ([3], [0, 0], [0, 2])
    for rows in (0, 1, 5, 16, 17, 70_000):
        to, groups = align_rows(rows, 16, DEVICE), align_groups(torch.tensor([rows], dtype=torch.int32), rows, 16)
        assert all(torch.equal(a.cpu(), b) for a, b in ((to.ends_e, groups.ends_e), (to.row_Z, groups.row_Z)))
        assert not to.slot_Z.any()
        assert not to.ends_e.data_ptr() % 16


def compiled(kind: str, group: int, product: str, rows: int, tma: int) -> Case:
    config = launch_weight_only(FAMILY, rows, 128, 768, 2048, group, torch.bfloat16, "untuned")
    numbers, block_n = ("x_stride", "out_stride", "width", "inner"), config[f"{product}_block_n"]
    signature = {
        "x_ptr": "*bf16", "w": f"tensordesc<{kind}[{block_n}, 128]>" if tma else f"*{kind}", "scale_ptr": "*fp32",
        "out_ptr": "*bf16", "order_ptr": "*i32", "ends_ptr": "*i32", "slot_ptr": "*i32", "row_ptr": "*i32",
        "num_tiles": "i32", "top_k": "i32", **dict.fromkeys(numbers, "i32"),
    }  # fmt: skip
    constants = {
        "SWIGLU": product == "up", "TMA": bool(tma), "GROUP": config["group"], "INPUTS": group,
        "BLOCK_M": config["block_m"], "BLOCK_N": config[f"{product}_block_n"], "BLOCK_K": 128,
    }  # fmt: skip
    warps, stages = config[f"{product}_warps"], config[f"{product}_stages"]
    return Case("grouped_w8a16:w8a16_kernel", signature, constants, numbers, warps, stages)


def test_w8a16_compiles_for_hopper() -> None:
    cases = [compiled("fp8e4nv", 128, product, 131072, 1) for product in ("up", "down")]
    cases += [compiled("fp8e4nv", 128, "up", 8, 1), compiled("i8", 0, "down", 8, 0)]
    for case, report in zip(cases, compile_all(cases), strict=True):
        assert report.stack_bytes == 0, case
        assert report.wgmma, case
        assert report.tma == case.constants["TMA"], case
        assert report.registers * case.num_warps * 32 <= 65536, case
        assert report.shared_bytes <= 227 * 1024, case
