"""Backends that are offered for a configuration, and what the plan reports about them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from moeserve.config import ParallelConfig
from moeserve.errors import ConfigError
from moeserve.moe.all2all import registry
from moeserve.moe.all2all.base import (
    All2All,
    All2AllCaps,
    Inbound,
    Layout,
    Ticket,
    UnavailableBackend,
)
from moeserve.moe.all2all.layout import group_rows, weighted_sum
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.all2all.nccl import NcclAll2All
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.reference import GroupedMM, ReferenceExperts
from moeserve.moe.pending import Completed
from moeserve.moe.plan import MoENeeds, plan_moe
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from moeserve.ops.native import native
from moeserve.ops.pick import pick_ops
from tests.plugin_packages import Install

FACTS: dict[str, Any] = {
    "hidden_size": 32,
    "dtype": torch.float32,
    "top_k": 2,
    "max_tokens": 64,
    "experts_per_rank": 4,
}


def offered(device: str = "cpu", **settings: Any) -> list[All2All]:
    return registry.make_backends(ParallelConfig(**settings), device=device, **FACTS)


def needs(**changes: Any) -> MoENeeds:
    return MoENeeds(
        **{"hidden_size": 32, "dtype": "float32", "device": "cpu", "max_tokens": 64, **changes}
    )


def reference() -> ReferenceExperts:
    return ReferenceExperts(pick_ops("cpu", torch.float32))


def test_auto_prefers_shared_memory_on_one_machine() -> None:
    assert [b.caps.name for b in offered(dp=2)] == ["shm", "torch"]
    plan = plan_moe(needs(world_size=2), offered(dp=2), [reference()])
    assert plan.all2all.caps.name == ("torch" if native() is None else "shm")
    plan = plan_moe(needs(world_size=4), offered(dp=4, nnodes=2), [reference()])
    assert plan.all2all.caps.name == "torch"
    assert plan.pairs[0] == ("shm", "reference", "shm serves one machine, these ranks are on 2")


def test_between_gpus_collectives_are_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [type(b) for b in offered("cuda", dp=2)[-1:]] == [NcclAll2All]
    assert [type(b) for b in offered("cuda", dp=4, nnodes=2)[-1:]] == [NcclAll2All]
    plan = plan_moe(
        needs(world_size=2, device="cuda"), offered("cuda", dp=2, all2all="torch"), [reference()]
    )
    assert isinstance(plan.all2all, NcclAll2All)
    with pytest.raises(ConfigError, match="4 ranks share 2 here; use --all2all cuda_ipc"):
        plan_moe(
            needs(world_size=4, device="cuda"),
            offered("cuda", dp=4, all2all="torch"),
            [reference()],
        )


@pytest.mark.parametrize(("asked", "expected"), [(None, 24), (8, 8)])
def test_backends_are_told_how_many_multiprocessors_they_may_take(
    asked: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[registry.BackendFacts] = []
    monkeypatch.setitem(
        registry.BACKENDS._parts, "shm", lambda facts: told.append(facts) or make_mine(facts)
    )
    offered("cuda", dp=2, all2all="shm", comm_sms=asked)
    assert [(facts.comm_sms, facts.is_comm_sms_set) for facts in told] == [
        (expected, asked is not None)
    ]


@pytest.mark.parametrize("settings", [{}, {"dp": 4, "ep": "off"}, {"all2all": "local"}])
def test_one_rank_needs_no_transport(settings: dict[str, Any]) -> None:
    assert [type(b) for b in offered(**settings)] == [LocalAll2All]


def test_what_was_asked_of_one_rank_is_answered() -> None:
    plan = plan_moe(needs(), offered(all2all="torch"), [reference()])
    assert plan.pairs[0] == ("torch", "reference", "one rank has all experts: nothing is sent")
    assert plan.all2all.caps.name == "local"


@pytest.mark.parametrize(
    ("settings", "device", "why"),
    [
        ({"all2all": "shm", "nnodes": 2}, "cpu", "shm serves one machine, these ranks are on 2"),
        ({"all2all": "shm"}, "cuda", "shm moves rows between CPU ranks, these are on cuda"),
        (
            {"all2all": "torch"},
            "cuda",
            "this build of torch has no NCCL; .*; use --all2all cuda_ipc",
        ),
        (
            {"all2all": "cuda_ipc"},
            "cpu",
            "cuda_ipc moves rows between GPUs, these ranks are on cpu; use shm",
        ),
        (
            {"all2all": "cuda_ipc", "nnodes": 2},
            "cuda",
            "cuda_ipc serves one machine, these ranks are on 2",
        ),
        ({"all2all": "deepep_ll"}, "cpu", "deepep_ll needs CUDA and the package deep_ep"),
        ({"all2all": "local"}, "cpu", "local does not support 2 ranks"),
    ],
)
def test_a_backend_that_was_asked_for_and_cannot_serve(
    settings: dict[str, Any], device: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        plan_moe(
            needs(world_size=2, device=device), offered(device, dp=2, **settings), [reference()]
        )


def test_gpus_of_one_machine_read_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts need no number of received rows on the host."""
    triton = pytest.importorskip("moeserve.moe.experts.triton")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: MagicMock())
    backends = offered("cuda", dp=2)
    assert [b.caps.name for b in backends] == ["deepep_v2", "deepep_ll", "cuda_ipc", "torch"]
    kernels = [reference(), triton.TritonExperts()]
    plan = plan_moe(needs(world_size=2, device="cuda", exact=True), backends, kernels)
    assert (plan.all2all.caps.name, plan.experts.caps.name) == ("cuda_ipc", "triton")
    why = "cuda_ipc counts rows on the device, reference must know them on the host"
    assert ("cuda_ipc", "reference", why) in plan.pairs


def test_where_torch_has_no_cuda_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    (backend,) = offered("cuda", dp=2, all2all="cuda_ipc")
    assert "cuda_ipc needs the CUDA runtime that torch" in (backend.caps.obstacle or "")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"expert_size": 96}, "picked"),
        (
            {"expert_size": 100},
            "grouped_mm takes multiples of 8; the model is 64 wide, its experts 100",
        ),
        ({"expert_size": 96, "dtype": "float32"}, "grouped_mm does not compute in float32"),
        (
            {"expert_size": 96, "device": "cpu"},
            "grouped_mm's bits depend on the number of rows on CPUs",
        ),
    ],
)
def test_where_grouped_mm_serves(changes: dict[str, Any], why: str) -> None:
    plan = plan_moe(
        needs(**{"hidden_size": 64, "dtype": "bfloat16", "device": "cuda", **changes}),
        [LocalAll2All(4)],
        [GroupedMM(pick_ops("cpu", torch.bfloat16)), reference()],
    )
    assert plan.pairs[0] == ("local", "grouped_mm", why)
    assert plan.pairs[1][2] == ("possible, lower preference" if why == "picked" else "picked")


def test_unknown_name() -> None:
    with pytest.raises(
        ConfigError,
        match=r"all2all: 'torhc' is unknown; did you mean 'torch'\? known: auto, local, shm",
    ):
        offered(dp=2, all2all="torhc")


@pytest.mark.parametrize(("name", "successor"), registry.REMOVED.items())
def test_a_removed_name_is_refused_with_its_successor(name: str, successor: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' was removed; use '{successor}'"):
        offered(dp=2, all2all=name)
    assert successor in registry.BACKENDS


def test_names_are_checked_without_torch() -> None:
    program = (
        "import sys; from moeserve.moe.all2all.registry import check_name as c; c('shm'); "
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


def make_mine(facts: registry.BackendFacts) -> All2All:
    if facts.num_ranks > 2:
        raise registry.Unavailable("mine serves two ranks")
    return UnavailableBackend("mine", "found")


def test_other_packages_add_theirs(install: Install) -> None:
    install("mine", {registry.BACKENDS.group: {"mine": f"{__name__}:make_mine"}})
    assert offered(dp=2, all2all="mine")[0].caps.obstacle == "found"
    assert offered(dp=3, all2all="mine")[0].caps.obstacle == "mine serves two ranks"
    with pytest.raises(ConfigError, match=r"known: .*torch, mine$"):
        registry.check_name("other")


def test_a_built_in_backend_that_cannot_be_imported_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry.BACKENDS._targets, "torch", "moeserve.no_such:make")
    monkeypatch.setattr(registry.BACKENDS, "_parts", {})
    (backend,) = offered(dp=2, all2all="torch")
    assert (
        backend.caps.obstacle == "its module cannot be imported: No module named 'moeserve.no_such'"
    )


def test_a_wire_that_rounds_rounds_on_one_rank_too() -> None:
    (backend,) = offered(wire="fp8_b128")
    x = torch.randn(3, 32)
    routing = Routing(torch.zeros((3, 1), dtype=torch.int32), torch.ones(3, 1))
    assert not torch.equal(backend.dispatch(x, routing, UBatch()).wait().inbound.x, x)


class Slots:
    """A backend of one rank with slots; rows beyond the counts are NaN."""

    caps = All2AllCaps(
        "slots",
        frozenset({Layout.SLOTTED}),
        frozenset({"float32"}),
        16,
        pad_hidden=lambda width: 128,
    )

    def __init__(self, num_local: int) -> None:
        self.num_local = num_local

    def valid(self, counts_e: Any) -> torch.Tensor:
        return torch.from_numpy(np.arange(9) < counts_e[:, None])

    def dispatch(self, x_TD: torch.Tensor, routing: Routing, ubatch: UBatch) -> Completed[Ticket]:
        rows = group_rows(routing.ids_TK, self.num_local)
        slots = torch.full((self.num_local, 9, x_TD.shape[1]), torch.nan)
        slots[self.valid(rows.counts_e)] = x_TD[rows.order_P // routing.ids_TK.shape[1]]
        return Completed(
            Ticket(Inbound(Layout.SLOTTED, slots, rows.counts_e, rows.counts_e), routing, rows)
        )

    def combine(
        self, ticket: Ticket, y: torch.Tensor, out_TD: torch.Tensor, ubatch: UBatch
    ) -> Completed[torch.Tensor]:
        ticket.use()
        rows = y[self.valid(ticket.inbound.host_counts_e)]
        return Completed(weighted_sum(rows, ticket.private, ticket.routing, out_TD))

    def join(self, *_: Any) -> None:
        pass

    def leave(self) -> None:
        pass


def test_slots_go_to_a_kernel_that_takes_them() -> None:
    plan = plan_moe(needs(), [Slots(4)], [reference()])
    assert plan.pairs[0][2] == (
        "picked; rows of 32 are sent padded to 128; a step of 64 tokens is sent in 4 rounds of 16"
    )
    assert "1 ranks, 1 micro-batches, cpu, float32 rows of 32" in plan.table()
    ids = torch.tensor([[0, 3], [3, -1], [-1, -1], [2, 3]], dtype=torch.int32)
    x = torch.randn(4, 32)
    routing = Routing(ids, torch.rand(4, 2))
    packed = plan.experts.pack(ExpertWeights(torch.randn(4, 48, 32), torch.randn(4, 32, 24)))
    outs = []
    for backend in (plan.all2all, LocalAll2All(4)):
        ticket = backend.dispatch(x, routing, UBatch()).wait()
        y = torch.full_like(ticket.inbound.x, torch.nan)
        plan.experts.run(ticket.inbound, packed, y)
        outs.append(backend.combine(ticket, y, torch.empty_like(x), UBatch()).wait())
    assert torch.equal(*outs)


@pytest.mark.parametrize("counts", [[3, 0, 17, 2], [0, 0, 0, 0], [0, 5, 0, 0]])
def test_grouped_mm_agrees_with_the_reference(counts: list[int]) -> None:
    """Check the arithmetic only: it promises no bits on a CPU, and the plan rejects it there."""
    kernel = GroupedMM(pick_ops("cpu", torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(4, 64, 48, generator=generator).bfloat16() / 7
    w2 = torch.randn(4, 48, 32, generator=generator).bfloat16() / 6
    packed = kernel.pack(ExpertWeights(w13.clone(), w2.clone()))
    kernel.put(packed, 2, kernel.pack_expert(w13[1], w2[1]))
    w13[2] = w13[1]
    w2[2] = w2[1]
    x = torch.randn(sum(counts) + 2, 48, generator=generator).bfloat16()
    x[sum(counts) :] = torch.nan
    inbound = Inbound(Layout.GROUPED, x, np.array(counts), np.cumsum(counts))
    out = torch.zeros_like(x)
    expected = torch.zeros_like(x)
    kernel.run(inbound, packed, out)
    plain = ReferenceExperts(pick_ops("cpu", torch.bfloat16))
    plain.run(inbound, plain.pack(ExpertWeights(w13, w2)), expected)
    assert (out - expected).float().norm() <= 1e-2 * expected.float().norm()
    with pytest.raises(ConfigError, match="bits depend on the number of rows"):
        plan_moe(needs(dtype="bfloat16", hidden_size=48), [LocalAll2All(4)], [kernel])
