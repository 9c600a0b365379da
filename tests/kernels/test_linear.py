"""The dense product's kernel: interpreted against torch, and compiled for sm_90."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moeserve.kernels import linear as module
from moeserve.kernels.linear import heads_linear, launch_of, linear
from moeserve.kernels.tiles import block_k
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import linear_reference

# The interpreter computes products of bfloat16 wrongly.
DTYPES = (
    [torch.float32, torch.float16]
    if DEVICE.type == "cpu"
    else [torch.float32, torch.float16, torch.bfloat16]
)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def test_linear_example() -> None:
    x = torch.tensor([[1.0, 2.0]], device=DEVICE)
    w = torch.tensor([[3.0, 4.0], [5.0, 6.0]], device=DEVICE)
    assert linear(x, w, torch.tensor([0.0, 1.0], device=DEVICE)).tolist() == [[11, 18]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "inner"),
    [(0, 8, 8), (1, 1, 1), (1, 200, 130), (5, 64, 128), (17, 70, 40), (40, 3, 33)],
)
@pytest.mark.parametrize("tma", [0, 1])
def test_linear(rows: int, width: int, inner: int, dtype: torch.dtype, tma: int) -> None:
    wide = torch.full((rows, inner + 8), math.nan, dtype=dtype, device=DEVICE)
    wide[:, :inner] = normal(rows, inner, dtype=dtype)
    room = torch.full(
        (width * inner + 64,), math.nan, dtype=dtype, device=DEVICE
    )  # what follows weights is not read
    w = room[: width * inner].view(width, inner)
    bias = normal(width, dtype=dtype, seed=2)
    w.copy_(normal(width, inner, dtype=dtype, seed=1))
    x = wide[:, :inner]
    out = torch.full((rows, width + 3), math.nan, dtype=dtype, device=DEVICE)
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    exact = {"rtol": tolerance, "atol": tolerance * math.sqrt(inner)}
    config = {
        **launch_of(rows, width, inner, dtype, "untuned"),
        "tma": tma,
        "group": 2,
        "block_n": 32,
    }
    with patch.object(module, "launch_of", lambda *_: config):
        torch.testing.assert_close(linear(x, w), linear_reference(x, w), **exact)
        linear(x, w, bias, out[:, :width])
    torch.testing.assert_close(out[:, :width], linear_reference(x, w, bias), **exact)
    assert out[:, width:].isnan().all()


def test_heads_example() -> None:
    x = torch.tensor([[[1.0, 2], [1, 2]]], device=DEVICE)
    w = torch.tensor([[[3.0, 4]], [[5, 6]]], device=DEVICE)
    assert heads_linear(x, w).tolist() == [[[11], [17]]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "inner"), [(0, 2, 8, 8), (1, 1, 64, 16), (18, 3, 40, 33)]
)
@pytest.mark.parametrize("tma", [0, 1])
def test_heads_linear(
    tokens: int, heads: int, width: int, inner: int, dtype: torch.dtype, tma: int
) -> None:
    """Each head has its own weights; it reads and writes parts of wider heads, whose rest stays."""
    wide = torch.full((heads, tokens, inner + 8), math.nan, dtype=dtype, device=DEVICE).transpose(
        0, 1
    )
    x = wide[..., 3 : inner + 3].copy_(normal(tokens, heads, inner, dtype=dtype))
    w = normal(heads, width, inner, dtype=dtype, seed=1)
    room = torch.full((tokens, heads, width + 5), math.nan, dtype=dtype, device=DEVICE)
    config = {**launch_of(tokens, width, inner, dtype, "untuned"), "tma": tma, "block_n": 32}
    assert (
        heads_linear(x, w, room[..., 1 : width + 1], config).data_ptr() == room[..., 1:].data_ptr()
    )
    for head in range(heads):
        alone = linear(x[:, head], w[head], config=config)
        assert torch.equal(room[:, head, 1 : width + 1], alone)
    assert room[..., 0].isnan().all()
    assert room[..., width + 1 :].isnan().all()


def test_rows_do_not_meet() -> None:
    x = normal(20, 48, dtype=torch.float32)
    w = normal(70, 48, dtype=torch.float32)
    x[3], x[7] = math.nan, x[7] * 1e30
    found = linear(x, w)
    assert found.isnan().any(1).nonzero().tolist() == [[3]]
    scale = x.abs().amax(1, keepdim=True)
    torch.testing.assert_close(
        found / scale, linear_reference(x, w) / scale, rtol=0, atol=1e-5, equal_nan=True
    )


@pytest.mark.skipif(
    DEVICE.type == "cpu", reason="an interpreter's sums say nothing of tensor cores'"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    x = normal(1000, 2048, dtype=dtype)
    w = normal(768, 2048, dtype=dtype)
    y = linear(x, w)
    for rows in (1, 16, 17, 33, 300):
        assert torch.equal(linear(x[:rows], w), y[:rows])


@pytest.mark.full("aot")
def test_linear_compiles_for_hopper() -> None:
    numbers = dict.fromkeys(
        ("x_stride", "out_stride", "x_head_stride", "out_head_stride", "width", "inner"), "i32"
    )
    cases = []
    for rows, width, inner in (
        (1, 2048, 4096),
        (64, 2048, 4096),
        (512, 2048, 4096),
        (8192, 2048, 4096),
        (8192, 128, 512),
    ):
        config = launch_of(rows, width, inner, torch.bfloat16, "untuned")
        depth = block_k(inner, torch.bfloat16)
        for tma in (0, 1):
            tile = {"BLOCK_M": config["block_m"], "BLOCK_N": config["block_n"], "BLOCK_K": depth}
            weights = f"tensordesc<bf16[{config['block_n']}, {depth}]>" if tma else "*bf16"
            signature = {
                "x_ptr": "*bf16",
                "w": weights,
                "out_ptr": "*bf16",
                "num_rows": "i32",
                **numbers,
            }
            constants = {
                **tile,
                "bias_ptr": None,
                "EVEN": True,
                "TMA": bool(tma),
                "GROUP": config["group"],
            }
            cases.append(
                Case(
                    "linear:linear_kernel",
                    signature,
                    constants,
                    [*numbers],
                    config["warps"],
                    config["stages"],
                )
            )
    for case, report in zip(cases, compile_all(cases), strict=True):
        assert report.stack_bytes == 0, case
        assert report.wgmma, case
        assert report.tma == case.constants["TMA"], case
        assert report.registers * case.num_warps * 32 <= 65536, case
        assert report.shared_bytes <= 227 * 1024, case
