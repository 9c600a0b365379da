"""Kernels of gated MLPs' activations: interpreted against torch, and compiled for sm_90."""

from __future__ import annotations

import math

import pytest
import torch

from moeserve.kernels.activation import SWIGLU_ACT, act_mul, act_of
from moeserve.ops.rules import SWIGLU, Activation
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import act_mul_reference

GPT_OSS = Activation(alpha=1.702, limit=7.0, up_shift=1.0)
STEP = Activation(limit=2.0, limit_after=True)
ACTIVATIONS = [SWIGLU, Activation(kind="gelu_tanh"), GPT_OSS, STEP]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # NumPy, which interprets


def test_act_mul_example() -> None:
    found = act_mul(torch.tensor([[1.0, 2.0]], device=DEVICE), SWIGLU).cpu()
    torch.testing.assert_close(found, torch.tensor([[1.4621]]), atol=1e-4, rtol=0)
    assert act_of(Activation()) == SWIGLU_ACT


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 5), (2, 1025), (5, 2500)])
def test_act_mul(rows: int, width: int, dtype: torch.dtype, activation: Activation) -> None:
    wide = (
        torch.randn(rows, 2 * width + 3, generator=torch.Generator().manual_seed(width)).to(
            DEVICE, dtype
        )
        * 8
    )
    x = wide[:, : 2 * width]  # strided rows
    exact = {"rtol": 1e-2 if dtype != torch.float32 else 4e-6, "atol": 1e-5}
    torch.testing.assert_close(act_mul(x, activation), act_mul_reference(x, activation), **exact)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_no_number_stays_none(activation: Activation) -> None:
    values = torch.tensor(
        [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, -1e30, 3.0], device=DEVICE
    )
    pairs = torch.cartesian_prod(values, values)
    x = torch.cat((pairs[:, 0], pairs[:, 1]))[None]
    torch.testing.assert_close(
        act_mul(x, activation), act_mul_reference(x, activation), equal_nan=True
    )


@pytest.mark.full("aot")
def test_act_mul_compiles_for_hopper() -> None:
    signature = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "row_stride": "i32", "width": "i32"}
    even = ("row_stride", "width")
    cases = [
        Case(
            "activation:act_mul_kernel", signature, {"ACT": act_of(activation), "BLOCK": 1024}, even
        )
        for activation in ACTIVATIONS
    ]
    for report in compile_all(cases):
        assert report.stack_bytes == 0
        assert report.registers <= 64
