"""The whole MoE layer against a loop over tokens; micro-batches; the plan and its reasons."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.comm.world import World
from moeserve.errors import ConfigError
from moeserve.moe.all2all.base import All2AllCaps, Layout
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.experts.base import ExpertsCaps, ExpertWeights
from moeserve.moe.experts.native import NativeExperts
from moeserve.moe.experts.reference import ReferenceExperts
from moeserve.moe.layer import FusedMoELayer, MoELayer
from moeserve.moe.pending import Completed
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.placement.placement import Placement
from moeserve.moe.plan import MoENeeds, plan_moe
from moeserve.moe.routing import Router
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import RowContext
from moeserve.ops.native import native
from moeserve.ops.pick import pick_ops
from moeserve.ops.rules import RELU2, SWIGLU, Activation, RouterRule

E = 7
D = 32
I = 40  # noqa: E741
K = 3
NEEDS = MoENeeds(hidden_size=D, dtype="float32", device="cpu", max_tokens=64)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "rule",
    [
        RouterRule(),
        RouterRule(renormalize=True),
        RouterRule(score="softmax_selected"),
        RouterRule(on_input=True),
    ],
)
def test_layer_is_the_sum_over_chosen_experts(rule: RouterRule, shared: bool) -> None:
    torch.manual_seed(0)
    ops = pick_ops("cpu", torch.float32)
    top_k = 1 if rule.on_input else K
    gate = torch.randn(E, D)
    w13 = torch.randn(E, 2 * I, D) * 0.2
    w2 = torch.randn(E, D, I) * 0.2
    experts = ReferenceExperts(ops)
    layer = MoELayer(
        Router(ops.pack_linear(gate, None), top_k, rule, ops),
        LocalAll2All(E),
        experts,
        experts.pack(ExpertWeights(w13, w2)),
        LogicalToPhysical(Placement.initial(1, E, 1), 0),
        (lambda x, context: 3 * x) if shared else None,
        on_input=rule.on_input,
    )
    x = torch.randn(11, D)
    ubatch = UBatch()
    out = layer(x, RowContext(9), ubatch)
    for t in range(9):
        scores = gate @ x[t]
        if rule.score == "softmax":
            scores = scores.softmax(0)
        ids = scores.topk(top_k).indices
        weights = scores[ids].softmax(0) if rule.score == "softmax_selected" else scores[ids]
        if rule.renormalize:
            weights = weights / weights.sum()
        expected = 3 * x[t] if shared else torch.zeros(D)
        for weight, e in zip(weights, ids.tolist(), strict=True):
            g, u = (w13[e] @ (weight * x[t] if rule.on_input else x[t])).chunk(2)
            y = w2[e] @ (torch.nn.functional.silu(g) * u)
            expected = expected + (y if rule.on_input else weight * y)
        assert torch.allclose(out[t], expected, atol=1e-5)
    assert torch.equal(out[9:], 3 * x[9:] if shared else torch.zeros(2, D))
    load = ubatch.take_load()
    assert load.sum() == 9 * top_k


def test_a_plan_for_every_activation() -> None:
    gelu = Activation(kind="gelu_tanh")
    ops = pick_ops("cpu", torch.float32)
    torch_ops = pick_ops("cpu", torch.float32, "torch")
    plan = plan_moe(NEEDS, [LocalAll2All(E)], [ReferenceExperts(torch_ops)])
    other = plan.with_activation(gelu)
    x = torch.randn(3, D)
    packed = plan.experts.pack(ExpertWeights(torch.randn(E, 2 * I, D), torch.randn(E, D, I)))
    router = Router(ops.pack_linear(torch.randn(E, D), None), 1, RouterRule(), ops)
    parts: list[Any] = [packed, LogicalToPhysical(Placement.initial(1, E, 1), 0)]
    found = [
        one.layer(router, *parts)(x, RowContext(3), UBatch())
        for one in (plan, other, plan.with_activation(SWIGLU))
    ]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_a_ubatch_works_while_it_waits() -> None:
    log: list[str] = []

    class Slow(Completed[str]):
        def wait(self) -> str:
            log.append("wait")
            return super().wait()

    def start() -> Slow:
        log.append("start")
        return Slow("value")

    assert UBatch().overlap(start, lambda: log.append("meanwhile")) == "value"
    assert log == ["start", "meanwhile", "wait"]


def test_padding_that_the_host_knows_does_not_travel() -> None:
    """Torch's kernels pad a step's rows; transports make room for the tokens of the rank that has
    most.
    """
    torch.manual_seed(0)
    ops = pick_ops("cpu", torch.float32)
    sent = []

    class Watched(LocalAll2All):
        def dispatch(self, x_TD: torch.Tensor, *args: Any) -> Any:
            sent.append(len(x_TD))
            return super().dispatch(x_TD, *args)

    kernel = ReferenceExperts(ops)
    packed = kernel.pack(ExpertWeights(torch.randn(E, 2 * I, D), torch.randn(E, D, I)))
    router = Router(ops.pack_linear(torch.randn(E, D), None), K, RouterRule(), ops)
    layer = MoELayer(
        router, Watched(E), kernel, packed, LogicalToPhysical(Placement.initial(1, E, 1), 0)
    )
    x = torch.randn(32, D)
    ubatch = UBatch()
    ubatch.most_tokens = 17
    padded = layer(x, RowContext(17), ubatch)
    whole = layer(x, RowContext(32), ubatch)
    assert sent == [17, 32]
    assert padded.shape == x.shape
    assert torch.equal(padded[:17], whole[:17])


def test_loads_are_kept_layer_by_layer() -> None:
    ubatch = UBatch()
    ubatch.record_layer_load(np.array([4, 0, 0, 0]))
    ubatch.record_layer_load(np.array([1, 1, 1, 1]))
    ubatch.record_layer_load(np.array([0, 0, 0, 0]))
    table = ubatch.take_load()
    assert table.tolist() == [[4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert ubatch.take_load().size == 0


class _Backend(LocalAll2All):
    def __init__(self, **changes: object) -> None:
        super().__init__(E)
        self.caps: All2AllCaps = dataclasses.replace(LocalAll2All.caps, name="other", **changes)  # type: ignore[arg-type]


class _Kernel(ReferenceExperts):
    def __init__(self, **changes: object) -> None:
        super().__init__(pick_ops("cpu", torch.float32))
        self.caps: ExpertsCaps = dataclasses.replace(ReferenceExperts.caps, name="quick", **changes)  # type: ignore[arg-type]


def test_plan_picks_the_first_pair_that_can() -> None:
    slotted = _Kernel(layouts=frozenset({Layout.SLOTTED}))
    good = ReferenceExperts(pick_ops("cpu", torch.float32))
    plan = plan_moe(
        NEEDS, [_Backend(pad_hidden=lambda width: None), LocalAll2All(E)], [slotted, good]
    )
    assert (plan.all2all.caps.name, plan.experts.caps.name) == ("local", "reference")
    assert [why for _, _, why in plan.pairs] == [
        "other does not support rows of 32",
        "other does not support rows of 32",
        "local and quick share no layout",
        "picked",
    ]
    assert plan.graphs_note == "there are none on cpu"
    assert plan.fused_note == "reference has no fused form"
    assert "local    reference  picked" in plan.table()
    assert (
        plan_moe(NEEDS, [LocalAll2All(E), _Backend()], [good]).pairs[1][2]
        == "possible, lower preference"
    )


@pytest.mark.parametrize(
    ("backend", "kernel", "needs", "reason"),
    [
        ({}, {}, {"world_size": 2}, "does not support 2 ranks"),
        ({"row_dtypes": frozenset({"bfloat16"})}, {}, {}, "does not support float32"),
        ({"pad_hidden": lambda width: None}, {}, {}, "does not support rows of 32"),
        ({"max_in_flight": 1}, {}, {"ubatches": 2}, "1 dispatches at once, 2 micro-batches"),
        ({}, {"dtypes": frozenset({"bfloat16"})}, {}, "does not compute in float32"),
        ({}, {"devices": frozenset({"cuda"})}, {}, "does not run on cpu"),
        ({}, {"biases": False}, {"biases": True}, "quick takes no experts with biases"),
        ({}, {"ungated": False}, {"gated": False}, "quick takes no experts without gates"),
    ],
)
def test_plan_says_what_is_in_the_way(
    backend: dict[str, object], kernel: dict[str, object], needs: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan_moe(dataclasses.replace(NEEDS, **needs), [_Backend(**backend)], [_Kernel(**kernel)])  # type: ignore[arg-type]


def test_world() -> None:
    world = World(5, 8, tp_size=2)
    assert (world.dp_rank, world.tp_rank, world.expert_rank, world.num_expert_ranks) == (2, 1, 5, 8)
    alone = World(5, 8, tp_size=2, ep=False)
    assert (alone.expert_rank, alone.num_expert_ranks) == (0, 1)
    with pytest.raises(ValueError, match="rank 4 is not in a world of 4"):
        World(4, 4)
    with pytest.raises(ValueError, match="6 ranks cannot be sharded over engines of 4"):
        World(0, 6, tp_size=4)


@pytest.mark.parametrize(
    ("backend", "kernel", "why"),
    [
        (
            {"why_not_recordable": None},
            {"device_counts": True},
            "possible: decode steps can be recorded",
        ),
        ({"why_not_recordable": None}, {}, "quick must know the counts of rows on the host"),
        ({}, {"device_counts": True}, "rows are counted on the host"),
    ],
)
def test_plan_says_whether_steps_are_recorded(
    backend: dict[str, Any], kernel: dict[str, Any], why: str
) -> None:
    """The planned layer agrees with the plan."""
    needs = dataclasses.replace(NEEDS, device="cuda")
    plan = plan_moe(needs, [_Backend(**backend)], [_Kernel(**kernel)])
    assert plan.graphs_note == why
    assert f"graphs   other    {why}\n" in plan.table()
    placement = Placement.initial(1, E, 1)
    ops = pick_ops("cpu", torch.float32)
    parts: list[Any] = [
        Router(ops.pack_linear(torch.randn(E, D), None), K, RouterRule(), ops),
        None,
    ]
    layer = plan.layer(*parts, LogicalToPhysical(placement, 0, counts_on_device=True))
    assert layer.why_not_recordable == (None if why.startswith("possible") else why)
    on_host = plan.layer(*parts, LogicalToPhysical(placement, 0))
    assert on_host.why_not_recordable == "the router's choices are counted on the host"


@pytest.mark.skipif(native() is None, reason="needs the compiled extension")
@pytest.mark.parametrize("activation", [SWIGLU, RELU2], ids=repr)
def test_one_rank_runs_all_steps_in_one_call_with_the_same_bits(activation: Activation) -> None:
    torch.manual_seed(0)
    ops = pick_ops("cpu", torch.float32)
    kernel = NativeExperts(activation=activation)
    needs = dataclasses.replace(NEEDS, gated=activation.parts == 2)
    plan = plan_moe(needs, [LocalAll2All(E)], [kernel])
    assert plan.fused_note == "picked: router, dispatch, experts and combine are one call"
    packed = kernel.pack(
        ExpertWeights(torch.randn(E, activation.parts * I, D), torch.randn(E, D, I))
    )
    router = Router(ops.pack_linear(torch.randn(E, D), None), K, RouterRule(), ops)
    parts: list[Any] = [
        packed,
        LogicalToPhysical(Placement.initial(1, E, 1), 0),
        lambda x, context: 3 * x,
    ]
    layers = plan.layer(router, *parts), dataclasses.replace(plan, fused=None).layer(router, *parts)
    assert [type(layer) for layer in layers] == [FusedMoELayer, MoELayer]
    x = torch.randn(11, D)
    ubatches = (UBatch(), UBatch())
    assert torch.equal(
        *(layer(x, RowContext(9), ubatch) for layer, ubatch in zip(layers, ubatches, strict=True))
    )
    loads = [ubatch.take_load() for ubatch in ubatches]
    assert loads[0].tolist() == loads[1].tolist()


@pytest.mark.parametrize(
    ("needs", "backend", "kernel", "why"),
    [
        ({"tp_size": 2}, {}, {}, "2 tensor-parallel ranks divide the tokens"),
        ({"replicas": True}, {}, {}, "some experts have replicas"),
        ({}, {"in_place": False}, {}, "other moves or rounds rows"),
        (
            {"gated": False},
            {},
            {"fuses_ungated": False},
            "native has no fused form of experts without gates",
        ),
    ],
)
def test_why_steps_are_not_fused(
    needs: dict[str, Any], backend: dict[str, object], kernel: dict[str, Any], why: str
) -> None:
    experts = NativeExperts()
    experts.caps = dataclasses.replace(experts.caps, **kernel)
    plan = plan_moe(dataclasses.replace(NEEDS, **needs), [_Backend(**backend)], [experts])
    assert plan.fused_note.startswith(why)
    assert not plan.fused
