"""The plan's answer if DeepEP is requested by name: installed, incompatible, or missing."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from moeserve.config import ParallelConfig
from moeserve.errors import ConfigError
from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.registry import make_backends
from moeserve.moe.experts.reference import GroupedMM, ReferenceExperts
from moeserve.moe.plan import MoENeeds, MoEPlan, plan_moe
from moeserve.ops.pick import pick_ops
from tests.moe.deepep import fake
from tests.moe.deepep.ranks import NAMES


def offer(
    name: str, top_k: int = 2, device: str = "cuda", wire: Any = "auto", comm_sms: int | None = None
) -> list[All2All]:
    return make_backends(
        ParallelConfig(dp=2, all2all=name, wire=wire, comm_sms=comm_sms),
        hidden_size=2880,
        dtype=torch.bfloat16,
        top_k=top_k,
        max_tokens=300,
        experts_per_rank=4,
        device=device,
    )


def plan(backends: list[All2All], **changes: Any) -> MoEPlan:
    needs = {
        "hidden_size": 2880,
        "dtype": "bfloat16",
        "device": "cuda",
        "max_tokens": 300,
        "world_size": 2,
    }
    return plan_moe(
        MoENeeds(**{**needs, **changes}),
        backends,
        [ReferenceExperts(pick_ops("cpu", torch.bfloat16))],
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", fake)


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="deep_ep is installed")
@pytest.mark.parametrize("name", NAMES)
def test_without_the_package(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{name} needs CUDA and the package deep_ep: pip install sgl-deep-ep"
    ):
        plan(offer(name))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "terms"),
    [
        (
            "deepep_ll",
            "picked; rows of 2880 are sent padded to 3072; "
            "a step of 300 tokens is sent in 3 rounds of 128; bits may depend on where experts are",
        ),
        (
            "deepep_v2",
            "picked; rows of 2880 are sent padded to 3072; bits may depend on where experts are",
        ),
    ],
)
def test_with_the_package(name: str, terms: str) -> None:
    picked = plan(offer(name))
    assert picked.pairs[0] == (name, "reference", terms)
    eager = {"deepep_ll": "reference must know the counts of rows on the host"}
    assert picked.graphs_note == eager.get(name, "deepep_v2 counts the received rows on the host")
    assert plan(offer(name, wire="fp8_b128")).all2all.caps.name == name


@pytest.mark.usefixtures("installed")
def test_kernels_that_take_its_slots() -> None:
    ops = pick_ops("cpu", torch.bfloat16)
    triton = pytest.importorskip("moeserve.moe.experts.triton").TritonExperts()
    needs = MoENeeds(
        hidden_size=2880, dtype="bfloat16", device="cuda", max_tokens=300, world_size=2
    )
    picked = plan_moe(needs, offer("deepep_ll"), [GroupedMM(ops), triton, ReferenceExperts(ops)])
    assert [why.split(";")[0] for _, _, why in picked.pairs[:3]] == [
        "deepep_ll and grouped_mm share no layout", "picked", "possible, lower preference",
    ]  # fmt: skip
    assert (picked.all2all.caps.name, picked.experts) == ("deepep_ll", triton)
    assert picked.graphs_note == "possible: decode steps can be recorded"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        (
            "deepep_v2",
            {"exact": True},
            "does not keep the order of sums: .* use --determinism fast",
        ),
        ("deepep_ll", {"world_size": 9}, "does not support 9 ranks"),
        ("deepep_v2", {"device": "cpu"}, "does not support cpu"),
        ("deepep_v2", {"dtype": "float16"}, "does not support float16"),
        ("deepep_ll", {"hidden_size": 9000}, "does not support rows of 9000"),
        (
            "deepep_ll",
            {"ubatches": 3},
            "allows 2 dispatches at once, 3 micro-batches need one each",
        ),
    ],
)
def test_what_it_cannot_do(name: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan(offer(name), **changes)


@pytest.mark.usefixtures("installed")
def test_more_experts_per_token_than_there_are_kernels_for() -> None:
    with pytest.raises(
        ConfigError, match="deepep_ll supports at most 11 experts per token, the model has 12"
    ):
        plan(offer("deepep_ll", top_k=12))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "sms", "why"),
    [
        ("deepep_v2", 21, "needs an even number of multiprocessors; parallel.comm_sms is 21"),
        (
            "deepep_ll",
            20,
            "kernels use all multiprocessors, for microseconds at a time; remove parallel.comm_sms",
        ),
    ],
)
def test_numbers_of_multiprocessors_that_cannot_be_kept(name: str, sms: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan(offer(name, comm_sms=sms))


@pytest.mark.parametrize("has", [{}, {"ElasticBuffer": lambda group, num_nvl_bytes=0: None}])
def test_a_package_that_is_too_old(has: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("deep_ep")
    old.__dict__.update(
        has, __version__="1.0.0", __spec__=importlib.util.spec_from_loader("deep_ep", None)
    )
    monkeypatch.setitem(sys.modules, "deep_ep", old)
    with pytest.raises(
        ConfigError, match=r"needs the ElasticBuffer of deep_ep 2\.1 or newer; installed is 1\.0\.0"
    ):
        plan(offer("deepep_v2"))


def test_a_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", fake)
    monkeypatch.setattr("importlib.import_module", broken(importlib.import_module))
    with pytest.raises(ConfigError, match="installed but does not load: Duplicate NCCL runtime"):
        plan(offer("deepep_v2"))


def broken(original: Any) -> Any:
    def import_module(name: str) -> Any:
        if name == "deep_ep":
            raise AssertionError("Duplicate NCCL runtime")
        return original(name)

    return import_module
