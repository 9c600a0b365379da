"""Rounding on load: how near, to what, and that a row's bits depend on nothing but the row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.ops.quantized import Quantized, quantization_of
from tests.quantized_checkpoints import dequantized


def quantized(weight: Tensor, kind: Any) -> Quantized:
    into, jobs = quantization_of(weight, kind, "w")
    for part in into.parts:
        part.fill_(77)
    for job in reversed(jobs):
        job()
    return into


def test_example() -> None:
    got = quantized(torch.tensor([[127.0, -1.4, 0.0], [0.0, 0.0, 0.0]]), "int8")
    assert got.values.tolist() == [[127, -1, 0], [0, 0, 0]]
    assert got.scales.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize(
    ("inputs", "group"), [(32, 32), (96, 32), (64, 64), (192, 64), (128, 128), (640, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int4_is_within_half_a_step_except_opposite_the_peak(
    inputs: int, group: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(50, inputs, generator=torch.Generator().manual_seed(inputs)).to(dtype)
    got = quantized(weight, "int4")
    assert (got.group, got.scales.shape, got.zeros) == (group, (50, inputs // group), None)
    assert 0 <= got.values.min() <= got.values.max() <= 15
    error = (dequantized(got) - weight.float()).unflatten(-1, (-1, group)).abs()
    peaks = weight.float().unflatten(-1, (-1, group)).abs()
    steps = peaks.amax(-1, keepdim=True) / 8
    assert (error <= steps * 1.0001).all()
    assert (
        error[peaks < 7.4 * steps] <= 0.5001 * steps.expand_as(error)[peaks < 7.4 * steps]
    ).all()
    at_peak = error.where(peaks == 8 * steps, torch.inf).amin(-1, keepdim=True)
    assert (at_peak <= 1e-6 * steps).all()  # what matters most is exact


@pytest.mark.parametrize("inputs", [1, 37, 1000])
def test_int8_is_within_half_a_step(inputs: int) -> None:
    weight = torch.randn(20, inputs, generator=torch.Generator().manual_seed(inputs)).bfloat16()
    got = quantized(weight, "int8")
    error = (dequantized(got) - weight.float()).abs()
    assert (error <= 0.5001 / 127 * weight.float().abs().amax(-1, keepdim=True)).all()
    assert got.values.min() >= -127


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_keep_their_bits_in_any_company(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(0))
    # a tie of signs
    weight[0, :, 3] = 5.0
    weight[0, :, 9] = -5.0
    whole = quantized(weight, kind)
    monkeypatch.setattr("moeserve.ops.quantized.CPU_JOB_ELEMENTS", 100)
    for got in (
        quantized(weight, kind)[1],
        quantized(weight[1], kind),
        quantized(weight[1:], kind)[0],
    ):
        assert all(torch.equal(a, b) for a, b in zip(got.parts, whole[1].parts, strict=True))
    one = quantized(weight[0, 7:8], kind)
    assert all(torch.equal(a, b) for a, b in zip(one.parts, whole[0, 7:8].parts, strict=True))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused_by_name(kind: str, bad: float) -> None:
    weight = torch.zeros(40, 64)
    weight[31, 5] = bad
    with pytest.raises(CheckpointError, match="w has NaN or infinite weights"):
        quantized(weight, kind)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_smallest_and_largest_numbers(kind: str) -> None:
    weight = torch.full((2, 32), 1e-45)
    weight[1] = 3e38
    got = dequantized(quantized(weight, kind))
    assert got.isfinite().all()
    assert (got[0].abs() <= 2e-44).all()
    assert ((got[1] / 3e38 - 1).abs() < 1e-6).all()
