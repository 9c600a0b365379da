"""The experts' products: interpreted against references, and compiled for sm_90."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels.activation import SWIGLU_ACT
from moeserve.kernels.align import Alignment, align, align_groups
from moeserve.kernels.configs import Config
from moeserve.kernels.grouped_gemm import down, gate_up, launch_of
from moeserve.kernels.tiles import block_k, tile_of
from tests.kernels.aot import Case, Report, compile_all, sorted_before
from tests.kernels.device import DEVICE
from tools.gpu.references import down_reference, gate_up_reference

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # NumPy, which interprets
# The interpreter computes products of bfloat16 wrongly.
DTYPES = (
    [torch.float32, torch.float16]
    if DEVICE.type == "cpu"
    else [torch.float32, torch.float16, torch.bfloat16]
)
SMALL: Config = {
    "block_m": 16, "tma": 1, "group": 2, "up_block_n": 16, "up_warps": 4, "up_stages": 2,
    "down_block_n": 32, "down_warps": 4, "down_stages": 2,
}  # fmt: skip
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def ids_of(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def nan_after(to: Alignment, x: Tensor) -> Tensor:
    """Fill rows that must not be read with NaN."""
    x[int(to.counts_e.sum()) :] = math.nan
    return x


def test_gate_up_example() -> None:
    x = torch.tensor([[1.0]], device=DEVICE)
    w13 = torch.tensor([[[2.0], [3.0]]], device=DEVICE)
    found = gate_up(x, w13, align(ids_of([0]), 1, 16), SMALL)
    torch.testing.assert_close(found.cpu(), torch.tensor([[5.2848]]), atol=1e-4, rtol=0)


def test_down_example() -> None:
    """Pair 1 goes to expert 0, pair 0 to expert 1; both experts hold the same."""
    h = torch.tensor([[4.0], [5.0]], device=DEVICE)
    w2 = torch.tensor([[[1.0], [2.0]]] * 2, device=DEVICE)
    assert down(h, w2, align(ids_of([1, 0]), 2, 16), SMALL).tolist() == [[5, 10], [4, 8]]


@triton.jit
def order_kernel(out_ptr, num_tiles, num_blocks, GROUP: tl.constexpr):
    tile, block = tile_of(tl.program_id(0), num_tiles, num_blocks, GROUP)
    tl.store(out_ptr + tl.program_id(0) * 2, tile)
    tl.store(out_ptr + tl.program_id(0) * 2 + 1, block)


def test_order_of_tiles() -> None:
    """Check the docstring's example, and a last group that is not full."""
    for tiles, expected in (
        (4, [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [3, 0], [2, 1], [3, 1]]),
        (3, [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [2, 1]]),
    ):
        out = torch.empty(len(expected), 2, dtype=torch.int32, device=DEVICE)
        order_kernel[(len(expected),)](out, tiles, 2, GROUP=2)
        assert out.tolist() == expected


ROUTINGS = {
    "even": [[0, 1], [2, 0], [1, 2]],
    "all_to_one": [[1, -1]] * 18,
    "nowhere": [[-1, -1]],
    "some": [[2, -1], [-1, 0], [0, 2], [-1, -1], [2, 1]],
}


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "width"), [(64, 48), (72, 24), (37, 19), (128, 32)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_both_products(routing: str, dim: int, width: int, dtype: torch.dtype) -> None:
    """Through the order of pairs, and over the same rows sorted before, which must give the same
    bits.
    """
    ids = ids_of(*ROUTINGS[routing])
    (tokens, top_k), experts = ids.shape, 3
    to = align(ids, experts, 16)
    assert to.order_N is not None
    rows = int(to.counts_e.sum())
    order = to.order_N[:rows].long()
    wide = normal(tokens, dim + 8, dtype=dtype)
    wide[:, dim:] = math.nan
    x = wide[:, :dim]
    w13 = normal(experts, 2 * width, dim, dtype=dtype)
    w2 = normal(experts, dim, width, dtype=dtype)
    x = x / math.sqrt(dim) if dim % 8 else x.div_(math.sqrt(dim))
    exact = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}

    hidden = gate_up(x, w13, to, SMALL, top_k)
    assert hidden.shape == (tokens * top_k, width)
    torch.testing.assert_close(hidden[:rows], gate_up_reference(x, w13, to, top_k), **exact)
    y = torch.full((tokens * top_k, dim), math.nan, dtype=dtype, device=DEVICE)
    down(nan_after(to, hidden), w2, to, SMALL, y)
    torch.testing.assert_close(y[order], down_reference(hidden, w2, to), **exact)
    assert y.isnan().any(1).sum() == len(y) - rows

    sorted_x = torch.full((tokens * top_k + 3, dim), math.nan, dtype=dtype, device=DEVICE)
    sorted_x[:rows] = x[order // top_k]
    groups = align_groups(to.ends_e, len(sorted_x), 16)
    sorted_hidden = gate_up(sorted_x, w13, groups, SMALL)
    assert torch.equal(sorted_hidden[:rows], hidden[:rows])
    sorted_y = torch.full_like(sorted_x, math.nan)
    down(nan_after(groups, sorted_hidden), w2, groups, SMALL, sorted_y)
    assert torch.equal(sorted_y[:rows], y[order])
    assert sorted_y[rows:].isnan().all()


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize("group", [1, 3])
def test_more_tiles_than_a_group(group: int, tma: int) -> None:
    """Several tiles of an expert, experts without rows, blocks of outputs beyond the width; values
    huge and tiny.
    """
    ids = torch.tensor([3] * 35 + [0] * 20 + [-1] + [1] * 2, dtype=torch.int32, device=DEVICE)[
        :, None
    ]
    to = align(ids, 4, 16)
    config = {**SMALL, "group": group, "tma": tma}
    x = (
        normal(len(ids), 40, dtype=torch.float32)
        * torch.logspace(-12, 12, len(ids), device=DEVICE)[:, None]
    )
    w13 = normal(4, 72, 40, dtype=torch.float32)
    w2 = normal(4, 72, 36, dtype=torch.float32)
    hidden = gate_up(x, w13, to, config)
    rows = int(to.counts_e.sum())
    expected = gate_up_reference(x, w13, to)
    scale = expected.abs().amax(1, keepdim=True)
    torch.testing.assert_close(hidden[:rows] / scale, expected / scale, rtol=0, atol=1e-5)
    assert to.order_N is not None
    y = down(hidden, w2, to, config)[to.order_N[:rows].long()]
    expected = down_reference(hidden, w2, to)
    scale = expected.abs().amax(1, keepdim=True)
    torch.testing.assert_close(y / scale, expected / scale, rtol=0, atol=1e-5)


@pytest.mark.skipif(
    DEVICE.type == "cpu", reason="an interpreter's sums say nothing of tensor cores'"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    experts = 4
    dim = 2048
    width = 768
    x = normal(3000, dim, dtype=dtype)
    w13 = normal(experts, 2 * width, dim, dtype=dtype)
    w2 = normal(experts, dim, width, dtype=dtype)
    found = []
    for rows in (3000, 200, 60, 5):
        ids = torch.arange(rows, dtype=torch.int32, device=DEVICE)[:, None] % experts
        config = launch_of(rows, experts, width, dim, dtype, "untuned")
        to = align(ids, experts, config["block_m"])
        found.append(down(gate_up(x[:rows], w13, to, config), w2, to, config))
    for fewer in found[1:]:
        assert torch.equal(fewer, found[0][: len(fewer)])


def test_launches_fit_the_number_of_rows() -> None:
    """Steps over K are no part of them: those are the weights' alone."""
    launches = [
        launch_of(rows, 8, 768, 2048, torch.bfloat16, "untuned") for rows in (8, 150, 500, 8192)
    ]
    assert [launch["block_m"] for launch in launches] == [16, 32, 64, 128]
    assert not any("block_k" in launch for launch in launches)
    assert [block_k(k, torch.bfloat16) for k in (5, 37, 2048)] == [16, 64, 64]
    assert block_k(2048, torch.float32) == 32


def compiled(dtype: str, product: str, config: Config, tma: int, biased: bool = False) -> Case:
    """Compile with the sizes of Qwen3-30B-A3B."""
    numbers = ("x_stride", "out_stride", "width", "inner")
    block_n = config[f"{product}_block_n"]
    tile = {"BLOCK_M": config["block_m"], "BLOCK_K": 64}
    signature = {
        "x_ptr": f"*{dtype}",
        "w": f"tensordesc<{dtype}[{block_n}, 64]>" if tma else f"*{dtype}",
        "out_ptr": f"*{dtype}",
        "order_ptr": "*i32",
        "ends_ptr": "*i32",
        "expert_ptr": "*i32",
        "row_ptr": "*i32",
        "num_tiles": "i32",
        "top_k": "i32",
        **dict.fromkeys(numbers, "i32"),
    }
    flags = {
        "ACT": SWIGLU_ACT if product == "up" else None,
        "bias_ptr": None,
        "EVEN": True,
        "TMA": bool(tma),
        "GROUP": config["group"],
    }
    warps = config[f"{product}_warps"]
    stages = config[f"{product}_stages"]
    constants = {**tile, **flags, "BLOCK_N": block_n}
    case = Case("grouped_gemm:grouped_kernel", signature, constants, numbers, warps, stages)
    if not biased:
        return case
    gpt_oss = {
        **constants,
        "ACT": ("silu", 1.702, 7.0, math.inf, 7.0, 1.0) if product == "up" else None,
    }
    return replace(
        case, signature={**signature, "bias_ptr": "*fp32"}, constants=without(gpt_oss, "bias_ptr")
    )


def without(constants: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in constants.items() if key != name}


@pytest.mark.full("aot")
def test_grouped_gemm_compiles_for_hopper() -> None:
    launches = [
        launch_of(rows, 128, 768, 2048, torch.bfloat16, "untuned") for rows in (8, 8192, 131072)
    ]
    cases = [
        compiled("bf16", p, launch, tma)
        for p in ("up", "down")
        for launch in launches
        for tma in (0, 1)
    ]
    cases += [compiled("bf16", product, launches[1], 1, biased=True) for product in ("up", "down")]
    cases += [
        sorted_before(compiled("bf16", product, launches[1], 1)) for product in ("up", "down")
    ]
    reports: list[Report] = compile_all(cases)
    for case, report in zip(cases, reports, strict=True):
        assert report.stack_bytes == 0, case
        assert report.wgmma, case
        assert report.tma == case.constants["TMA"], case
        assert report.registers * case.num_warps * 32 <= 65536, case
        assert report.shared_bytes <= 227 * 1024, case
