"""Products of quantized weights with rows rounded to int8: the bits of the scalar reference on
every instruction set, alone and in company, for every packed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.loader.stored_format import IQ1_CODES, IQ3_XXS_CODES, IQ4_CODES
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear
from moeserve.ops.quantized import E2M1_INTEGERS, Quantized, dequantized

_native: Any = native()
pytestmark = pytest.mark.skipif(_native is None, reason="no native kernels")
FP16 = torch.float16
BF16 = torch.bfloat16
FP32 = torch.float32

# kind, group, bits, with zeros, mins, supers, dtype of scales, smallest and largest value.
CODES = {  # the numbers of codes, and the factor of super-scales
    "iq4_nl": (IQ4_CODES, 1.0),
    "iq4_xs": (IQ4_CODES, 1.0),
    "iq3_xxs": (IQ3_XXS_CODES, 0.25),
    "iq1_s": (IQ1_CODES, 0.125),
    "iq1_m": (IQ1_CODES, 0.125),
}
FORMS: dict[str, tuple[Any, ...]] = {
    "int8": ("int8", 0, 0, False, False, False, FP32, -128, 127),
    "int8 of 64": ("int8", 64, 0, False, False, False, FP32, -128, 127),
    "int4 of 128": ("int4", 128, 0, False, False, False, FP32, 0, 15),
    "int4 of 32 with zeros": ("int4", 32, 0, True, False, False, FP32, 0, 15),
    "int4 of 96 with zeros": ("int4", 96, 0, True, False, False, FP32, 0, 15),
    "int4 of 16": ("int4", 16, 0, False, False, False, FP32, 0, 15),
    "mxfp4": ("fp4", 32, 0, False, False, False, BF16, 0, 15),
    "nvfp4": ("fp4", 16, 0, False, False, False, BF16, 0, 15),
    "iq4_nl": ("codes", 32, 4, False, False, False, FP16, 0, 15),
    "iq4_xs": ("codes", 32, 4, False, False, True, FP32, 0, 15),
    "iq3_xxs": ("codes", 32, 4, False, False, True, FP32, 0, 15),
    "iq1_s": ("codes", 32, 3, False, False, True, FP32, 0, 7),
    "iq1_m": ("codes", 16, 3, False, False, True, FP32, 0, 7),
    "tq1_0": ("int8", 256, 2, False, False, False, FP16, -2, 1),
    "q4_0": ("int4", 32, 0, False, False, False, FP16, 0, 15),
    "q4_1": ("int4", 32, 0, False, True, False, FP16, 0, 15),
    "q5_0": ("int8", 32, 5, False, False, False, FP16, -16, 15),
    "q5_1": ("int8", 32, 5, False, True, False, FP16, 0, 31),
    "q8_0": ("int8", 32, 0, False, False, False, FP16, -128, 127),
    "q2_k": ("int8", 16, 2, False, True, True, FP32, 0, 3),
    "q3_k": ("int8", 16, 3, False, False, True, FP32, -4, 3),
    "q4_k": ("int4", 32, 0, False, True, True, FP32, 0, 15),
    "q5_k": ("int8", 32, 5, False, True, True, FP32, 0, 31),
    "q6_k": ("int8", 16, 6, False, False, True, FP32, -32, 31),
}


@pytest.fixture
def isas() -> Iterator[list[str]]:
    before = _native.serving_isa()
    yield _native.supported_isas()
    _native.use_isa(before)


def weight_of(form: str, columns: int, depth: int, dtype: torch.dtype) -> Quantized:
    """A random weight with extremes among its values, and a row of zeros."""
    kind, group, bits, with_zeros, with_mins, with_supers, scale_dtype, low, high = FORMS[form]
    values = torch.randint(low, high + 1, (columns, depth))
    values[0] = low
    values[-1, ::2] = high
    groups = -(-depth // group) if group else 1
    codes, factor = CODES.get(form, ((), 1.0))
    scales = torch.randn(columns, groups).to(scale_dtype).float()
    mins = None
    supers = None
    if scale_dtype is BF16:
        scales = torch.randint(-127, 10, scales.shape).float().exp2()
    if with_mins:
        mins = torch.randn(columns, groups).to(scale_dtype).float()
    if with_supers:
        d, dmin = (torch.randn(columns, depth // 256).half().float() for _ in range(2))
        d[0] = 0
        least, most = (0, 64) if with_mins else (-128, 128)
        sc, m = (torch.randint(least, most, (columns, groups)) for _ in range(2))
        d *= factor
        scales, mins = ((u.repeat_interleave(256 // group, 1) * n) for u, n in ((d, sc), (dmin, m)))
        supers = (d, dmin if with_mins else None)
        mins = mins if with_mins else None
    zeros = torch.randint(0, 16, scales.shape).float() if with_zeros else None
    values = values.to(torch.int8 if kind == "int8" else torch.uint8)
    return Quantized(
        kind=kind,
        group=group,
        dtype=dtype,
        values=values,
        scales=scales,
        zeros=zeros,
        mins=mins,
        activations="int8",
        supers=supers,
        scale_dtype=scale_dtype,
        bits=bits,
        codes=codes,
        super_factor=factor,
    )


def reference(weight: Quantized, x_MK: Tensor) -> Tensor:
    """The scalar product, with whole numbers for the values."""
    w, (columns, depth) = weight, weight.shape
    numbers = w.values.float()
    if w.kind in ("fp4", "codes"):
        numbers = torch.tensor(E2M1_INTEGERS if w.kind == "fp4" else w.codes)[w.values.int()]
    elif w.kind == "int4" and w.mins is None:
        numbers -= 8 if w.zeros is None else w.zeros.repeat_interleave(w.group, 1)[:, :depth]
    whole = numbers.to(torch.int8)
    scales = w.scales / 2 if w.kind == "fp4" else w.scales
    assert (whole == numbers).all()
    x = x_MK.float().contiguous()
    y = torch.empty(len(x_MK), columns)
    mins = 0 if w.mins is None else w.mins.data_ptr()
    _native.int_product_reference(
        x.data_ptr(),
        len(x),
        depth,
        whole.data_ptr(),
        columns,
        w.group,
        scales.data_ptr(),
        mins,
        y.data_ptr(),
    )
    return y.to(x_MK.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_bits_are_those_of_the_reference_in_any_company(
    form: str, dtype: torch.dtype, isas: list[str]
) -> None:
    torch.manual_seed(7)
    for columns, depth in (100, 512), (17, 256), (40, 304):
        if depth % 256 and (FORMS[form][5] or depth % 16):
            continue
        weight = weight_of(form, columns, depth, dtype)
        x_MK = torch.randn(30, depth) * torch.randn(30, 1).exp()
        x_MK[1], x_MK[2, :40], x_MK[3] = 0, 1e-38, x_MK[3] * 1e-4
        x_MK[4, 5] = 300 * x_MK[4].abs().max()  # an outlier leaves little of its block
        x_MK = x_MK.to(dtype)
        expected = reference(weight, x_MK)
        for isa in isas:
            _native.use_isa(isa)
            linear = NativeLinear(weight)
            for rows in 1, 2, 5, 9, 30:
                torch.testing.assert_close(
                    linear(x_MK[:rows]), expected[:rows], rtol=0, atol=0, msg=f"{isa}, {rows} rows"
                )


@pytest.mark.parametrize("form", FORMS)
def test_products_are_near_those_of_floats(form: str) -> None:
    """Rounding a row leaves an error below half a step per input, and no other."""
    torch.manual_seed(3)
    weight = weight_of(form, 64, 512, FP32)
    x_MK = torch.randn(5, 512)
    w_NK = dequantized(weight).double()
    steps_MK = x_MK.view(5, -1, 32).abs().amax(-1).repeat_interleave(32, 1).double() / 127
    bound = 0.5001 * steps_MK @ w_NK.abs().T + 1e-3
    assert ((NativeLinear(weight)(x_MK).double() - x_MK.double() @ w_NK.T).abs() <= bound).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible_in_its_row(value: float, isas: list[str]) -> None:
    weight = weight_of("q4_k", 20, 512, FP32)
    x_MK = torch.randn(3, 512)
    x_MK[1, 77] = value
    for isa in isas:
        _native.use_isa(isa)
        y = NativeLinear(weight)(x_MK)
        assert y[1].isnan().all()
        assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("q4_0", {"group": 24}, "groups are of 16 or 32 n"),
        ("q4_k", {"activations": "float"}, "minima need"),
        ("iq4_nl", {"activations": "float"}, "codes need"),
        ("q6_k", {"group": 32}, "no kernel has values of so many bits"),
        (
            "q8_0",
            {"supers": (torch.ones(16, 1), None)},
            "no kernel has values of so many bits",
        ),
    ],
)
def test_what_integers_cannot_do_is_refused(
    form: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        NativeLinear(replace(weight_of(form, 16, 256, BF16), **change))
