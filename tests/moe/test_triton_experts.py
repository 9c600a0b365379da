"""Triton experts with all kinds of weights: against SwiGLU, in any batch, and moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moeserve.errors import ConfigError
from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.triton import TritonExperts
from moeserve.moe.layer import FusedMoELayer, MoELayer
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.placement.placement import Placement
from moeserve.moe.plan import MoENeeds, plan_moe
from moeserve.moe.routing import Router
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import RowContext
from moeserve.ops.quantized import Quantized, Weight, quantization_of
from moeserve.ops.rules import SWIGLU, Activation, RouterRule
from moeserve.ops.triton_ops import triton_table
from moeserve.ops.triton_weights import W8A8, obstacle
from tests.kernels.device import DEVICE
from tests.kernels.interpreted import ordered_dots, rounding_to_nearest
from tests.quantized_checkpoints import dequantized
from tools.gpu.references import act_mul_reference, quantize_reference, widen

E = 4
D = 128
I = 256  # noqa: E741
KINDS = (
    "plain",
    "int4",
    "int4 with zeros",
    "int4 per channel",
    "int8",
    "int8 in groups",
    "fp8 per channel",
    "fp8 in blocks",
    "fp4",
)


@pytest.fixture(autouse=True)
def _as_on_a_gpu() -> Iterator[None]:
    with rounding_to_nearest(), ordered_dots():
        yield


def weight(kind: str, *shape: int, seed: int = 0) -> Weight:
    random = torch.Generator().manual_seed(seed)
    plain = torch.randn(shape, generator=random) * shape[-1] ** -0.5
    if kind == "plain":
        return plain.to(DEVICE)
    if kind in ("int4", "int8"):
        quantized, jobs = quantization_of(plain.to(DEVICE), kind, "w")
        for job in jobs:
            job()
        return quantized
    word = kind.split()[0]
    rows = 128 if kind.endswith("blocks") else 1
    groups = {
        "int4 with zeros": 32,
        "int4 per channel": shape[-1],
        "int8 in groups": 32,
        "fp8 in blocks": 128,
        "fp4": 16,
    }
    group = groups.get(kind, 0)
    into = replace(
        Quantized.empty(word, group, "zeros" in kind, torch.float32, shape, DEVICE), rows=rows
    )  # type: ignore[arg-type]
    into.values.copy_(torch.randint(0, 16 if word.endswith("4") else 127, shape, generator=random))
    scales = (
        torch.rand(*shape[:-2], shape[-2] // rows, into.scales.shape[-1], generator=random) * 0.02
        + 0.01
    )
    into.scales.copy_(scales.repeat_interleave(rows, -2) / (1 if word.endswith("4") else 50))
    if into.zeros is not None:
        into.zeros.copy_(torch.randint(0, 16, into.zeros.shape, generator=random))
    return into


def weights(kind: str, seed: int = 0, biased: bool = False) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed + 2)
    biases = (
        [torch.randn(E, width, generator=generator).to(DEVICE) for width in (2 * I, D)]
        if biased
        else []
    )
    return ExpertWeights(
        weight(kind, E, 2 * I, D, seed=seed), weight(kind, E, D, I, seed=seed + 1), *biases
    )


def run(packed: Any, x_PD: Tensor, counts: list[int], activation: Activation = SWIGLU) -> Tensor:
    counts_e = np.array(counts)
    out = torch.full_like(x_PD, torch.nan)
    TritonExperts(activation).run(
        Inbound(Layout.GROUPED, x_PD, counts_e, counts_e.cumsum()), packed, out
    )
    return out


def rounded(x: Tensor) -> Tensor:
    return widen(*quantize_reference(x)).float()


@pytest.mark.full("kernels", keep=3)
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_swiglu_in_any_company(kind: str) -> None:
    w = weights(kind)
    counts = [3, 0, 17, 1]
    packed = TritonExperts().pack(w)
    assert (packed.kernels is W8A8) == (kind == "fp8 in blocks")
    fit = rounded if packed.kernels is W8A8 else lambda x: x
    w13, w2 = (
        part if isinstance(part, Tensor) else dequantized(part) for part in (w.w13_eFD, w.w2_eDI)
    )
    x = torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    found = run(packed, x, counts)
    owners = np.repeat(np.arange(E), counts).tolist()
    for row, expert in enumerate(owners):
        gate, up = (w13[expert] @ fit(x[row : row + 1])[0]).chunk(2)
        expected = w2[expert] @ fit((gate * torch.sigmoid(gate) * up)[None])[0]
        assert (found[row] - expected).norm() <= (
            5e-3 if packed.kernels is W8A8 else 1e-5
        ) * expected.norm()
        if row in (1, 12, 20):
            assert torch.equal(
                run(packed, x[row : row + 1], [int(e == expert) for e in range(E)])[0], found[row]
            )


SLOTTED = [
    (kind, dtype)
    for kind in KINDS
    for dtype in (torch.float32, torch.float16)
    if dtype == torch.float32 or kind in ("plain", "fp8 in blocks", "fp4")
]


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize("counts", [[1, 0, 20, 17], [20] * 4, [0] * 4, [0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize(("kind", "dtype"), SLOTTED, ids=str)
def test_slots_have_the_bits_of_groups(
    kind: str, dtype: torch.dtype, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in wider ones, NaN beyond the counts, which stay on the device; only results of valid
    rows are written.
    """
    room = 20
    w = weights(kind, biased=kind == "fp4")
    if kind == "plain":
        w = ExpertWeights(w.w13_eFD.to(dtype), w.w2_eDI.to(dtype))  # type: ignore[arg-type]
    packed = TritonExperts().pack(w)
    valid = torch.arange(room, device=DEVICE) < torch.tensor(counts, device=DEVICE)[:, None]
    wide = torch.full((E, room, D + 8), torch.nan, dtype=dtype, device=DEVICE)
    rows = torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)
    wide[..., :D][valid] = rows
    expected = run(packed, rows, counts)
    for most in (0, sum(counts)):  # 0: as many as there is room for
        counts_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
        out = torch.full((E, room, D), 7.0, dtype=dtype, device=DEVICE)
        with monkeypatch.context() as patch:
            patch.setattr(
                Inbound,
                "host_counts_e",
                property(lambda self: pytest.fail("the host asks for the counts")),
            )
            TritonExperts().run(
                Inbound(Layout.SLOTTED, wide[..., :D], counts_e, counts_e, 30, most), packed, out
            )
        assert torch.equal(out[valid], expected)
        assert (out[~valid] == 7).all()
    on_host = np.array(counts)
    TritonExperts().run(
        Inbound(Layout.SLOTTED, wide[..., :D], on_host, on_host), packed, out.fill_(7)
    )
    assert torch.equal(out[valid], expected)


@pytest.mark.full("kernels", keep=2)
@pytest.mark.parametrize(
    "activation", [Activation(alpha=1.702, limit=1.0, up_shift=1.0), SWIGLU], ids=repr
)
@pytest.mark.parametrize("kind", ["plain", "int4", "fp8 in blocks"])
def test_biases_and_activations(kind: str, activation: Activation) -> None:
    w = weights(kind, biased=True)
    counts = [2, 0, 1, 1]
    assert w.b13_eF is not None
    assert w.b2_eD is not None
    packed = TritonExperts().pack(w)
    fit = rounded if packed.kernels is W8A8 else lambda x: x
    w13, w2 = (
        part if isinstance(part, Tensor) else dequantized(part) for part in (w.w13_eFD, w.w2_eDI)
    )
    x = torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    found = run(packed, x, counts, activation)
    for row, expert in enumerate(np.repeat(np.arange(E), counts).tolist()):
        both = w13[expert] @ fit(x[row : row + 1])[0] + w.b13_eF[expert]
        expected = w2[expert] @ fit(act_mul_reference(both[None], activation))[0] + w.b2_eD[expert]
        assert (found[row] - expected).norm() <= (
            5e-3 if packed.kernels is W8A8 else 1e-5
        ) * expected.norm()


@pytest.mark.parametrize(
    "rule", [RouterRule(score="sigmoid", on_input=True), RouterRule(bias=True, fp32=True)], ids=repr
)
def test_the_fused_form_has_the_bits_of_the_steps(rule: RouterRule) -> None:
    """Padding reaches no expert; a layer of one rank."""
    ops = triton_table(DEVICE, torch.float32, exact=True)
    tokens = 5
    top_k = 1 if rule.on_input else 2
    kernel = TritonExperts(Activation(limit=1.0))
    gate = weight("plain", E, D, seed=4)
    assert isinstance(gate, Tensor)
    bias = torch.rand(E, device=DEVICE) if rule.bias else None
    plan = plan_moe(
        MoENeeds(hidden_size=D, dtype="float32", device=DEVICE.type, max_tokens=8),
        [LocalAll2All(E)],
        [kernel],
    )
    router = Router(ops.pack_linear(gate, None), top_k, rule, ops, bias)
    parts: list[Any] = [
        kernel.pack(weights("plain", biased=True)),
        LogicalToPhysical(Placement.initial(1, E, 1), 0),
    ]
    layers = plan.layer(router, *parts), replace(plan, fused=None).layer(router, *parts)
    assert [type(layer) for layer in layers] == [FusedMoELayer, MoELayer]
    x = torch.randn(tokens + 1, D, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    found, expected = (layer(x, RowContext(tokens), UBatch())[:tokens] for layer in layers)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "biased"), [*((kind, False) for kind in KINDS), ("plain", True), ("int4", True)]
)
def test_an_expert_moves_in_one_piece(kind: str, biased: bool) -> None:
    """put, take and stack equal packing the weights together.

    This includes scales, zero points and biases.
    """
    experts = TritonExperts()
    a = weights(kind, biased=biased)
    b = weights(kind, 7, biased)
    biases = (None if bias is None else bias[2] for bias in (b.b13_eF, b.b2_eD))
    whole = experts.pack(a)
    other = experts.pack(b)
    assert all(len(part) == E and part.is_contiguous() for part in whole.parts)
    one = experts.pack_expert(b.w13_eFD[2], b.w2_eDI[2], *biases)
    first = experts.take(whole, 1)
    experts.put(whole, 1, one)
    stacked = experts.stack([one, first, experts.take(other, 0)])
    again = experts.pack(weights(kind, biased=biased))
    for part, before, theirs, new in zip(
        whole.parts, again.parts, other.parts, stacked.parts, strict=True
    ):
        kept = [0, 2, 3]
        assert torch.equal(part[kept].view(torch.uint8), before[kept].view(torch.uint8))
        assert torch.equal(part[1].view(torch.uint8), theirs[2].view(torch.uint8))
        wanted = (theirs[2], before[1], theirs[0])
        assert all(
            torch.equal(n.view(torch.uint8), w.view(torch.uint8))
            for n, w in zip(new, wanted, strict=True)
        )


def test_what_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [
        obstacle(DEVICE, "int4", group, inputs)
        for group, inputs in ((128, 192), (64, 128), (0, 64))
    ] == [""] * 3
    assert [
        obstacle(DEVICE, kind, group, 96)
        for kind, group in (("int4", 32), ("int4", 0), ("fp4", 16))
    ] == [""] * 3
    assert "int4 products take groups of 16s and inputs of 32s" in obstacle(DEVICE, "int4", 16, 48)
    assert "fp4 products take groups of 16s" in obstacle(DEVICE, "fp4", 8, 64)
    assert [obstacle(DEVICE, "fp8", group, inputs) for group, inputs in ((128, 48), (0, 16))] == [
        ""
    ] * 2
    assert "inputs of 16s" in obstacle(DEVICE, "fp8", 128, 72)
    assert "inputs of 16s" in obstacle(DEVICE, "int8", 0, 40)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "capability 8.9" in obstacle(torch.device("cuda"), "fp8", 128, 128)
    assert not obstacle(torch.device("cuda"), "int8", 128, 128)
    mixed = ExpertWeights(weight("plain", E, 2 * I, D), weight("int8", E, D, I))
    with pytest.raises(ConfigError, match=r"gate and up in torch\.float32, but down in int8"):
        TritonExperts().pack(mixed)
