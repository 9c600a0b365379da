"""Two micro-batches that compute on one stream while rows travel on another: on a device that
notices what no event puts in order, and memory that is given away too early."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.comm.gloo import ON_DEVICE
from moeserve.engine.plan import StepDecision
from moeserve.errors import PeerLost
from moeserve.moe import streams
from moeserve.moe.all2all.base import Inbound, Layout, Ticket
from moeserve.moe.all2all.layout import group_rows_plainly, weighted_sum_plainly
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.all2all.nccl import NcclAll2All
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.layer import MoELayer
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.placement.placement import Placement
from moeserve.moe.routing import Routing
from moeserve.moe.streams import InFlightTransfer, comm_stream
from moeserve.moe.ubatch import UBatch
from moeserve.ops import native_rows
from moeserve.ops.inputs import LayerCache, Positions, RowContext, StepInputs
from moeserve.runner import dbo, recorder
from moeserve.runner.ubatches import Meter, UBatchRunner
from tests.comm.ranks import members_of
from tests.moe.contract.backends import facts_of
from tests.runner.fake_cuda import FakeCuda, FakeTorch, Hazard
from tests.runner.harness import Driver, Request, fake_runner, greedy

LAYERS = 3
EXPERTS = 4
TOP_K = 2
WIDTH = 8
STARTS, OFFSETS = np.array([0, 4, 0], np.int32), np.array([0, 5, 6, 12], np.int32)


class Travelling(LocalAll2All):
    """Copies sorted rows on the communication stream, in both directions."""

    caps = replace(LocalAll2All.caps, name="travelling")

    def __init__(self) -> None:
        super().__init__(EXPERTS)
        self.comm = comm_stream("cuda")

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> _Pending:  # type: ignore[override]
        rows = group_rows_plainly(routing.ids_TK, EXPERTS)
        sorted_PD = x_TD.index_select(0, rows.order_P // TOP_K)
        launched = self.comm.launch(lambda: sorted_PD.clone())
        ends_e = rows.counts_e.cumsum()
        return _Pending(
            launched,
            lambda x: Ticket(Inbound(Layout.GROUPED, x, rows.counts_e, ends_e), routing, rows),
        )

    def combine(self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch) -> _Pending:  # type: ignore[override]
        ticket.use()
        home_PD = torch.empty_like(y)
        launched = self.comm.launch(lambda: home_PD.copy_(y))
        return _Pending(
            launched, lambda y: weighted_sum_plainly(y, ticket.private, ticket.routing, out_TD)
        )


@dataclass
class _Pending:
    join: Callable[[], Tensor]
    then: Callable[[Tensor], Any]
    arrived_ns = ON_DEVICE

    def launch_receive(self) -> None: ...

    def wait(self) -> Any:
        return self.then(self.join())


class Scaled:
    """Experts of one number each, in two products."""

    def run(self, inbound: Inbound, weights: Tensor, out: Tensor) -> None:
        half = inbound.x * 0.5
        for expert, end in enumerate(inbound.ends_e.tolist()):
            rows = slice(end - int(inbound.counts_e[expert]), end)
            out[rows] = half[rows] * weights[expert]


class Model:
    """Each layer writes a row per token and adds what all tokens before have written, then its
    experts.
    """

    def __init__(self, cuda: FakeCuda, backend: Any) -> None:
        self.cuda = cuda
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.randn(50, WIDTH, generator=generator).to(cuda.device)
        self.gate = torch.randn(WIDTH, EXPERTS, generator=generator).to(cuda.device)
        slots = LogicalToPhysical(Placement.initial(1, EXPERTS, 1), 0, cuda.device)
        scale = torch.randn(EXPERTS, generator=generator).to(cuda.device)
        self.layers = [
            MoELayer(self.route, backend, Scaled(), scale, slots, shared=lambda x, context: x * 0.1)  # type: ignore[arg-type]
            for _ in range(LAYERS)
        ]

    def route(self, x_TD: Tensor, num_tokens: int | Tensor) -> Routing:
        weights_TK, ids_TK = (x_TD[:, :, None] * self.gate).sum(1).topk(TOP_K)
        return Routing(ids_TK.int(), weights_TK)

    def forward(self, step: StepInputs, kv: Sequence[LayerCache], ubatch: UBatch) -> Tensor:
        with self.cuda.watching():
            x = self.embed.index_select(0, step.ids_T)
            for layer, cache in zip(self.layers, kv, strict=True):
                cache[0].index_copy_(0, step.positions.text_T, x)
                seen_TC = (
                    torch.arange(len(cache[0]), device=x.device) <= step.positions.text_T[:, None]
                )
                x = x + (seen_TC[:, :, None] * cache[0]).sum(1)
                x = x + layer(x, RowContext(len(x)), ubatch)
            return x

    def serve(self, ubatch: UBatch) -> None: ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return hidden_SD


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    for module in (streams, recorder):
        monkeypatch.setattr(module, "torch", FakeTorch(fake))
    monkeypatch.setattr(native_rows, "AVAILABLE", False)  # nobody could watch it
    streams._cuda_stream.cache_clear()
    with fake.watching():
        yield fake
    streams._cuda_stream.cache_clear()


def facts() -> BackendFacts:
    shape = {"hidden_size": WIDTH, "top_k": TOP_K, "max_tokens": 12, "experts_per_rank": EXPERTS}
    return facts_of(torch.float32, 1, **shape)


def by_nccl() -> NcclAll2All:
    """Its rows go from this rank to itself."""
    backend = NcclAll2All(facts())
    backend.join(members_of(1)[0], EXPERTS, 2)
    return backend


def run(
    cuda: FakeCuda, split_at: int | None, backend_of: Callable[[], Any] = Travelling
) -> tuple[list[Tensor], list[Meter]]:
    """Three steps on a stream that is not a thread's first one, in one micro-batch or in two."""
    ids, positions = (torch.arange(12).to(cuda.device) * factor % 50 for factor in (3, 1))
    on_device = torch.from_numpy(STARTS), torch.from_numpy(OFFSETS)
    step = StepInputs(
        ids, Positions.of_text(positions), (), torch.tensor([4, 5, 11]), OFFSETS, STARTS, on_device
    )
    model = Model(cuda, backend_of())
    runner = UBatchRunner(1 if split_at is None else 2)
    runner.take_transfers = comm_stream("cuda").take_transfers
    decision = None if split_at is None else StepDecision(0, 2, (split_at, 12 - split_at))
    outs = []
    meters = []
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    try:
        with cuda.stream(stream), torch.inference_mode():
            for _ in range(3):
                kv = [(torch.zeros(12, WIDTH, device=cuda.device),) for _ in range(LAYERS)]
                outs.append(runner.forward(model, step, split_at or 0, decision, kv))
                meters.append(runner.take_meter())
            done = cuda.Event()
            done.record()
            done.synchronize()
    finally:
        runner.close()
    return outs, meters


@pytest.mark.parametrize("backend", [Travelling, by_nccl])
@pytest.mark.parametrize("split_at", [1, 5, 6, 11])
def test_two_ubatches_on_two_streams_give_the_bits_of_one(
    split_at: int, backend: Any, cuda: FakeCuda
) -> None:
    expected, _ = run(cuda, None)
    found, _ = run(cuda, split_at, backend)
    assert all(map(torch.equal, found, expected))
    assert not expected[0].isnan().any()


def recorded(cuda: FakeCuda) -> tuple[Tensor, Tensor]:
    """Return the result of two micro-batches, and that of a replayed recording of both."""
    ids = torch.arange(12) * 3 % 50
    on_device = torch.from_numpy(STARTS), torch.from_numpy(OFFSETS)
    step = StepInputs(
        ids,
        Positions.of_text(torch.arange(12)),
        (),
        torch.tensor([4, 5, 11]),
        OFFSETS,
        STARTS,
        on_device,
    )
    model = Model(cuda, Travelling())
    runner = UBatchRunner(2)
    decision = StepDecision(0, 2, (6, 6))
    runner.take_transfers = comm_stream("cuda").take_transfers
    kv = [(torch.zeros(12, WIDTH),) for _ in range(LAYERS)]
    try:
        with torch.inference_mode():
            expected = runner.forward(model, step, 6, decision, kv).clone()
            assert runner.take_meter().transfers
            recording = recorder.CudaRecorder(torch.device("cpu"), warm=False).record(
                lambda pause: (runner.forward(model, step, 6, decision, kv),)
            )
            assert recording.results[0].isnan().all()
            for (cache,) in kv:
                cache.zero_()
            recording.replay()
            assert not runner.take_meter().transfers, "what `--dbo auto` must do without"
            return expected, recording.results[0].clone()
    finally:
        runner.close()


def test_two_ubatches_are_recorded_as_they_are(cuda: FakeCuda) -> None:
    assert torch.equal(*recorded(cuda))


def begins_too_early(cuda: FakeCuda, patch: pytest.MonkeyPatch) -> None:
    comm = streams._cuda_stream(0)._stream
    original = cuda.Stream.wait_event
    patch.setattr(
        cuda.Stream, "wait_event", lambda s, event: None if s is comm else original(s, event)
    )


def is_not_waited_for(cuda: FakeCuda, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlightTransfer, "join", lambda transfer: None)


def keeps_nothing(cuda: FakeCuda, patch: pytest.MonkeyPatch) -> None:
    original = InFlightTransfer.__init__
    patch.setattr(InFlightTransfer, "__init__", lambda transfer, work=None: original(transfer))


def computes_elsewhere(cuda: FakeCuda, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dbo, "share_stream", lambda: contextlib.nullcontext)


@pytest.mark.parametrize("backend", [Travelling, by_nccl])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (begins_too_early, "does not wait for what another stream writes"),
        (is_not_waited_for, "does not wait for what another stream writes"),
        (keeps_nothing, "freed that another stream may still use"),
        (computes_elsewhere, "does not wait for what another stream writes"),
    ],
)
def test_whatever_is_left_out_is_noticed(
    wrong: Any, why: str, backend: Any, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(cuda, monkeypatch)
    with pytest.raises(Hazard, match=why):
        run(cuda, 6, backend)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (begins_too_early, "is not part of the capture"),
        (is_not_waited_for, "does not wait for what another stream writes"),
        (computes_elsewhere, "is not part of the capture"),
    ],
)
def test_whatever_is_left_out_of_a_recording_is_noticed(
    wrong: Any, why: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchored = recorder.CudaRecorder(torch.device("cpu"))
    monkeypatch.setattr(recorder, "CudaRecorder", lambda device, *, warm: anchored)
    anchored._warm = False
    before = UBatchRunner.forward
    calls: list[int] = []

    def forward(runner: UBatchRunner, *step: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2:  # the first one is not recorded
            wrong(cuda, monkeypatch)
        return before(runner, *step)

    monkeypatch.setattr(UBatchRunner, "forward", forward)
    with pytest.raises(Hazard, match=why):
        recorded(cuda)


def test_rows_travel_while_the_other_ubatch_computes(cuda: FakeCuda) -> None:
    """The device's own times: an operation takes 1 ms, and a transfer about as long as a
    micro-batch's part of a layer."""
    streams._cuda_stream(0)._stream.pace_ms = 10.0  # type: ignore[attr-defined]
    found = []
    for split_at in (None, 6):
        _, meters = run(cuda, split_at)
        assert [(meter.comm_us, meter.exposed_us) for meter in meters] == [(0, 0)] * 3, (
            "the host cannot tell"
        )
        assert [len(meter.transfers) for meter in meters] == [
            2 * LAYERS * (1 if split_at is None else 2)
        ] * 3
        found.append(meters[1].times_us())
    (one_us, exposed_us), (_, hidden_us) = found
    assert one_us > exposed_us > 0.8 * one_us, "all but what the shared expert hides"
    assert hidden_us < 0.5 * exposed_us


def test_a_transfer_that_nobody_waits_for_keeps_what_it_uses(cuda: FakeCuda) -> None:
    """This happens in a step that fails.

    Memory is kept until the device is past the transfer, and no longer.
    """
    comm = comm_stream("cuda")
    with pytest.raises(ZeroDivisionError):
        comm.launch(lambda: torch.ones(3).div_(2) / (1 // 0))
    comm.launch((torch.ones(3) * 2).clone)
    assert comm.take_transfers() == []
    torch.ones(3)  # would be given x's memory
    over = cuda.Event()
    with cuda.stream(streams._cuda_stream(0)._stream):  # type: ignore[arg-type]
        over.record()
    over.synchronize()
    assert len(streams._cuda_stream(0)._transfers) == 2
    assert comm.take_transfers() == []
    assert not streams._cuda_stream(0)._transfers


def test_a_transfer_of_others_is_timed_by_the_wait_for_it(cuda: FakeCuda) -> None:
    comm = comm_stream("cuda")
    theirs = cuda.Stream()
    over = cuda.Event()
    theirs.pace_ms = 7.0
    transfer = comm.watch()
    with cuda.stream(theirs):
        torch.ones(1)
        over.record()
    torch.ones(1)
    with transfer:
        cuda.current_stream().wait_event(over)
    (taken,) = comm.take_transfers()
    over.record()
    over.synchronize()
    assert taken.times_us == (7000, 6000)


def test_on_a_cpu_all_is_done_at_once() -> None:
    comm = comm_stream("cpu")
    assert comm.launch(lambda: 5)() == 5
    with comm.watch():
        assert comm.take_transfers() == []
    assert streams.share_stream() is contextlib.nullcontext


def test_no_result_is_believed_before_its_transfers_are_checked() -> None:
    """A lost rank's rows may hold anything, because the host has not waited for them."""
    driver = Driver(fake_runner())
    checked: list[bool] = []

    class Broken(NcclAll2All):
        def check(self) -> None:
            checked.append(True)
            raise PeerLost("NCCL gave up on a rank")

    request = driver.add(Request([3, 4, 5], greedy()))
    driver.run([(request, 2)])
    driver.runner.peers.transports_to_check = (Broken(facts()),)
    collect = driver.runner.launch(driver.plan([(request, 1)]))
    assert not checked
    with pytest.raises(PeerLost, match="gave up"):
        collect()


class RealCuda:
    """A GPU as `run` uses it."""

    device = "cuda"
    Event = torch.cuda.Event
    Stream = torch.cuda.Stream
    stream, current_stream = (
        staticmethod(torch.cuda.stream),
        staticmethod(torch.cuda.current_stream),
    )
    watching = staticmethod(contextlib.nullcontext)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", [Travelling, by_nccl])
def test_on_a_gpu(backend: Any) -> None:
    cuda: Any = RealCuda()
    expected, _ = run(cuda, None)
    found, meters = run(cuda, 6, backend)
    for one, other in zip(
        found, expected, strict=True
    ):  # torch's own sums depend on the number of rows there
        torch.testing.assert_close(one, other)
    assert all(
        exposed_us <= took_us for took_us, exposed_us in (meter.times_us() for meter in meters)
    )
    assert min(meter.times_us()[0] for meter in meters) > 0
