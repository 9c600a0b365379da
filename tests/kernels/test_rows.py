"""RMS norm, SwiGLU and embedding kernels: interpreted against torch, and compiled for sm_90."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeserve.kernels.rows import add_rms_norm, embedding, rms_norm
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import embedding_reference, rms_norm_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(0, 8), (1, 1), (3, 5), (17, 128), (2, 2048), (5, 2500), (1, 16384)]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of magnitudes from 0.001 to 1000, in a wider tensor whose other columns are NaN."""
    generator = torch.Generator().manual_seed(shape[-1])
    wide = torch.full((*shape[:-1], shape[-1] + 3), torch.nan, dtype=dtype, device=DEVICE)
    x = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        x *= 10.0 ** (torch.arange(shape[0]) % 7 - 3).unsqueeze(1)
    wide[..., : shape[-1]] = x
    return wide[..., : shape[-1]]


def close(actual: Tensor, expected: Tensor) -> None:
    rtol = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6)


def test_examples() -> None:
    one = torch.ones(2, device=DEVICE)
    x = torch.tensor([[2.0, 4.0]], device=DEVICE)
    residual = torch.tensor([[1.0, 0.0]], device=DEVICE)
    normed = torch.tensor([[0.8485, 1.1314]], device=DEVICE)
    torch.testing.assert_close(rms_norm(x + residual, one, 1e-12), normed, atol=1e-4, rtol=0)
    add_rms_norm(x, residual, one, 1e-12)
    torch.testing.assert_close(x, normed, atol=1e-4, rtol=0)
    assert residual.tolist() == [[3.0, 4.0]]
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE)
    assert embedding(torch.tensor([1, 0], device=DEVICE), table, 2.0).tolist() == [
        [6.0, 8.0],
        [2.0, 4.0],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x = random(rows, width, dtype=dtype)
    weight = random(width)
    close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x = random(rows, width, dtype=dtype)
    residual = random(rows, width, dtype=dtype).flip(0)
    weight = random(width)
    total = x + residual
    rounds_right = (
        dtype is not torch.bfloat16 or DEVICE.type == "cuda"
    )  # the interpreter cuts instead
    expected = rms_norm_reference(total, weight, 1e-6)
    wide = torch.full((rows, width + 5), torch.nan, dtype=dtype, device=DEVICE)
    normed, summed = add_rms_norm(x, wide[:, :width].copy_(residual), weight, 1e-6)
    assert normed is x
    assert torch.equal(summed, total) or not rounds_right
    close(summed, total)
    assert wide[:, width:].isnan().all()
    close(normed, expected)
    # Of the rounded sum; a GPU may add it up in another order, since the rows lie otherwise.
    assert torch.equal(normed, rms_norm(summed, weight, 1e-6)) or DEVICE.type == "cuda"


@pytest.mark.parametrize("width", [128, 1024, 2048])
def test_a_row_has_the_same_bits_in_any_batch(width: int) -> None:
    x = random(37, width, dtype=torch.float16).contiguous()
    weight = random(width)
    alone = torch.cat([rms_norm(x[i : i + 1], weight, 1e-6) for i in range(len(x))])
    assert torch.equal(rms_norm(x, weight, 1e-6), alone)


@pytest.mark.parametrize("ids_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: torch.dtype, ids_type: torch.dtype) -> None:
    table = random(9, 2500, dtype=dtype)
    ids = torch.tensor([8, 0, 3, 3, 1], dtype=ids_type, device=DEVICE)
    assert torch.equal(embedding(ids, table), table[ids.long()])
    close(embedding(ids, table, 0.1), embedding_reference(ids, table, 0.1))
    assert embedding(ids[:0], table).shape == (0, 2500)


@pytest.mark.full("aot")
def test_compiles_for_hopper() -> None:
    strides = {"x_stride": "i32", "width": "i32"}
    norm = {"x_ptr": "*bf16", "weight_ptr": "*fp32", "rows": "i32", "eps": "fp32"} | strides
    cases = [
        Case(
            "rows:rms_norm_kernel",
            norm | {"out_ptr": "*bf16"},
            {"ROWS": 16, "BLOCK": 128},
            tuple(strides),
        ),
        *(
            Case(
                "rows:add_rms_norm_kernel",
                norm | {"residual_ptr": "*bf16", "residual_stride": "i32"},
                {"ROWS": 1, "BLOCK": block},
                (*strides, "residual_stride"),
                num_warps=min(16, block // 512),
            )
            for block in (2048, 16384)
        ),
        Case(
            "rows:embedding_kernel",
            {
                "ids_ptr": "*i64",
                "table_ptr": "*bf16",
                "out_ptr": "*bf16",
                "table_stride": "i32",
                "width": "i32",
            }
            | {"scale": "fp32"},
            {"BLOCK": 2048},
            ("table_stride", "width"),
        ),
    ]
    reports = compile_all(cases)
    assert [report.stack_bytes for report in reports] == [0] * len(cases)
    assert max(report.registers for report in reports) <= 128
