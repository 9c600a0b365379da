"""The experts' products with 4- and 8-bit weights: interpreted, and compiled for sm_90."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels.activation import SWIGLU_ACT
from moeserve.kernels.align import align, align_groups, align_rows
from moeserve.kernels.configs import Config
from moeserve.kernels.fp8 import E4M3
from moeserve.kernels.grouped_weight_only import (
    Narrow,
    _of_e2m1,
    down_narrow,
    gate_up_narrow,
    half_of,
    launch_narrow_of,
    pack_int4,
)
from moeserve.ops.quantized import E2M1, Quantized, quantize
from tests.kernels.aot import Case, compile_all, sorted_before
from tests.kernels.device import DEVICE
from tools.gpu.references import down_reference, gate_up_reference, widen_narrow

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # NumPy, which interprets
SIXTEEN = (
    torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
)  # whose products the interpreter computes wrongly
CASES = [
    ("int4 with zeros", 32, 1, SIXTEEN),
    ("int4", 64, 0, torch.float32),
    ("int4 with zeros", 64, 1, torch.float16),
    ("int4 with zeros", 128, 0, SIXTEEN),
    ("int4", 128, 1, torch.float32),
    ("int8", 256, 1, SIXTEEN),  # of the one product all inputs, of the other more than there are
    ("int8", 96, 0, torch.float32),  # the last group is not whole
    ("fp8", 128, 0, torch.float32),
    ("fp8", 64, 1, SIXTEEN),
    ("fp4", 16, 1, SIXTEEN),
    ("fp4", 32, 0, torch.float32),
    ("int4 with zeros", 16, 0, torch.float32),
]
SMALL: Config = {
    "block_m": 16, "tma": 1, "group": 2, "up_block_n": 64, "up_warps": 4, "up_stages": 2,
    "down_block_n": 64, "down_warps": 4, "down_stages": 2,
}  # fmt: skip


def weights(kind: str, experts: int, outputs: int, inputs: int, group: int, seed: int) -> Narrow:
    """Return weights; with 8 bits, every byte that is a number occurs."""
    random = torch.Generator().manual_seed(seed)
    scales = torch.rand(experts, outputs, -(-inputs // group), generator=random) / math.sqrt(inputs)
    if kind.startswith(("int4", "fp4")):
        values = torch.randint(
            0, 16, (experts, outputs, inputs), generator=random, dtype=torch.uint8
        )
        points = (
            torch.randint(0, 16, scales.shape, generator=random).float()
            if "zeros" in kind
            else None
        )
        parts = (values, scales, points)
        return pack_int4(
            *(None if part is None else part.to(DEVICE) for part in parts),
            group=group,
            floats=kind == "fp4",
        )
    values = torch.randint(
        -128, 128, (experts, outputs, inputs), generator=random, dtype=torch.int8
    )
    if kind == "fp8":
        values = values.where(values & 127 != 127, 0).view(torch.uint8).view(E4M3)
    return Narrow(
        group, values.to(DEVICE), (scales / 128).transpose(-1, -2).contiguous().to(DEVICE)
    )


def test_products_example() -> None:
    """Check the examples in both docstrings."""
    to = align(torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), 1, 16)
    scales = torch.full((1, 2, 2), 1 / 64, device=DEVICE)
    x = torch.ones(1, 64, device=DEVICE)
    nines, sevens = (torch.full((1, 2, 64), v, dtype=torch.uint8, device=DEVICE) for v in (9, 7))
    found = gate_up_narrow(x, pack_int4(nines, scales, None, 32), to, SMALL)
    torch.testing.assert_close(found.cpu(), torch.tensor([[0.7311]]), atol=1e-4, rtol=0)
    assert down_narrow(x * 2, pack_int4(sevens, scales, None, 32), to, SMALL).tolist() == [[-2, -2]]
    halves = [
        Narrow(group, torch.empty(1, 1, k).to(E4M3), scales).half
        for group, k in ((128, 2048), (48, 96))
    ]
    assert halves == [128, 16]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_packed_weights_mean_what_quantized_ones_do(group: int) -> None:
    random = torch.Generator().manual_seed(group)
    into = Quantized.empty("int4", group, False, torch.bfloat16, (2, 5, 256))
    for expert in range(2):
        quantize(torch.randn(5, 256, generator=random), into[expert], "w")
    packed = pack_int4(into.values, into.scales, None, group)
    assert packed.values.shape == (2, 5, 128)
    meant = (into.values.double() - 8) * into.scales.double().repeat_interleave(group, -1)
    assert torch.equal(widen_narrow(packed), meant)


@triton.jit
def _e2m1_kernel(values_ptr, out_ptr):
    values = tl.load(values_ptr + tl.arange(0, 16))
    tl.store(out_ptr + tl.arange(0, 16), _of_e2m1(values, tl.zeros((1,), out_ptr.dtype.element_ty)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_number_of_e2m1(dtype: torch.dtype) -> None:
    out = torch.empty(16, dtype=dtype, device=DEVICE)
    _e2m1_kernel[(1,)](torch.arange(16, dtype=torch.uint8, device=DEVICE), out)
    assert out.tolist() == list(E2M1)
    assert out.signbit().tolist() == [False] * 8 + [True] * 8


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize(("kind", "group", "tma", "dtype"), CASES)
@pytest.mark.parametrize(
    "ids", [[[0, 1], [2, 0]], [[1, -1]] * 17, [[2, -1], [-1, 0], [-1, -1]], [[-1, -1]]]
)
def test_both_products(
    ids: list[list[int]], kind: str, group: int, tma: int, dtype: torch.dtype
) -> None:
    """Through the order of pairs; then over the same rows sorted before, which must give the same
    bits.
    """
    (tokens, top_k), experts, dim, width, config = (len(ids), 2), 3, 256, 128, {**SMALL, "tma": tma}
    to = align(torch.tensor(ids, dtype=torch.int32, device=DEVICE), experts, 16)
    assert to.order_N is not None
    rows = int(to.counts_e.sum())
    order = to.order_N[:rows].long()
    x = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    w13 = weights(kind, experts, 2 * width, dim, group, 2)
    w2 = weights(kind, experts, 71, width, group, 3)
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]

    def close(found: Tensor, expected: Tensor) -> None:
        scale = expected.float().abs().amax().clamp(min=1e-3) if rows else 1.0
        torch.testing.assert_close(found / scale, expected / scale, rtol=tolerance, atol=tolerance)

    hidden = gate_up_narrow(x, w13, to, config, top_k)
    close(hidden[:rows], gate_up_reference(x, widen_narrow(w13), to, top_k))
    hidden[rows:] = math.nan
    y = torch.full((tokens * top_k, 71), math.nan, dtype=dtype, device=DEVICE)
    down_narrow(hidden, w2, to, config, y)
    close(y[order], down_reference(hidden, widen_narrow(w2), to))
    assert y.isnan().all(1).sum() == len(y) - rows

    groups = align_groups(to.ends_e, rows + 3, 16)
    sorted_x = torch.full((rows + 3, dim), math.nan, dtype=dtype, device=DEVICE)
    sorted_x[:rows] = x[order // top_k]
    again = gate_up_narrow(sorted_x, w13, groups, config)
    assert torch.equal(again[:rows], hidden[:rows])
    assert torch.equal(down_narrow(again, w2, groups, config)[:rows], y[order])


def test_all_rows_of_one_slot() -> None:
    """Check the docstring's example; addresses that the kernel reads are multiples of 16."""
    to = align_rows(3, 2, DEVICE)
    assert (to.ends_e.tolist(), to.expert_Z.tolist(), to.row_Z.tolist()) == ([3], [0, 0], [0, 2])
    for rows in (0, 1, 5, 16, 17, 70_000):
        to = align_rows(rows, 16, DEVICE)
        groups = align_groups(torch.tensor([rows], dtype=torch.int32, device=DEVICE), rows, 16)
        assert all(
            torch.equal(a, b) for a, b in ((to.ends_e, groups.ends_e), (to.row_Z, groups.row_Z))
        )
        assert not to.expert_Z.any()
        assert not to.ends_e.data_ptr() % 16


def compiled(kind: str, group: int, product: str, rows: int, tma: int) -> Case:
    word = kind.split()[0]
    config = launch_narrow_of(rows, 128, 768, 2048, word, group, torch.bfloat16, "untuned")
    numbers = ("x_stride", "out_stride", "width", "inner")
    half = half_of(group) if word in ("int4", "fp4") else 128
    element = {"int4": "u8", "fp4": "u8", "int8": "i8", "fp8": "fp8e4nv"}[word]
    block_n = config[f"{product}_block_n"]
    signature = {
        "x_ptr": "*bf16",
        "w": f"tensordesc<{element}[{block_n}, {half}]>" if tma else f"*{element}",
        "scale_ptr": "*fp32",
        "out_ptr": "*bf16",
        "order_ptr": "*i32",
        "ends_ptr": "*i32",
        "expert_ptr": "*i32",
        "row_ptr": "*i32",
        "num_tiles": "i32",
        "top_k": "i32",
        **dict.fromkeys(numbers, "i32"),
    }
    constants = {
        "ACT": SWIGLU_ACT if product == "up" else None,
        "bias_ptr": None,
        "PAIRS": word in ("int4", "fp4"),
        "FLOATS": word == "fp4",
        "TMA": bool(tma),
        "GROUP": config["group"],
        "INPUTS": group,
        "HALF": half,
        "BLOCK_M": config["block_m"],
        "BLOCK_N": block_n,
    }
    if "zeros" in kind:
        signature["zero_ptr"] = "*fp32"
    else:
        constants["zero_ptr"] = None
    warps = config[f"{product}_warps"]
    stages = config[f"{product}_stages"]
    return Case(
        "grouped_weight_only:weight_only_kernel", signature, constants, numbers, warps, stages
    )


@pytest.mark.full("aot")
def test_weight_only_compiles_for_hopper() -> None:
    cases = [
        compiled("int4", 128, product, rows, 1)
        for product in ("up", "down")
        for rows in (8, 131072)
    ]
    cases += [compiled("int4", 128, "up", 8, 0), compiled("int4 with zeros", 32, "up", 8, 1)]
    cases += [
        compiled("int4 with zeros", 32, "down", 131072, 1),
        compiled("int8", 2048, "down", 8, 0),
    ]
    cases += [
        compiled("fp4", group, product, 8, 1) for group, product in ((16, "up"), (32, "down"))
    ]
    cases += [compiled("fp4", 16, "down", 131072, 1), compiled("fp4", 32, "up", 131072, 1)]
    cases += [
        compiled("fp8", 128, "up", 8, 1),
        *(compiled("fp8", 128, p, 131072, 1) for p in ("up", "down")),
    ]
    cases += [sorted_before(compiled("fp4", 32, product, 8, 1)) for product in ("up", "down")]
    for case, report in zip(cases, compile_all(cases), strict=True):
        assert report.stack_bytes == 0, case
        assert report.wgmma, case
        assert report.tma == case.constants["TMA"], case
        assert report.registers * case.num_warps * 32 <= 65536, case
        assert report.shared_bytes <= 227 * 1024, case
