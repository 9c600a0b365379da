"""Every check of the contract works: adapters that are wrong on purpose fail or differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.deepep import ADAPTERS, base, ll, v2
from moeserve.moe.ubatch import UBatch
from tests.comm.ranks import members_of, together
from tests.moe.contract.test_contract import alone, there_and_back
from tests.moe.deepep import fake
from tests.moe.deepep.fake import elastic as fake_elastic
from tests.moe.deepep.ranks import LOCAL, facts, on_all, some
from tests.moe.deepep.test_adapters import close

Patch = Callable[[pytest.MonkeyPatch], None]
WRONG = "^wrong results$"

MUTATIONS: dict[str, tuple[str, Patch, str]] = {}


def mutation(name: str, why: str) -> Callable[[Patch], Patch]:
    def keep(patch: Patch) -> Patch:
        MUTATIONS[f"{name}: {patch.__name__}"] = (name, patch, why)
        return patch

    return keep


def streams(
    module: Any, patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]
) -> None:
    original = module._after

    def changed(event: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = original(event)
        change(arguments)
        return arguments

    patch.setattr(module, "_after", changed)


@mutation("deepep_ll", "topk_idx must be int64")
def ids_as_the_router_has_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(base.DeepEP, "ids_of", lambda self, routing: routing.ids_TK)


@mutation("deepep_v2", WRONG)
def local_ids_in(patch: pytest.MonkeyPatch) -> None:
    original = base.DeepEP.ids_of
    patch.setattr(base.DeepEP, "ids_of", lambda self, r: original(self, r).remainder(LOCAL))


@mutation("deepep_v2", WRONG)
def padding_taken_for_an_expert(patch: pytest.MonkeyPatch) -> None:
    original = base.DeepEP.ids_of
    patch.setattr(base.DeepEP, "ids_of", lambda self, r: original(self, r).clamp(min=0))


@mutation("deepep_v2", WRONG)
def weights_left_to_v2(patch: pytest.MonkeyPatch) -> None:
    original = v2.Ticket
    patch.setattr(
        v2,
        "Ticket",
        lambda inbound, routing, private: original(
            inbound, routing, (*private[:2], torch.ones_like(private[2]))
        ),
    )


@mutation("deepep_ll", WRONG)
def weights_applied_twice(patch: pytest.MonkeyPatch) -> None:
    original = ll.pad_width
    patch.setattr(ll, "pad_width", lambda x, width: original(x * 0.5 if x.dim() == 3 else x, width))


@mutation("deepep_v2", WRONG)
def no_wait_for_the_event_of_v2(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fake.EventOverlap, "current_stream_wait", lambda self: None)


@mutation("deepep_v2", "raw EventHandle")
def a_wrapped_event(patch: pytest.MonkeyPatch) -> None:
    streams(
        v2,
        patch,
        lambda arguments: arguments.update(previous_event=fake.EventOverlap(fake.EventHandle())),
    )


@mutation("deepep_v2", "previous_event needs allocate_on_comm_stream")
def memory_of_the_caller_s_stream(patch: pytest.MonkeyPatch) -> None:
    streams(v2, patch, lambda arguments: arguments.update(allocate_on_comm_stream=False))


@mutation("deepep_v2", "event with asynchronous operations only")
def an_event_of_a_synchronous_call(patch: pytest.MonkeyPatch) -> None:
    streams(v2, patch, lambda arguments: arguments.update(async_with_compute_stream=False))


@mutation("deepep_ll", "a send wipes the counters")
def no_hook(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ll._Operation, "launch_receive", lambda self: None)


@mutation("deepep_ll", "a hook is called once")
def a_hook_for_every_launch(patch: pytest.MonkeyPatch) -> None:
    def launch_receive(self: Any) -> None:
        self.hook()

    patch.setattr(ll._Operation, "launch_receive", launch_receive)


@mutation("deepep_ll", "no kernels for rows of 24")
def a_width_without_kernels(patch: pytest.MonkeyPatch) -> None:
    narrow(ll.DeepEPLowLatency, patch)


def narrow(adapter: Any, patch: pytest.MonkeyPatch) -> None:
    original = adapter.open

    def narrowed(self: Any, group: Any) -> Any:
        buffer = original(self, group)
        self.width = self.facts.hidden_size
        return buffer

    patch.setattr(adapter, "open", narrowed)


@mutation("deepep_ll", "RDMA bytes, .* are needed")
def a_buffer_for_fewer_experts(patch: pytest.MonkeyPatch) -> None:
    opened_with(ll.DeepEPLowLatency, patch, num_experts=2)


@mutation("deepep_v2", "the buffer is too small")
def a_buffer_for_few_tokens(patch: pytest.MonkeyPatch) -> None:
    opened_with(v2.DeepEPElastic, patch, max_tokens=1)
    patch.setattr(fake_elastic, "ALIGNMENT", 512)


@mutation("deepep_ll", "not for low latency")
def a_buffer_of_the_other_mode(patch: pytest.MonkeyPatch) -> None:
    original = ll.DeepEPLowLatency.open

    def other(self: Any, group: Any) -> Any:
        buffer = original(self, group)
        buffer.low_latency_mode = False
        return buffer

    patch.setattr(ll.DeepEPLowLatency, "open", other)


@mutation("deepep_ll", "queue pair per local expert")
def too_few_queue_pairs(patch: pytest.MonkeyPatch) -> None:
    opened_with(ll.DeepEPLowLatency, patch, num_local=LOCAL - 1)


@mutation("deepep_v2", "sends a dummy")
def no_row_of_a_rank_without_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(v2, "_at_least_one_row", lambda *rows: rows)


def opened_with(adapter: Any, patch: pytest.MonkeyPatch, **facts: Any) -> None:
    """The buffer is made for something else than is sent."""
    original = adapter.open

    def wrongly(self: Any, group: Any) -> Any:
        right = {name: getattr(self, name) for name in facts}
        self.__dict__.update(facts)
        buffer = original(self, group)
        self.__dict__.update(right)
        return buffer

    patch.setattr(adapter, "open", wrongly)


def run(name: str, tokens: tuple[int, int] = (13, 8)) -> list[bool]:
    """Return whether both ranks got the right results."""
    backends: list[Any] = [ADAPTERS[name](fake, facts(2)) for _ in range(2)]
    together(
        [lambda b=b, m=m: b.join(m, LOCAL, 1) for b, m in zip(backends, members_of(2), strict=True)]
    )  # type: ignore[misc]
    parts = [some(count, 2, seed) for seed, count in enumerate(tokens)]
    meshes, buffers = ([getattr(b, part) for b in backends] for part in ("_mesh", "_buffer"))
    first: list[Exception] = []

    def work(rank: int, backend: All2All) -> Any:
        try:
            return there_and_back(backend, UBatch(), parts[rank], rank * LOCAL)
        except Exception as error:
            first.append(error)
            buffers[rank].exchange.abort()  # the other one waits in vain
            return None

    try:
        outs = on_all(backends, work)
        if first:
            raise first[0]
    finally:
        together([mesh.close for mesh in meshes])
    wanted = [(alone(2, part), alone(2, (part[0].abs(), part[1]))) for part in parts]
    return [close(out, *each) for out, each in zip(outs, wanted, strict=True)]


@pytest.mark.parametrize("name", ADAPTERS)
def test_unchanged_adapters_are_right(name: str) -> None:
    assert all(run(name))
    assert all(run(name, (9, 0)))


@pytest.mark.parametrize("which", MUTATIONS)
def test_a_wrong_adapter_fails(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, patch, why = MUTATIONS[which]
    patch(monkeypatch)
    try:
        outcome = "right results" if all(run(name)) and all(run(name, (9, 0))) else "wrong results"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    assert re.search(why, outcome), outcome
