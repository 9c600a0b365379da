"""WireFormat formats against their definition, element by element, on hostile rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moeserve.errors import ConfigError
from moeserve.moe.all2all.wire_format import ALIGNMENT, BLOCK, Fp8Wire, RawWire, WireFormat, wire_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E4M3 = E4M3[E4M3.isfinite()].unique()  # every value the format has


def hostile(width: int, dtype: torch.dtype) -> Tensor:
    """One kind of trouble per row."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(9, width, generator=generator)
    x[0] = 0
    x[1] = -0.0
    x[2, ::3] = math.inf
    x[3, 1::5] = -math.inf
    x[4, ::2] = math.nan
    x[5] = math.nan
    x[6] = torch.finfo(dtype).max
    x[7] *= torch.finfo(dtype).tiny
    x[8, 0] = torch.finfo(dtype).max
    return x.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def slow_fp8(x_D: Tensor) -> list[float]:
    """The definition, one element at a time: the nearest e4m3 value, ties to the even one (of which
    0 is the first).
    """
    found: list[float] = []
    for start in range(0, len(x_D), BLOCK):
        block = x_D[start : start + BLOCK].float()
        finite = [abs(v) for v in block.tolist() if math.isfinite(v)]
        amax = torch.tensor(max([*finite, 1e-4]), dtype=torch.float32)
        scale = amax.clamp(min=1e-4) / 448
        for value in block:
            if not math.isfinite(value):
                found.append(math.nan)
                continue
            distance = (E4M3.double() - (value / scale).double()).abs()
            near = (distance == distance.min()).nonzero()[:, 0].tolist()
            positive = (
                len(E4M3) // 2
            )  # index of zero: values count up from it, and so do their last bits
            best = min(near, key=lambda i: (i - positive) % 2)
            found.append(float(E4M3[best] * scale))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 24, 127, 128, 129, 300])
def test_fp8_is_its_definition(width: int, dtype: torch.dtype) -> None:
    wire = Fp8Wire()
    x = hostile(width, dtype)
    rows = wire.encode(x)
    assert rows.dtype == torch.uint8
    assert rows.shape == (9, wire.row_bytes(width))
    assert same(
        wire.decode(rows, dtype, width), torch.tensor([slow_fp8(row) for row in x]).to(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 24, 129])
def test_raw_keeps_every_bit(width: int, dtype: torch.dtype) -> None:
    wire = RawWire(dtype)
    x = hostile(width, dtype)
    back = wire.decode(wire.encode(x), dtype, width)
    assert back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("wire", [Fp8Wire(), RawWire(torch.bfloat16)], ids=lambda wire: wire.name)
def test_bytes_of_a_row_depend_on_it_alone(wire: WireFormat) -> None:
    x = hostile(300, torch.bfloat16)
    together = wire.encode(x)
    for i in range(len(x)):
        assert torch.equal(wire.encode(x[i : i + 1]), together[i : i + 1])
        assert same(
            wire.decode(together[i : i + 1], x.dtype, 300),
            wire.decode(together, x.dtype, 300)[i : i + 1],
        )
    assert wire.row_bytes(300) % ALIGNMENT == 0
    assert wire.encode(x[:0]).shape == (0, wire.row_bytes(300))
    assert wire.decode(together[:0], x.dtype, 300).shape == (0, 300)


def test_fp8_is_close_and_a_second_trip_changes_nothing() -> None:
    wire = Fp8Wire()
    x = torch.randn(50, 384)
    once = wire.decode(wire.encode(x), torch.float32, 384)
    assert ((once - x).norm() / x.norm()) < 0.03
    assert torch.allclose(wire.decode(wire.encode(once), torch.float32, 384), once, rtol=1e-6)


def test_names() -> None:
    assert wire_of("auto", torch.float16).name == "float16"
    assert wire_of("bfloat16", torch.bfloat16).lossy is False
    assert wire_of("fp8_b128", torch.bfloat16).lossy is True
    with pytest.raises(
        ConfigError, match=r"no wire format 'fp4' for rows of bfloat16; known: auto, fp8_b128"
    ):
        wire_of("fp4", torch.bfloat16)
