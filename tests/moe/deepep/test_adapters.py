"""The adapters over the fake package against `local`: as close as bfloat16 allows, equal where
nothing is added up.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.errors import ConfigError, PeerLost
from moeserve.moe.all2all.base import All2All, Inbound, Layout
from moeserve.moe.all2all.deepep import ADAPTERS
from moeserve.moe.all2all.deepep.ll import DeepEPLowLatency
from moeserve.moe.all2all.deepep.v2 import DeepEPElastic
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.all2all.wire_format import Fp8Wire
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.reference import ReferenceExperts
from moeserve.moe.layer import MoELayer
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.ping_pong import PingPong
from moeserve.moe.placement.placement import Placement
from moeserve.moe.plan import MoENeeds, plan_moe
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import RowContext
from moeserve.ops.pick import pick_ops
from tests.comm.ranks import members_of, together
from tests.moe.contract.test_contract import alone, batch, cases, experts, there_and_back
from tests.moe.deepep import fake
from tests.moe.deepep.ranks import LOCAL, MAX_TOKENS, NAMES, WIDTH, facts, joined, on_all, some
from tests.quantized_checkpoints import dequantized
from tests.runner.fake_cuda import ASKS

WORLDS = [(name, ranks) for name in NAMES for ranks in (2, 3, 4)]
INTERPRETED = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton, interpreted"
)
EVERY_ADAPTER = pytest.mark.parametrize("name", NAMES)


def close(out: Tensor, expected: Tensor, terms: Tensor) -> bool:
    """terms: sum of the magnitudes of all that was added up."""
    near = (out.float() - expected.float()).abs() <= 2**-6 * terms.float()
    special = ~expected.isfinite() | ~terms.isfinite()
    return bool((near | special).all()) and torch.equal(out.isfinite(), expected.isfinite())


def same(out: Tensor, expected: Tensor) -> bool:
    return torch.allclose(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "ranks"), WORLDS)
def test_results_are_those_of_one_rank(name: str, ranks: int) -> None:
    parts = {
        case: [batch(ids, torch.bfloat16, 7 * r) for r, ids in enumerate(by_rank)]
        for case, by_rank in cases(ranks).items()
    }

    def work(rank: int, backend: All2All) -> list[Tensor]:
        return [
            there_and_back(backend, UBatch(), by_rank[rank], rank * LOCAL)
            for by_rank in parts.values()
        ]

    with joined(ADAPTERS[name], ranks) as backends:
        outs_of = on_all(backends, work)
    for rank, outs in enumerate(outs_of):
        for out, (case, by_rank) in zip(outs, parts.items(), strict=True):
            x, routing = by_rank[rank]
            expected = alone(ranks, (x, routing))
            terms = alone(ranks, (x.abs(), routing))
            assert close(out, expected, terms), (case, rank)
            if routing.ids_TK.shape[1] == 1:
                assert same(out, expected), (case, rank)


@pytest.mark.parametrize("name", ["deepep_v2", pytest.param("deepep_ll", marks=INTERPRETED)])
def test_the_fp8_wire(name: str) -> None:
    """The bits of moeserve's own fp8 where it rounds; low latency rounds in its kernels, which may
    differ by one.
    """
    ranks = 2
    parts = [some(17, ranks, seed, width=300, top_k=1) for seed in range(ranks)]
    with joined(ADAPTERS[name], ranks, "fp8_b128", 300) as backends:
        outs = on_all(
            backends, lambda r, backend: there_and_back(backend, UBatch(), parts[r], r * LOCAL)
        )
    for out, (x, routing) in zip(outs, parts, strict=True):
        expected = alone(ranks, (x, routing), "fp8_b128")
        if name == "deepep_ll":
            assert (out.float() - expected.float()).norm() <= 0.02 * expected.float().norm()
        else:
            assert same(out, expected)
        assert not same(out, alone(ranks, (x, routing)))


@pytest.mark.parametrize("wire", ["auto", pytest.param("fp8_b128", marks=INTERPRETED)])
def test_low_latency_asks_the_device_for_nothing(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a graph can record it, rounds included.

    The fake's own kernels may read values.
    """

    def refusing(name: str, asked: Callable[..., Any]) -> Callable[..., Any]:
        def ask(tensor: Tensor, *args: Any) -> Any:
            assert "/moeserve/moe/" not in sys._getframe(1).f_code.co_filename, (
                f"the host waits, by {name}"
            )
            return asked(tensor, *args)

        return ask

    for name in ASKS:
        monkeypatch.setattr(Tensor, name, refusing(name, getattr(Tensor, name)))
    parts = [some(17, 2, seed) for seed in range(2)]

    def work(rank: int, backend: All2All) -> None:
        ubatch, (x, routing) = UBatch(), parts[rank]
        ticket = backend.dispatch(x, routing, ubatch).wait()
        assert isinstance(ticket.inbound.counts_e, Tensor)
        backend.combine(ticket, ticket.inbound.x, torch.empty_like(x), ubatch).wait()
        with pytest.raises(AssertionError, match="the host waits"):
            ticket.inbound.host_counts_e  # noqa: B018

    with joined(DeepEPLowLatency, 2, wire) as backends:
        on_all(backends, work)


def test_rows_of_an_expert_are_ordered_by_rank_and_token() -> None:
    def work(rank: int, backend: All2All) -> list[float]:
        x = (torch.arange(9.0)[:, None] + 16 * rank).expand(-1, WIDTH).bfloat16()
        ticket = backend.dispatch(
            x, Routing(torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1)), UBatch()
        ).wait()
        backend.combine(ticket, ticket.inbound.x, torch.empty_like(x), UBatch()).wait()
        return [float(value) for value in ticket.inbound.x[:, 0]]

    with joined(DeepEPElastic, 2) as backends:
        first, second = on_all(backends, work)
    assert first == [*range(9), *range(16, 25)]
    assert second == []


def two_ubatches(rank: int, backend: All2All, parts: list[Any]) -> list[Tensor]:
    """Five layers in two micro-batches with the order of moe/ubatch.py."""
    outs = [torch.full_like(part[0], torch.nan) for part in parts]
    ping_pong = PingPong(2)
    ubatches = (UBatch(0), UBatch(1))
    for ubatch in ubatches:
        ubatch.couple(ping_pong, ubatches[1 - ubatch.index])

    def run(ubatch: UBatch) -> None:
        x, routing = parts[ubatch.index]

        def layers() -> None:
            for _ in range(5):
                ticket = ubatch.overlap(lambda: backend.dispatch(x, routing, ubatch))
                y = experts(ticket.inbound, rank * LOCAL)
                ubatch.overlap(
                    lambda ticket=ticket, y=y: backend.combine(
                        ticket, y, outs[ubatch.index], ubatch
                    )
                )  # type: ignore[misc]

        ubatch.run_in_turns(layers)

    thread = threading.Thread(target=run, args=(ubatches[1],), daemon=True)
    thread.start()
    run(ubatches[0])
    thread.join(20)
    if ping_pong.error is not None:
        raise ping_pong.error
    return outs


class Trusting(DeepEPLowLatency):
    """Leaves the two-buffer rule to the order of the micro-batches."""

    def _receive_last(self) -> None:
        pass


@pytest.mark.parametrize("adapter", [*ADAPTERS.values(), Trusting])
def test_two_ubatches_take_turns(adapter: Any) -> None:
    parts = [[some(12, 2, 10 * rank), some(7, 2, 10 * rank + 1)] for rank in range(2)]
    with joined(adapter, 2, ubatches=2) as backends:
        outs = on_all(backends, lambda rank, backend: two_ubatches(rank, backend, parts[rank]))
    for rank in range(2):
        for out, (x, routing) in zip(outs[rank], parts[rank], strict=True):
            assert close(out, alone(2, (x, routing)), alone(2, (x.abs(), routing)))


@EVERY_ADAPTER
def test_two_in_flight_in_any_order(name: str) -> None:
    """No receive is launched early, and the waits come in reverse order."""
    parts = [[some(12, 2, 10 * rank), some(7, 2, 10 * rank + 1)] for rank in range(2)]

    def work(rank: int, backend: All2All) -> list[Tensor]:
        ubatches = (UBatch(0), UBatch(1))
        outs = [torch.empty_like(x) for x, _ in parts[rank]]
        sent = [
            backend.dispatch(*part, ubatch)
            for part, ubatch in zip(parts[rank], ubatches, strict=True)
        ]
        tickets = [pending.wait() for pending in reversed(sent)][::-1]
        ys = [experts(ticket.inbound, rank * LOCAL) for ticket in tickets]
        back = [backend.combine(*each) for each in zip(tickets, ys, outs, ubatches, strict=True)]
        return [pending.wait() for pending in reversed(back)][::-1]

    with joined(ADAPTERS[name], 2, ubatches=2) as backends:
        outs = on_all(backends, work)
    for rank in range(2):
        for out, (x, routing) in zip(outs[rank], parts[rank], strict=True):
            assert close(out, alone(2, (x, routing)), alone(2, (x.abs(), routing)))


def in_fp32(inbound: Inbound) -> Inbound:
    """Use fp32, because Triton's interpreter multiplies bf16 wrongly."""
    return replace(inbound, rows=inbound.x.float(), scales=None)


@INTERPRETED
@pytest.mark.parametrize("wire", ["auto", "fp8_b128"])
def test_slots_by_triton_and_by_the_reference(wire: str) -> None:
    """No count comes to the host.

    Bits equal those of the same rows in groups.
    """
    from moeserve.moe.experts.triton import TritonExperts
    from tests.comm.host_memory import interpreting
    from tests.kernels.interpreted import ordered_dots

    width = 64
    ranks = 2
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(ranks * LOCAL, 64, width, generator=generator) / 8
    w2 = torch.randn(ranks * LOCAL, width, 32, generator=generator) / 6
    kernel = TritonExperts()
    reference = ReferenceExperts(pick_ops("cpu", torch.float32))

    def work(rank: int, backend: All2All) -> None:
        ticket = backend.dispatch(*some(9 * rank, ranks, rank, width=width), UBatch()).wait()
        slots = in_fp32(ticket.inbound)
        own = slice(rank * LOCAL, (rank + 1) * LOCAL)
        assert isinstance(slots.counts_e, Tensor)
        assert 0 < int(slots.counts_e.sum()) <= slots.max_rows <= slots.x.shape[:2].numel()
        found = torch.full_like(slots.x, 7)
        expected = torch.full_like(slots.x, 7)
        packed = kernel.pack(ExpertWeights(w13[own], w2[own]))
        with interpreting():
            kernel.run(slots, packed, found)
        reference.run(
            slots, reference.pack(ExpertWeights(w13[own].clone(), w2[own].clone())), expected
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        valid = torch.arange(slots.x.shape[1]) < slots.counts_e[:, None]
        counts_e = slots.host_counts_e
        in_groups = torch.empty(len(slots.x[valid]), width)
        with interpreting():
            kernel.run(
                Inbound(Layout.GROUPED, slots.x[valid], counts_e, counts_e.cumsum()),
                packed,
                in_groups,
            )
        assert torch.equal(found[valid], in_groups)
        assert (found[~valid] == 7).all()

    with ordered_dots(), joined(DeepEPLowLatency, ranks, wire, width=width) as backends:
        on_all(backends, work)


@INTERPRETED
@pytest.mark.parametrize(
    ("name", "width"), [("deepep_ll", 128), ("deepep_ll", 2048), ("deepep_v2", 128)]
)
def test_rows_in_fp8_reach_the_product_as_they_travelled(name: str, width: int) -> None:
    """Through the layer, with experts in blocks of e4m3: the definition of rows and scales, not of
    what a second rounding makes of them."""
    from moeserve.moe.experts.triton import TritonExperts
    from tests.comm.host_memory import interpreting
    from tests.kernels.interpreted import ordered_dots, rounding_to_nearest
    from tests.moe.test_triton_experts import weight
    from tools.gpu.references import quantize_reference, widen

    made = [weight("fp8 in blocks", LOCAL, *size) for size in ((256, width), (width, 128))]
    w13, w2 = (dequantized(part).double() for part in made)

    def defined(x: Tensor, expert: int) -> Tensor:
        gate, up = (x.double() @ w13[expert].T).chunk(2, 1)
        return widen(*quantize_reference(gate * gate.sigmoid() * up)) @ w2[expert].T

    class InTurn(TritonExperts):
        def run(self, inbound: Inbound, weights: Any, out: Tensor) -> None:
            assert inbound.scales is not None
            with interpreting():
                super().run(inbound, weights, out)
            rows = widen(inbound.rows, inbound.scales)
            slotted = inbound.layout is Layout.SLOTTED
            for expert, (count, end) in enumerate(
                zip(inbound.host_counts_e, inbound.ends_e.tolist(), strict=True)
            ):
                at = slice(end - count, end)
                x, y = (part[expert, at] if slotted else part[at] for part in (rows, out))
                expected = defined(x, expert)
                assert (y - expected).norm() <= 1e-2 * expected.norm()
                calls.append(int(count))

    ranks = 2
    kernel = InTurn()
    calls = list[int]()
    with interpreting():
        packed = kernel.pack(ExpertWeights(*made))
    parts = [some(3, ranks, rank, width=width) for rank in range(ranks)]
    to_physical = LogicalToPhysical(Placement.initial(1, ranks * LOCAL, ranks), 0)

    def work(rank: int, backend: All2All) -> Tensor:
        x, routing = parts[rank]
        layer = MoELayer(lambda x, tokens: routing, backend, kernel, packed, to_physical)  # type: ignore[arg-type]
        return layer(x, RowContext(len(x)), UBatch())

    with (
        rounding_to_nearest(),
        ordered_dots(),
        joined(ADAPTERS[name], ranks, "fp8_b128", width) as backends,
    ):
        outs = on_all(backends, work)
    assert sum(calls) == sum(int((routing.ids_TK >= 0).sum()) for _, routing in parts)
    for out, (x, routing) in zip(outs, parts, strict=True):
        decoded = Fp8Wire().decode(Fp8Wire().encode(x), torch.float32, width)
        ids = routing.ids_TK.tolist()
        shares = routing.weights_TK.double()
        terms = [
            [
                share * defined(row[None], e % LOCAL)[0]
                for e, share in zip(own, of, strict=True)
                if e >= 0
            ]
            for row, own, of in zip(decoded, ids, shares, strict=True)
        ]
        expected = torch.stack([sum(own, torch.zeros(width, dtype=torch.float64)) for own in terms])
        assert (out.double() - expected).norm() <= 3e-2 * expected.norm()


@EVERY_ADAPTER
def test_behind_the_plan_with_reference_experts(name: str) -> None:
    """Real SwiGLU experts run on the layout that `plan_moe` chooses: rows or slots."""
    width = 64
    ranks = 2
    generator = torch.Generator().manual_seed(1)
    w13 = (torch.randn(ranks * LOCAL, 64, width, generator=generator) / 8).bfloat16()
    w2 = (torch.randn(ranks * LOCAL, width, 32, generator=generator) / 6).bfloat16()
    kernel = ReferenceExperts(pick_ops("cpu", torch.bfloat16))
    parts = [some(19 * rank, ranks, rank, width=width) for rank in range(ranks)]

    def through(backend: All2All, part: Any, slots: slice) -> Tensor:
        x, routing = part
        ticket = backend.dispatch(x, routing, UBatch()).wait()
        y = torch.empty_like(ticket.inbound.x)
        own = ExpertWeights(w13[slots].clone(), w2[slots].clone())
        kernel.run(ticket.inbound, kernel.pack(own), y)
        return backend.combine(ticket, y, torch.full_like(x, torch.nan), UBatch()).wait()

    needs = MoENeeds(
        hidden_size=width,
        dtype="bfloat16",
        device="cuda",
        max_tokens=MAX_TOKENS,
        world_size=ranks,
        ubatches=2,
    )
    with joined(ADAPTERS[name], ranks, width=width) as backends:
        picked = [plan_moe(needs, [backend], [kernel]).all2all for backend in backends]
        work = [
            lambda r=r: through(picked[r], parts[r], slice(r * LOCAL, (r + 1) * LOCAL))
            for r in range(ranks)
        ]
        outs = together(work)  # type: ignore[arg-type]
    for out, part in zip(outs, parts, strict=True):
        expected = through(LocalAll2All(ranks * LOCAL), part, slice(None))
        assert (out.float() - expected.float()).norm() <= 0.01 * expected.float().norm()


def test_a_width_of_the_kernels_own_is_not_copied() -> None:
    """Slots are what the kernel filled, and the result is written where it is wanted."""
    parts = [some(5, 2, rank, width=2048) for rank in range(2)]

    def work(rank: int, backend: All2All) -> None:
        x, routing = parts[rank]
        made: list[Tensor] = []  # by the kernels
        buffer = backend.buffer  # type: ignore[attr-defined]

        def noted(kernel: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                results = kernel(*args, **options)
                made.append(results[0])
                return results

            return call

        for name in ("low_latency_dispatch", "low_latency_combine"):
            setattr(buffer, name, noted(getattr(buffer, name)))
        ticket = backend.dispatch(x, routing, UBatch()).wait()
        assert ticket.inbound.layout is Layout.SLOTTED
        out = torch.empty_like(x)
        summed = backend.combine(ticket, ticket.inbound.x, out, UBatch()).wait()
        assert [ticket.inbound.x.data_ptr(), summed.data_ptr()] == [
            each.data_ptr() for each in made
        ]
        expected = alone(2, parts[rank])
        assert out.shape == expected.shape
        assert out.isfinite().all()

    with joined(DeepEPLowLatency, 2, width=2048) as backends:
        together([lambda r=r: work(r, backends[r]) for r in range(2)])  # type: ignore[misc]


@EVERY_ADAPTER
def test_a_ticket_serves_once_and_only_its_epoch(name: str) -> None:
    parts = [some(5, 2, rank) for rank in range(2)]

    def work(rank: int, backend: All2All) -> tuple[All2All, Any, Any]:
        ticket = backend.dispatch(*parts[rank], UBatch()).wait()
        out = torch.empty_like(parts[rank][0])
        backend.combine(ticket, ticket.inbound.x, out, UBatch()).wait()
        with pytest.raises(RuntimeError, match="combined already"):
            backend.combine(ticket, ticket.inbound.x, out, UBatch())
        late = backend.dispatch(*parts[rank], UBatch())
        return backend, late, late.wait() if rank == 0 else None

    with joined(ADAPTERS[name], 2) as backends:
        left = on_all(backends, work)
    (first, _, ticket), (second, late, _) = left
    with pytest.raises(PeerLost):
        late.wait()
    with pytest.raises(PeerLost):
        first.combine(ticket, ticket.inbound.x, torch.empty_like(parts[0][0]), UBatch())
    with pytest.raises(PeerLost):
        second.dispatch(*parts[1], UBatch())


@EVERY_ADAPTER
def test_epochs_follow_each_other(name: str) -> None:
    backends = [ADAPTERS[name](fake, facts(4)) for _ in range(4)]
    for epoch, ranks in enumerate((4, 2, 4), 1):
        members = members_of(ranks, epoch=epoch)
        together(
            [lambda b=b, m=m: b.join(m, LOCAL, 1) for b, m in zip(backends, members, strict=False)]
        )  # type: ignore[misc]
        parts = [some(9, ranks, rank) for rank in range(ranks)]
        outs = on_all(
            backends[:ranks],
            lambda r, b, parts=parts: there_and_back(b, UBatch(), parts[r], r * LOCAL),
        )  # type: ignore[misc]
        for out, (x, routing) in zip(outs, parts, strict=True):
            assert close(out, alone(ranks, (x, routing)), alone(ranks, (x.abs(), routing)))
        together([backend.leave for backend in backends])
        assert not fake.utils.comm._storage


def test_a_silent_rank_is_a_lost_peer_and_its_buffer_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Tearing a buffer down takes all ranks; the others may be dead."""
    backends = [DeepEPElastic(fake, facts(2)) for _ in range(2)]
    together(
        [lambda b=b, m=m: b.join(m, LOCAL, 1) for b, m in zip(backends, members_of(2), strict=True)]
    )  # type: ignore[misc]
    buffer = backends[0].buffer
    buffer.exchange.timeout_s = 0.2
    with pytest.raises(PeerLost, match="CPU recv timeout"):
        backends[0].dispatch(*some(5, 2, 0), UBatch())
    backends[1]._mesh.close()  # as its death would
    backends[0].leave()
    assert "its buffer stays allocated until this process ends" in caplog.text
    assert buffer.exchange is not None


@EVERY_ADAPTER
def test_a_rank_that_does_not_come_is_named(name: str) -> None:
    """The next attempt finds the store's port free."""
    backends = [ADAPTERS[name](fake, facts(2)) for _ in range(2)]
    members = members_of(2, deadline_s=0.3)
    with pytest.raises(PeerLost) as caught:
        backends[0].join(members[0], LOCAL, 1)
    assert caught.value.missing == (1,)
    del caught  # its frames hold the store
    gc.collect()
    together(
        [
            lambda b=b, m=m: b.join(replace(m, deadline_s=10.0), LOCAL, 1)
            for b, m in zip(backends, members, strict=True)
        ]
    )  # type: ignore[misc]
    together([backend.leave for backend in backends])


def test_a_buffer_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Any, group: Any) -> Any:
        raise RuntimeError("Assertion error (buffer.hpp:1): num_ranks")

    monkeypatch.setattr(DeepEPElastic, "open", refused)
    backends = [DeepEPElastic(fake, facts(2)) for _ in range(2)]
    calls = [
        lambda b=b, m=m: b.join(m, LOCAL, 1) for b, m in zip(backends, members_of(2), strict=True)
    ]  # type: ignore[misc]
    with pytest.raises(ConfigError, match="deepep_v2 cannot make its buffer: Assertion error"):
        together(calls)


@pytest.mark.parametrize(
    ("name", "ranks", "hosts", "why"),
    [
        ("deepep_v2", 1, None, "deepep_v2 does not support 1 ranks"),
        ("deepep_ll", 9, None, "deepep_ll does not support 9 ranks"),
        (
            "deepep_ll",
            16,
            ("a",) * 9 + ("b",) * 7,
            "needs 8 consecutive ranks on every node",
        ),
    ],
)
def test_groups_that_there_are_no_kernels_for(name: str, ranks: int, hosts: Any, why: str) -> None:
    member = members_of(ranks)[0]
    with pytest.raises(ConfigError, match=why):
        ADAPTERS[name](fake, facts(ranks)).join(
            replace(member, host_of=hosts or member.host_of), LOCAL, 1
        )


def test_widths_and_rounds() -> None:
    def caps(name: str, wire: str = "auto", **changes: Any) -> Any:
        return ADAPTERS[name](fake, facts(2, wire, **changes)).caps

    widths = (24, 2880, 4096, 8000, 9000)
    assert [caps("deepep_v2").pad_hidden(width) for width in widths] == [
        256,
        3072,
        4096,
        8192,
        None,
    ]
    assert [caps("deepep_v2", "fp8_b128").pad_hidden(width) for width in widths] == [
        512,
        3072,
        4096,
        8192,
        None,
    ]
    assert [caps("deepep_ll").pad_hidden(width) for width in widths] == [
        2048,
        3072,
        4096,
        8192,
        None,
    ]
    assert [caps(name, max_tokens=5001).max_tokens for name in NAMES] == [4096, 128]
    assert [caps(name, max_tokens=37).max_tokens for name in NAMES] == [64, 40]
    assert not any(caps(name).exact for name in NAMES)


@pytest.mark.parametrize(
    ("asked", "expected"), [({}, 12), ({"comm_sms": 8}, 8), ({"comm_sms": 40}, 12)]
)
def test_kernels_take_no_more_multiprocessors_than_they_may(
    asked: dict[str, int], expected: int
) -> None:
    """ElasticBuffer knows how many it needs, which may be fewer."""
    x, routing = some(5, 2, 0)
    backends = [DeepEPElastic(fake, facts(2, **asked)) for _ in range(2)]
    together(
        [lambda b=b, m=m: b.join(m, LOCAL, 1) for b, m in zip(backends, members_of(2), strict=True)]
    )  # type: ignore[misc]
    on_all(
        backends,
        lambda rank, backend: there_and_back(backend, UBatch(), (x, routing), rank * LOCAL),
    )
    assert backends[0].buffer.num_sms == expected
    together([backend.leave for backend in backends])
