"""Native experts: the bits of the native products and SwiGLU written out, for any division of rows
over experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.native import NativeExperts, PackedNative
from moeserve.moe.experts.reference import ReferenceExperts
from moeserve.ops import native_rows
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear
from moeserve.ops.pick import pick_ops
from moeserve.ops.rules import RELU2, SWIGLU, Activation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
E = 5
module: Any = native()
pytestmark = pytest.mark.skipif(
    module is None or not module.serving_isa(), reason="needs the native kernels"
)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    module.set_threads([-1] * request.param)
    yield request.param
    module.set_threads([-1])


def make(
    dtype: torch.dtype,
    width: int = 64,
    hidden: int = 48,
    num_experts: int = E,
    seed: int = 0,
    biased: bool = False,
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    products = (
        (torch.randn(num_experts, 2 * hidden, width, generator=generator) * width**-0.5).to(dtype),
        (torch.randn(num_experts, width, hidden, generator=generator) * hidden**-0.5).to(dtype),
    )
    biases = [torch.randn(num_experts, size, generator=generator) for size in (2 * hidden, width)]
    return ExpertWeights(*products, *(biases if biased else ()))


def rows(count: int, width: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(
    packed: PackedNative, x_PD: Tensor, counts: list[int], activation: Activation = SWIGLU
) -> Tensor:
    counts_e = np.array(counts, np.int64)
    out = torch.full_like(x_PD, torch.nan)
    NativeExperts(activation=activation).run(
        Inbound(Layout.GROUPED, x_PD, counts_e, counts_e.cumsum()), packed, out
    )
    return out


def written_out(x_PD: Tensor, weights: ExpertWeights, counts: list[int]) -> Tensor:
    """Two native products and the kernels' own exp, one expert after another."""
    parts = []
    for expert, x in enumerate(torch.split(x_PD[: sum(counts)], counts)):
        gate, up = (
            NativeLinear(half.float())(x.float()) for half in weights.w13_eFD[expert].chunk(2)
        )
        power = torch.empty_like(gate)
        minus = -gate
        module.exp(minus.data_ptr(), power.data_ptr(), gate.numel())
        hidden = (gate / (1 + power) * up).to(x.dtype)
        parts.append(NativeLinear(weights.w2_eDI[expert])(hidden))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "hidden"), [(64, 48), (37, 21), (256, 80)])
@pytest.mark.parametrize(
    "counts",
    [[3, 0, 1, 17, 2], [0, 0, 140, 0, 0], [0, 0, 0, 0, 1], [1] * 5, [8, 50, 7, 0, 49], [0] * 5],
)
def test_has_the_bits_of_products_written_out(
    counts: list[int], width: int, hidden: int, dtype: torch.dtype, threads: int
) -> None:
    weights = make(dtype, width, hidden)
    x = rows(sum(counts) + 3, width, dtype)
    out = run(NativeExperts().pack(weights), x, counts)
    assert torch.equal(out[: sum(counts)], written_out(x, weights, counts))
    assert out[sum(counts) :].isnan().all()


@pytest.mark.parametrize("biased", [False, True])
def test_copies_of_an_expert_are_packed_once(biased: bool, threads: int) -> None:
    """Dummy weights (loader/dummy.py) come as such copies."""
    one = make(torch.bfloat16, num_experts=1, biased=biased)
    parts = [
        part.expand(E, *part.shape[1:])
        for part in (one.w13_eFD, one.w2_eDI, one.b13_eF, one.b2_eD)
        if part is not None
    ]
    with torch.inference_mode():
        copies = NativeExperts().pack(ExpertWeights(*parts))
    apart = NativeExperts().pack(ExpertWeights(*(part.contiguous() for part in parts)))
    assert torch.equal(copies.bytes_eB, apart.bytes_eB)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "hidden"), [(64, 48), (37, 21)])
@pytest.mark.parametrize(
    "activation",
    [
        SWIGLU,
        Activation(alpha=1.702, limit=1.0, up_shift=1.0),
        Activation(kind="gelu_tanh"),
        Activation(limit=0.5),
    ],
    ids=repr,
)
def test_biases_and_activations(
    activation: Activation, width: int, hidden: int, dtype: torch.dtype
) -> None:
    """The bits of products with biases and of the activation's own kernel, in fp32 between them."""
    weights = make(dtype, width, hidden, biased=True)
    counts = [3, 0, 140, 1, 2]
    assert weights.b13_eF is not None
    assert weights.b2_eD is not None
    x = rows(sum(counts), width, dtype)
    parts = []
    for expert, part in enumerate(torch.split(x, counts)):
        both = NativeLinear(weights.w13_eFD[expert].float(), weights.b13_eF[expert])(part.float())
        hidden_MI = native_rows.act_mul(both, activation).to(dtype)
        parts.append(NativeLinear(weights.w2_eDI[expert], weights.b2_eD[expert])(hidden_MI))
    assert torch.equal(run(NativeExperts().pack(weights), x, counts, activation), torch.cat(parts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "hidden"), [(64, 48), (37, 21)])
def test_without_gates(width: int, hidden: int, dtype: torch.dtype) -> None:
    """The bits of products written out, of hostile rows, too; experts that are moved stay what they
    are.
    """
    gated = make(dtype, width, hidden)
    counts = [3, 0, 40, 1, 2]
    weights = ExpertWeights(gated.w13_eFD[:, :hidden], gated.w2_eDI)
    x = rows(sum(counts) + 2, width, dtype)
    x[1, 0] = torch.nan
    x[4, 1] = torch.inf
    x[5, 2] = -torch.inf
    x[6] = -0.0
    x[7] = 0.0
    parts = []
    for expert, part in enumerate(torch.split(x[: sum(counts)], counts)):
        up = NativeLinear(weights.w13_eFD[expert].float())(part.float())
        hidden_MI = up.clamp(min=0).pow(2).to(dtype)
        parts.append(NativeLinear(weights.w2_eDI[expert])(hidden_MI))
    experts = NativeExperts(activation=RELU2)
    packed = experts.pack(weights)
    moved = experts.stack([experts.take(packed, expert) for expert in range(E)])
    experts.put(moved, 2, experts.pack_expert(weights.w13_eFD[2], weights.w2_eDI[2]))
    for each in (packed, moved):
        out = run(each, x, counts, RELU2)
        torch.testing.assert_close(
            out[: sum(counts)], torch.cat(parts), rtol=0, atol=0, equal_nan=True
        )
        assert out[sum(counts) :].isnan().all()
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_reference(dtype: torch.dtype) -> None:
    reference = ReferenceExperts(pick_ops("cpu", dtype, kernels="torch"))
    weights = make(dtype)
    counts = [3, 0, 1, 17, 2]
    x = rows(23, 64, dtype)
    expected = torch.empty_like(x)
    counts_e = np.array(counts)
    inbound = Inbound(Layout.GROUPED, x, counts_e, counts_e.cumsum())
    reference.run(inbound, reference.pack(weights), expected)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    difference = run(NativeExperts().pack(weights), x, counts).double() - expected.double()
    assert difference.norm() <= tolerance * expected.double().norm()


def test_ten_thousand_rows_for_one_expert(threads: int) -> None:
    weights = make(torch.bfloat16)
    x = rows(10_000, 64, torch.bfloat16)
    packed = NativeExperts().pack(weights)
    out = run(packed, x, [0, 0, 10_000, 0, 0])
    for row in (0, 47, 48, 4999, 9999):
        assert torch.equal(run(packed, x[row : row + 1], [0, 0, 1, 0, 0])[0], out[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_its_bits_in_any_company(dtype: torch.dtype, threads: int) -> None:
    """The needle goes to expert 2, among any rows of any experts, NaN in other experts' rows
    included.
    """
    packed = NativeExperts().pack(make(dtype))
    needle = rows(1, 64, dtype)
    alone = run(packed, needle, [0, 0, 1, 0, 0])
    rng = np.random.default_rng(2)
    for _ in range(20):
        counts = rng.integers(0, 80, E) * (rng.random(E) < 0.6)
        counts[2] += 1
        x = torch.from_numpy(rng.standard_normal((counts.sum(), 64))).to(dtype)
        first = counts[:2].sum()
        x[first + counts[2] :] = torch.nan
        place = first + rng.integers(0, counts[2])
        x[place] = needle[0]
        assert torch.equal(run(packed, x, counts.tolist())[place], alone[0])


@pytest.mark.parametrize("biased", [False, True])
def test_moving_experts(biased: bool) -> None:
    """pack_expert, put, take and stack equal packing the weights in their new places."""
    weights, other = (make(torch.bfloat16, seed=seed, biased=biased) for seed in (0, 9))
    experts = NativeExperts()
    biases = (None if bias is None else bias[1] for bias in (other.b13_eF, other.b2_eD))
    packed = experts.pack(weights)
    whole = experts.pack(other)
    taken = experts.take(packed, 1)
    experts.put(packed, 1, experts.pack_expert(other.w13_eFD[1], other.w2_eDI[1], *biases))
    assert torch.equal(packed.bytes_eB[1], whole.bytes_eB[1])
    assert torch.equal(taken.bytes_eB[0], experts.pack(weights).bytes_eB[1])
    again = experts.stack([experts.take(packed, expert) for expert in (4, 1)])
    x = rows(6, 64, torch.bfloat16)
    assert torch.equal(run(again, x, [2, 4])[2:], run(whole, x[2:], [0, 4, 0, 0, 0]))
    assert torch.equal(
        run(again, x, [2, 4])[:2], run(experts.pack(weights), x[:2], [0, 0, 0, 0, 2])
    )
