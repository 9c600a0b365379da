"""The kernels of e4m3 rows and of the experts' products with them, interpreted; and compiled for
sm_90.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moeserve.kernels.activation import SWIGLU_ACT, act_of
from moeserve.kernels.align import align, align_groups
from moeserve.kernels.configs import Config
from moeserve.kernels.fp8 import BLOCK, quantize, quantize_kernel
from moeserve.kernels.fp8 import widen as widen_rows
from moeserve.kernels.grouped_fp8 import Scaled, down_fp8, gate_up_fp8, launch_fp8_of
from moeserve.moe.all2all.wire_format import Fp8Wire
from moeserve.ops.rules import SWIGLU, Activation
from tests.kernels.aot import Case, compile_all, sorted_before
from tests.kernels.device import DEVICE
from tests.kernels.interpreted import rounding_to_nearest
from tools.gpu.references import (
    act_mul_reference,
    down_reference,
    gate_up_reference,
    quantize_reference,
    widen,
    widen_weights,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # NumPy, which interprets
SMALL: Config = {
    "block_m": 16, "tma": 1, "group": 2, "up_block_n": 128, "up_warps": 4, "up_stages": 2,
    "down_block_n": 64, "down_warps": 4, "down_stages": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _rounding_to_nearest() -> Iterator[None]:
    with rounding_to_nearest():
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def scaled_weights(experts: int, outputs: int, inputs: int, seed: int) -> Scaled:
    blocks = (experts, outputs // BLOCK, -(-inputs // BLOCK))
    scales = normal(*blocks, seed=seed).abs() / inputs
    return Scaled((normal(experts, outputs, inputs, seed=seed) * 8).to(torch.float8_e4m3fn), scales)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def test_quantize_example() -> None:
    for row, values, scale in (([448.0, -1.0], [448, -1], 1), ([896.0, 1.0], [448, 0.5], 2)):
        found, scales = quantize(torch.tensor([row], device=DEVICE))
        assert (found.float().tolist(), scales.tolist()) == ([values], [[scale]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(0, 128), (1, 1), (3, 300), (2, 128 * 17)])
def test_quantize(rows: int, width: int, dtype: torch.dtype) -> None:
    """Strided rows, huge and tiny values, and some that are no numbers; the same bits as travel."""
    wide = (
        normal(rows, width + 3)
        * 10.0 ** torch.arange(-8, 5, device=DEVICE).repeat(width)[: width + 3]
    )
    x = wide.to(dtype)[:, :width]
    if rows > 1:
        x[0, 5] = math.nan
        x[0, 6] = math.inf
        x[1, 7] = -math.inf
        x[1, :3] = 0.0
    values, scales = quantize(x)
    expected_values, expected_scales = quantize_reference(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.float().nan_to_num(1e9), expected_values.float().nan_to_num(1e9))
    sent = Fp8Wire().encode(x.cpu())
    received = Fp8Wire().decode(sent, torch.float32, width)
    torch.testing.assert_close(widen(values, scales).float().cpu(), received, equal_nan=True)


@pytest.mark.parametrize("room", [0, 20])
def test_quantize_only_the_rows_of_tiles(room: int) -> None:
    counts = [0, 17, 1]
    ends = (
        torch.tensor(counts, device=DEVICE)
        if room
        else torch.tensor(counts, device=DEVICE).cumsum(0)
    )
    to = align_groups(ends.int(), 60, 16, room)
    rows = (
        [e * room + i for e, count in enumerate(counts) for i in range(count)]
        if room
        else list(range(18))
    )
    x = normal(60, 300)
    found = quantize(x, to)
    whole = quantize(x)
    for part, expected in zip(found, whole, strict=True):
        assert torch.equal(bits(part)[rows], bits(expected)[rows])
    values, scales = (torch.zeros_like(part) for part in found)
    quantize_kernel[(16 * len(to.expert_Z), 1)](
        x,
        values,
        scales,
        to.ends_e,
        to.expert_Z,
        to.row_Z,
        300,
        300,
        BLOCK_M=16,
        BLOCKS=16,
        BLOCK=BLOCK,
    )
    assert scales.any(1).nonzero()[:, 0].tolist() == rows


@pytest.mark.parametrize(
    "activation",
    [SWIGLU, Activation(alpha=1.702, limit=1.0, up_shift=1.0)],
    ids=["plain", "clamped"],
)
def test_quantize_behind_an_activation(activation: Activation) -> None:
    x = normal(3, 2 * 200) * 3
    values, scales = quantize(x, act=act_of(activation))
    expected = act_mul_reference(x, activation)
    torch.testing.assert_close(scales, quantize_reference(expected)[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(
        widen(values, scales).float(), expected, rtol=2**-3, atol=float(expected.abs().max()) / 448
    )


@pytest.mark.parametrize("width", [256, 200])
def test_widen(width: int) -> None:
    """Scales are transposed, as DeepEP returns them; rows beyond the counts are left alone."""
    counts = [70, 0, 1]
    room = 70
    values = (normal(3, room, 256) * 8).to(torch.float8_e4m3fn)
    scales = normal(3, 2, room).transpose(1, 2)
    exact = values.float() * scales.repeat_interleave(BLOCK, 2)
    for expert, count in enumerate(counts):
        values[expert, count:].view(torch.uint8).fill_(0x7F)
    out = torch.full((3, room, width), 7.0, device=DEVICE)
    found = widen_rows(values, scales, torch.tensor(counts, dtype=torch.int32, device=DEVICE), out)
    for expert, count in enumerate(counts):
        assert torch.equal(found[expert, :count], exact[expert, :count, :width])
        assert (found[expert, count:] == 7).all()


def test_products_example() -> None:
    """Check the examples in both docstrings."""
    to = align(torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), 1, 16)
    ones = torch.ones(1, 256, 128, device=DEVICE).to(torch.float8_e4m3fn)
    scales = torch.full((1, 2, 1), 1 / 128, device=DEVICE)
    x = Scaled(ones[0, :1], torch.ones(1, 1, device=DEVICE))
    hidden = gate_up_fp8(x, Scaled(ones, scales), to, SMALL)
    assert hidden.values.float().unique().tolist() == [448]
    torch.testing.assert_close(
        hidden.scales.cpu() * 448, torch.tensor([[0.7311]]), atol=1e-4, rtol=0
    )
    h = Scaled((x.values.float() * 2).to(torch.float8_e4m3fn), x.scales / 2)
    out = torch.empty(1, 128, device=DEVICE)
    assert down_fp8(h, Scaled(ones[:, :128], scales[:, :1]), to, SMALL, out).unique().tolist() == [
        1
    ]


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize(
    "ids",
    [[[0, 1], [2, 0], [1, 2]], [[1, -1]] * 18, [[2, -1], [-1, 0], [-1, -1], [2, 1]], [[-1, -1]]],
)
def test_both_products(ids: list[list[int]], tma: int) -> None:
    """Several blocks, of inputs one not whole, through the order of pairs; then over the same rows
    sorted before.
    """
    (tokens, top_k), experts, dim, width, config = (len(ids), 2), 3, 272, 256, {**SMALL, "tma": tma}
    to = align(torch.tensor(ids, dtype=torch.int32, device=DEVICE), experts, 16)
    assert to.order_N is not None
    rows = int(to.counts_e.sum())
    order = to.order_N[:rows].long()
    x = Scaled(
        *quantize(
            normal(tokens, dim) * 10.0 ** torch.arange(tokens, device=DEVICE)[:, None].clamp(max=3)
        )
    )
    w13 = scaled_weights(experts, 2 * width, dim, seed=1)
    w2 = scaled_weights(experts, 384, width, seed=2)
    hidden = gate_up_fp8(x, w13, to, config, top_k)
    exact = gate_up_reference(widen(x.values, x.scales), widen_weights(w13), to, top_k).float()
    found = widen(hidden.values, hidden.scales)[:rows].float()
    largest = exact.abs().unflatten(1, (-1, BLOCK)).amax(2).repeat_interleave(BLOCK, 1)
    assert ((found - exact).abs() <= exact.abs() * 2**-4 + largest * 2**-14 + 1e-7).all()
    torch.testing.assert_close(
        hidden.scales[:rows], quantize_reference(exact)[1], rtol=1e-5, atol=1e-12
    )
    hidden.values.view(torch.uint8)[rows:] = 0x7F
    hidden.scales[rows:] = math.nan
    y = torch.full((tokens * top_k, 384), math.nan, device=DEVICE)
    down_fp8(hidden, w2, to, config, y)
    expected = down_reference(widen(hidden.values, hidden.scales), widen_weights(w2), to).float()
    torch.testing.assert_close(
        y[order], expected, rtol=1e-4, atol=float(expected.abs().max() if rows else 0) * 1e-6
    )
    assert y.isnan().all(1).sum() == len(y) - rows

    groups = align_groups(to.ends_e, rows + 3, 16)
    sorted_x = Scaled(x.values[order // top_k], x.scales[order // top_k])
    padded = Scaled(
        *(
            torch.cat([part, part.new_zeros(3, part.shape[1])])
            for part in (sorted_x.values, sorted_x.scales)
        )
    )
    again = gate_up_fp8(padded, w13, groups, config)
    assert torch.equal(bits(again.values[:rows]), bits(hidden.values[:rows]))
    sorted_y = torch.full((rows + 3, 384), math.nan, device=DEVICE)
    down_fp8(again, w2, groups, config, sorted_y)
    assert torch.equal(sorted_y[:rows], y[order])


def compiled(config: Config, product: str, tma: int) -> Case:
    numbers = ("x_stride", "out_stride", "width", "inner")
    block_n = config[f"{product}_block_n"]
    is_up = product == "up"
    signature = {
        "x_ptr": "*fp8e4nv",
        "x_scale_ptr": "*fp32",
        "w": f"tensordesc<fp8e4nv[{block_n}, 128]>" if tma else "*fp8e4nv",
        "w_scale_ptr": "*fp32",
        "out_ptr": "*fp8e4nv" if is_up else "*bf16",
        "order_ptr": "*i32",
        "ends_ptr": "*i32",
        "expert_ptr": "*i32",
        "row_ptr": "*i32",
        "num_tiles": "i32",
        "top_k": "i32",
        **dict.fromkeys(numbers, "i32"),
    }
    constants = {
        "ACT": SWIGLU_ACT if is_up else None, "bias_ptr": None,
        "EVEN": True, "TMA": bool(tma), "GROUP": config["group"], "BLOCK_M": config["block_m"],
        "BLOCK_N": block_n, "BLOCK": 128,
    }  # fmt: skip
    if is_up:
        signature["out_scale_ptr"] = "*fp32"
    else:
        constants["out_scale_ptr"] = None
    warps = config[f"{product}_warps"]
    stages = config[f"{product}_stages"]
    return Case("grouped_fp8:fp8_kernel", signature, constants, numbers, warps, stages)


@pytest.mark.full("aot")
def test_fp8_compiles_for_hopper() -> None:
    launches = [launch_fp8_of(rows, 128, 768, 2048, "untuned") for rows in (8, 131072)]
    cases = [
        compiled(config, product, tma)
        for product in ("up", "down")
        for config in launches
        for tma in (0, 1)
    ]
    cases += [sorted_before(compiled(launches[0], product, 1)) for product in ("up", "down")]
    values = {"values_ptr": "*fp8e4nv"}
    scales = {"scales_ptr": "*fp32"}
    rounds = {"x_ptr": "*bf16", **values, **scales, "row_stride": "i32", "width": "i32"}
    tables = ("ends_ptr", "expert_ptr", "row_ptr")
    sizes = {"BLOCKS": 16, "BLOCK": 128, "BLOCK_M": 16, "ACT": None}
    strides = dict.fromkeys(
        ("room", "width", "out_width", "expert_stride", "row_stride", "block_stride"), "i32"
    )
    widens = {**values, **scales, "counts_ptr": "*i32", "out_ptr": "*bf16", **strides}
    cases += [
        Case(
            "fp8:quantize_kernel",
            rounds,
            {**sizes, **dict.fromkeys(tables)},
            ("row_stride", "width"),
        ),
        Case(
            "fp8:quantize_kernel",
            {**rounds, **dict.fromkeys(tables, "*i32")},
            sizes,
            ("row_stride", "width"),
        ),
        Case(
            "fp8:quantize_kernel",
            {**rounds, **dict.fromkeys(tables, "*i32")},
            {**sizes, "ACT": SWIGLU_ACT},
            ("row_stride", "width"),
        ),
        Case("fp8:widen_kernel", widens, {"ROWS": 64, "BLOCK": 128}, ("width", "out_width")),
    ]
    *products, plain, tiled, activated, widened = compile_all(cases)
    rows = plain, tiled, activated, widened
    assert [(report.stack_bytes, report.registers <= 128) for report in rows] == [(0, True)] * 4
    for case, report in zip(cases[:-4], products, strict=True):
        assert report.stack_bytes == 0, case
        assert report.wgmma, case
        assert report.tma == case.constants["TMA"], case
        assert report.registers * case.num_warps * 32 <= 65536, case
        assert report.shared_bytes <= 227 * 1024, case
