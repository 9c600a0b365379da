"""Native products: the bits of one chain of fused multiply-adds per output, whatever surrounds a
row or a column.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear
from moeserve.ops.native_rows import TYPES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUANTIZED = [  # kind, inputs of a group, whether there are zero points
    ("int8", 0, False),
    ("int4", 32, False),
    ("int4", 64, True),
    ("int4", 128, True),
    ("fp8", 0, False),
    ("fp8", 128, False),
    ("int8", 64, False),
    ("fp4", 16, False),
    ("fp4", 32, False),
]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
module: Any = native()
pytestmark = pytest.mark.skipif(
    module is None or not module.serving_isa(), reason="needs the native kernels"
)


@pytest.fixture(params=module.supported_isas() if module else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = module.serving_isa()
    module.use_isa(request.param)
    yield request.param
    module.use_isa(before)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    module.set_threads([-1] * request.param)
    yield request.param
    module.set_threads([-1])


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chains(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """x W^T by a scalar loop of std::fma, fp32."""
    x = x_MK.float().contiguous()
    w = w_NK.float().contiguous()
    y = torch.full((x.shape[0], w.shape[0]), torch.nan)
    module.product_reference(x.data_ptr(), *x.shape, w.data_ptr(), w.shape[0], y.data_ptr())
    return y


def test_example() -> None:
    linear = NativeLinear(torch.tensor([[3.0, 4.0]]), torch.tensor([5.0]))
    assert linear(torch.tensor([[1.0, 2.0]])).tolist() == [[16.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (2, 15), (7, 17), (33, 40), (257, 100), (1001, 70)])
def test_has_the_bits_of_the_reference(
    k: int, n: int, dtype: torch.dtype, threads: int, isa: str
) -> None:
    weight = values(n, k, seed=k, dtype=dtype)
    bias = values(n, seed=n, dtype=dtype)
    linear = NativeLinear(weight)
    biased = NativeLinear(weight, bias)
    x = values(65, k, seed=1, dtype=dtype)
    expected = chains(x, weight)
    for rows in (*range(21), 64, 65):
        assert torch.equal(linear(x[:rows]), expected[:rows].to(dtype)), rows
        assert torch.equal(biased(x[:rows]), (expected[:rows] + bias.float()).to(dtype)), rows
    if dtype == torch.float32:
        assert (expected - x.double() @ weight.double().T).abs().max() < 1e-4 * k**0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_torch(dtype: torch.dtype, isa: str) -> None:
    weight = values(96, 512, seed=0, dtype=dtype)
    bias = values(96, seed=1, dtype=dtype)
    x = values(30, 512, seed=2, dtype=dtype)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    eps = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert (
        NativeLinear(weight, bias)(x).double() - expected
    ).abs().max() <= eps * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_keep_their_bits_in_any_company(dtype: torch.dtype, threads: int, isa: str) -> None:
    """Up to a thousand rows, several parts of them; other rows may be NaN."""
    for k, n in ((1024, 72), (9000, 24)):
        linear = NativeLinear(values(n, k, seed=k, dtype=dtype))
        x = values(1000 if k < 2000 else 60, k, seed=n, dtype=dtype)
        whole = linear(x)
        for rows, first in itertools.product((1, 2, 3, 5, 7, 13, 48, 49), (0, 11)):
            assert torch.equal(linear(x[first : first + rows]), whole[first : first + rows])
        dirty = x.clone()
        dirty[1::2] = torch.nan
        assert torch.equal(linear(dirty)[::2], whole[::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_denormals_do_not_depend_on_company(dtype: torch.dtype, isa: str) -> None:
    """A few rows of bf16 may be multiplied by other instructions than many."""
    weight = values(40, 300, seed=0).float()
    x = values(20, 300, seed=1).float()
    for of_weight, of_x in ((1.0, 1e-39), (1e-39, 1.0), (2e-19, 2e-20)):
        linear = NativeLinear((weight * of_weight).to(dtype))
        rows = (x * of_x).to(dtype)
        whole = linear(rows)
        for count, first in itertools.product((1, 4, 5, 13), (0, 7)):
            assert torch.equal(linear(rows[first : first + count]), whole[first : first + count])


def test_columns_keep_their_bits() -> None:
    """Tensor-parallel ranks rely on it."""
    weight = values(301, 200, seed=0, dtype=torch.bfloat16)
    x = values(20, 200, seed=1, dtype=torch.bfloat16)
    whole = NativeLinear(weight)(x)
    for first, end in ((0, 1), (3, 20), (100, 301), (300, 301)):
        assert torch.equal(NativeLinear(weight[first:end])(x), whole[:, first:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_odd_addresses(dtype: torch.dtype, isa: str) -> None:
    weight = values(21, 37, seed=0, dtype=dtype)
    x = values(9, 37, seed=1, dtype=dtype)
    expected = NativeLinear(weight)(x)
    wide = torch.full((9, 80), torch.nan, dtype=dtype)
    wide[:, 41:78] = x
    assert torch.equal(NativeLinear(weight)(wide[:, 41:78]), expected)
    assert torch.equal(NativeLinear(weight)(x.t().contiguous().t()), expected)
    assert torch.equal(NativeLinear(weight.t().contiguous().t())(x), expected)
    tall = torch.full((21, 50), torch.nan, dtype=dtype)
    tall[:, 5:42] = weight
    assert torch.equal(NativeLinear(tall[:, 5:42])(x), expected)


def test_special_values_pass_through(isa: str) -> None:
    """Infinities, denormals and signed zeros, in an odd last input too, which has no partner in its
    pair.
    """
    for dtype in DTYPES:
        tiny = torch.finfo(dtype).tiny
        weight = torch.tensor(
            [[1.0, -tiny, tiny], [torch.inf, 1.0, 0.0], [-0.0, -0.0, -0.0]], dtype=dtype
        )
        x = torch.tensor([[tiny, tiny, -tiny], [1.0, 2.0, 3.0], [0.0, torch.nan, 1.0]], dtype=dtype)
        got = NativeLinear(weight)(x)
        expected = chains(x, weight).to(dtype)
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        assert torch.equal(got[~got.isnan()].signbit(), expected[~got.isnan()].signbit())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(KeyError):
        NativeLinear(torch.ones(16, 16).to(dtype))


def quantized(
    kind: str, n: int, k: int, group: int, zeros: bool
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """(packing, packed bytes, the weights [n, k] as the chains see them, scales [n, groups])."""
    generator = torch.Generator().manual_seed(k)
    low, high = (0, 16) if kind in ("int4", "fp4") else (-128, 128)
    q = torch.randint(low, high, (n, k), generator=generator).to(torch.int8)
    groups = -(-k // group) if group else 1
    scales = torch.rand(n, groups, generator=generator)
    zero = torch.randint(0, 16, (n, groups), generator=generator).float()
    weights = q.float()
    if kind == "fp8":
        q[(q & 0x7F) == 0x7F] = 1  # not NaN
        weights = q.view(torch.float8_e4m3fn).float()
    elif kind == "fp4":
        weights = torch.tensor(E2M1)[q.long()]
    elif kind == "int4":
        weights = weights - (zero.repeat_interleave(group, 1)[:, :k] if zeros else 8)
    packing = module.Packing(getattr(module.Type, kind), k, n, group, zeros)
    packed = torch.full((packing.bytes,), 255, dtype=torch.uint8)
    module.pack(
        packing,
        q.data_ptr(),
        k,
        scales.data_ptr(),
        zero.data_ptr() if zeros else 0,
        0,
        0,
        0,
        packed.data_ptr(),
        packing.block_bytes,
        True,
    )
    return packing, packed, weights, scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "group", "zeros"), QUANTIZED)
def test_quantized_weights(
    kind: str, group: int, zeros: bool, dtype: torch.dtype, threads: int, isa: str
) -> None:
    """The chain times the column's scale, or a chain per group, scaled sums added in order."""
    for k, n in ((200, 40), (321, 17)):
        packing, packed, weights, scales = quantized(kind, n, k, group, zeros)
        x = values(50, k, seed=k, dtype=dtype)
        expected = torch.zeros(50, n, dtype=torch.float64)
        for g in range(scales.shape[1]):
            part = slice(g * (group or k), (g + 1) * (group or k))
            # one fused multiply-add in fp32: exact in fp64 but for rare double rounding
            chain = chains(x[:, part], weights[:, part]).double()
            expected = (chain * scales[:, g].double() + expected).float().double()
        for rows in (1, 2, 3, 6, 7, 13, 50):
            y = torch.full((rows, n), torch.nan, dtype=dtype)
            module.linear(
                TYPES[dtype], packing, packed.data_ptr(), 0, x.data_ptr(), k, rows, y.data_ptr()
            )
            error = (y.double() - expected[:rows].to(dtype).double()).abs()
            assert (
                error.max()
                <= {torch.float32: 1e-6, torch.float16: 1e-3}.get(dtype, 8e-3)
                * expected.abs().max()
            )
            assert (error == 0).float().mean() > 0.999
            if rows > 1:
                alone = torch.empty(1, n, dtype=dtype)
                last = x[rows - 1 :]
                module.linear(
                    TYPES[dtype],
                    packing,
                    packed.data_ptr(),
                    0,
                    last.data_ptr(),
                    k,
                    1,
                    alone.data_ptr(),
                )
                assert torch.equal(alone[0], y[-1])
