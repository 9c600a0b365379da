"""The SwiGLU kernel, interpreted, beside its definition; and compiled for sm_90."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels.activation import silu_mul
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import silu_mul_reference


def test_silu_mul_example() -> None:
    torch.testing.assert_close(
        silu_mul(torch.tensor([[1.0, 2.0]], device=DEVICE)).cpu(), torch.tensor([[1.4621]]), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 5), (2, 1024), (2, 1025), (5, 2500)])
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    wide = torch.randn(rows, 2 * width + 3, generator=torch.Generator().manual_seed(width)).to(DEVICE, dtype) * 8
    x = wide[:, : 2 * width]  # strided rows
    torch.testing.assert_close(
        silu_mul(x), silu_mul_reference(x), rtol=1e-2 if dtype != torch.float32 else 2e-6, atol=1e-5
    )


@pytest.mark.full("aot")
def test_silu_mul_compiles_for_hopper() -> None:
    signature = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "row_stride": "i32", "width": "i32"}
    (report,) = compile_all([Case("activation:silu_mul_kernel", signature, {"BLOCK": 1024}, ("row_stride", "width"))])
    assert report.stack_bytes == 0
    assert report.registers <= 64
