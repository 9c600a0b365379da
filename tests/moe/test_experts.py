"""Expert kernels against gated MLPs computed row by row, with bits independent of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.reference import ReferenceExperts
from moeserve.ops.rules import SWIGLU, Activation
from moeserve.ops.table import Choice
from tests.ops.choices import CHOICES, ops_of

E = 5
D = 64
I = 48  # noqa: E741


def inbound_of(x_PD: Tensor, counts: list[int]) -> Inbound:
    counts_e = np.array(counts)
    return Inbound(Layout.GROUPED, x_PD, counts_e, counts_e.cumsum())


def slotted(x_PD: Tensor, counts: list[int], room: int) -> tuple[Inbound, Tensor]:
    """The same rows in slots, NaN where there is none, and which of the slots are valid."""
    counts_e = np.array(counts)
    valid = torch.from_numpy(np.arange(room) < counts_e[:, None])
    x = torch.full((len(counts), room, x_PD.shape[1]), torch.nan, dtype=x_PD.dtype)
    x[valid] = x_PD
    return Inbound(Layout.SLOTTED, x, counts_e, counts_e), valid


def weights(dtype: torch.dtype, biased: bool = False) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    products = (
        (torch.randn(E, 2 * I, D, generator=generator) * D**-0.5).to(dtype),
        (torch.randn(E, D, I, generator=generator) * I**-0.5).to(dtype),
    )
    if not biased:
        return ExpertWeights(*products)
    biases = (torch.randn(E, width, generator=generator).to(dtype).float() for width in (2 * I, D))
    return ExpertWeights(*products, *biases)


def slow(x_D: Tensor, w: ExpertWeights, expert: int, activation: Activation) -> Tensor:
    none = torch.zeros(())
    b13, b2 = (none if bias is None else bias[expert].double() for bias in (w.b13_eF, w.b2_eD))
    gate, up = (w.w13_eFD[expert].double() @ x_D.double() + b13).chunk(2)
    gate = gate.clamp(max=activation.gate_limit)
    up = up.clamp(-activation.limit, activation.limit)
    if activation.kind == "gelu_tanh":
        gate = torch.nn.functional.gelu(gate, approximate="tanh")
    else:
        gate = gate * torch.sigmoid(activation.alpha * gate)
    return (
        w.w2_eDI[expert].double()
        @ (gate.clamp(max=activation.act_limit) * (up + activation.up_shift))
        + b2
    )


ACTIVATIONS = [
    SWIGLU,
    Activation(alpha=1.702, limit=1.0, up_shift=1.0),
    Activation(limit=0.5, limit_after=True),
    Activation(kind="gelu_tanh"),
]


@pytest.mark.parametrize("kernels", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [[3, 0, 1, 17, 2], [0, 0, 40, 0, 0], [0, 0, 0, 0, 1], [0] * 5])
@pytest.mark.parametrize(
    ("activation", "biased"), [(SWIGLU, False), *((a, True) for a in ACTIVATIONS)], ids=repr
)
def test_agrees_with_a_gated_mlp(
    counts: list[int], dtype: torch.dtype, kernels: Choice, activation: Activation, biased: bool
) -> None:
    experts = ReferenceExperts(ops_of(dtype, kernels)).with_activation(activation)
    w = weights(dtype, biased)
    packed = experts.pack(w)
    x = torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.full_like(x, torch.nan)
    experts.run(inbound_of(x, counts), packed, out)
    inbound, valid = slotted(x, counts, max(*counts, 1))
    out_slots = torch.full_like(inbound.x, torch.nan)
    experts.run(inbound, packed, out_slots)
    assert torch.equal(out_slots[valid], out)
    assert out_slots[~valid].isnan().all()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for row, expert in enumerate(owners):
        expected = slow(x[row], w, expert, activation)
        assert (out[row].double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("kernels", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_keeps_its_bits_in_any_company(dtype: torch.dtype, kernels: Choice) -> None:
    """The needle goes to expert 2, among any rows of any experts, NaN in other experts' rows
    included.
    """
    experts = ReferenceExperts(ops_of(dtype, kernels))
    packed = experts.pack(weights(dtype))
    needle = torch.randn(D, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.empty(1, D, dtype=dtype)
    experts.run(inbound_of(needle[None], [0, 0, 1, 0, 0]), packed, alone)
    rng = np.random.default_rng(2)
    for _ in range(30):
        counts = rng.integers(0, 40, E) * (rng.random(E) < 0.6)
        counts[2] += 1
        x = torch.from_numpy(rng.standard_normal((counts.sum(), D))).to(dtype)
        first = counts[:2].sum()
        x[first + counts[2] :] = torch.nan
        place = first + rng.integers(0, counts[2])
        x[place] = needle
        out = torch.empty_like(x)
        experts.run(inbound_of(x, counts.tolist()), packed, out)
        assert torch.equal(out[place], alone[0])
