"""The experts' products with weights in 4 bits, interpreted, beside their meaning; and compiled for sm_90."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moeserve.kernels.align import align, align_groups
from moeserve.kernels.configs import Config
from moeserve.kernels.grouped_gemm import down_reference, gate_up_reference
from moeserve.kernels.grouped_int4 import (
    FAMILY,
    Int4,
    down_int4,
    gate_up_int4,
    half_of,
    pack_int4,
    widen_int4,
)
from moeserve.kernels.tiles import launch_weight_only
from moeserve.ops.quantised import Quantised, quantise
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, which interprets
SIXTEEN = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16  # whose products the interpreter computes wrongly
CASES = [
    (32, True, 1, SIXTEEN),
    (64, False, 0, torch.float32),
    (64, True, 1, torch.float16),
    (128, True, 0, SIXTEEN),
    (128, False, 1, torch.float32),
]
SMALL: Config = {
    "block_m": 16, "tma": 1, "group": 2, "up_block_n": 64, "up_warps": 4, "up_stages": 2,
    "down_block_n": 64, "down_warps": 4, "down_stages": 2,
}  # fmt: skip


def weights(slots: int, outputs: int, inputs: int, group: int, zeros: bool, seed: int) -> Int4:
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (slots, outputs, inputs), generator=random, dtype=torch.uint8)
    scales = torch.rand(slots, outputs, inputs // group, generator=random) / math.sqrt(inputs)
    points = torch.randint(0, 16, scales.shape, generator=random).float() if zeros else None
    parts = (values, scales, points)
    return pack_int4(*(None if part is None else part.to(DEVICE) for part in parts), group=group)


def test_products_example() -> None:
    """Both docstrings'."""
    to = align(torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), 1, 16)
    scales = torch.full((1, 2, 2), 1 / 64, device=DEVICE)
    x = torch.ones(1, 64, device=DEVICE)
    nines, sevens = (torch.full((1, 2, 64), v, dtype=torch.uint8, device=DEVICE) for v in (9, 7))
    found = gate_up_int4(x, pack_int4(nines, scales, None, 32), to, SMALL)
    torch.testing.assert_close(found.cpu(), torch.tensor([[0.7311]]), atol=1e-4, rtol=0)
    assert down_int4(x * 2, pack_int4(sevens, scales, None, 32), to, SMALL).tolist() == [[-2, -2]]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_packed_weights_mean_what_quantised_ones_do(group: int) -> None:
    random = torch.Generator().manual_seed(group)
    into = Quantised.empty("int4", group, False, torch.bfloat16, (2, 5, 256))
    for slot in range(2):
        quantise(torch.randn(5, 256, generator=random), into[slot], "w")
    packed = pack_int4(into.values, into.scales, None, group)
    assert packed.packed.shape == (2, 5, 128)
    meant = (into.values.double() - 8) * into.scales.double().repeat_interleave(group, -1)
    assert torch.equal(widen_int4(packed), meant)


@pytest.mark.parametrize(("group", "zeros", "tma", "dtype"), CASES)
@pytest.mark.parametrize("ids", [[[0, 1], [2, 0]], [[1, -1]] * 17, [[2, -1], [-1, 0], [-1, -1]], [[-1, -1]]])
def test_both_products(ids: list[list[int]], group: int, zeros: bool, tma: int, dtype: torch.dtype) -> None:
    """Through the order of pairs; then over the same rows sorted before, which must give the same bits."""
    (tokens, top_k), slots, dim, width, config = (len(ids), 2), 3, 256, 128, {**SMALL, "tma": tma}
    to = align(torch.tensor(ids, dtype=torch.int32, device=DEVICE), slots, 16)
    assert to.order_N is not None
    rows = int(to.counts_e.sum())
    order = to.order_N[:rows].long()
    x = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    w13, w2 = weights(slots, 2 * width, dim, group, zeros, 2), weights(slots, 71, width, group, zeros, 3)
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]

    def close(found: Tensor, expected: Tensor) -> None:
        scale = expected.float().abs().amax().clamp(min=1e-3) if rows else 1.0
        torch.testing.assert_close(found / scale, expected / scale, rtol=tolerance, atol=tolerance)

    hidden = gate_up_int4(x, w13, to, config, top_k)
    close(hidden[:rows], gate_up_reference(x, widen_int4(w13), to, top_k))
    hidden[rows:] = math.nan
    y = torch.full((tokens * top_k, 71), math.nan, dtype=dtype, device=DEVICE)
    down_int4(hidden, w2, to, config, y)
    close(y[order], down_reference(hidden, widen_int4(w2), to))
    assert y.isnan().all(1).sum() == len(y) - rows

    groups = align_groups(to.ends_e, rows + 3, 16)
    sorted_x = torch.full((rows + 3, dim), math.nan, dtype=dtype, device=DEVICE)
    sorted_x[:rows] = x[order // top_k]
    again = gate_up_int4(sorted_x, w13, groups, config)
    assert torch.equal(again[:rows], hidden[:rows])
    assert torch.equal(down_int4(again, w2, groups, config)[:rows], y[order])


def compiled(group: int, zeros: bool, product: str, rows: int, tma: int) -> Case:
    config = launch_weight_only(FAMILY, rows, 128, 768, 2048, group, torch.bfloat16, "untuned")
    numbers, half = ("x_stride", "out_stride", "width", "inner"), half_of(group)
    block_n = config[f"{product}_block_n"]
    signature = {
        "x_ptr": "*bf16", "w": f"tensordesc<u8[{block_n}, {half}]>" if tma else "*u8", "scale_ptr": "*fp32",
        "out_ptr": "*bf16", "order_ptr": "*i32", "ends_ptr": "*i32", "slot_ptr": "*i32", "row_ptr": "*i32",
        "num_tiles": "i32", "top_k": "i32", **dict.fromkeys(numbers, "i32"),
    }  # fmt: skip
    constants = {
        "SWIGLU": product == "up", "TMA": bool(tma), "GROUP": config["group"], "INPUTS": group, "HALF": half,
        "BLOCK_M": config["block_m"], "BLOCK_N": config[f"{product}_block_n"],
    }  # fmt: skip
    if zeros:
        signature["zero_ptr"] = "*fp32"
    else:
        constants["zero_ptr"] = None
    warps, stages = config[f"{product}_warps"], config[f"{product}_stages"]
    return Case("grouped_int4:int4_kernel", signature, constants, numbers, warps, stages)


def test_int4_compiles_for_hopper() -> None:
    cases = [compiled(128, False, product, rows, 1) for product in ("up", "down") for rows in (8, 131072)]
    cases += [compiled(128, False, "up", 8, 0), compiled(32, True, "up", 8, 1), compiled(32, True, "down", 131072, 1)]
    for case, report in zip(cases, compile_all(cases), strict=True):
        assert report.stack_bytes == 0, case
        assert report.wgmma, case
        assert report.tma == case.constants["TMA"], case
        assert report.registers * case.num_warps * 32 <= 65536, case
        assert report.shared_bytes <= 227 * 1024, case
