"""Properties of `cuda_ipc` beyond the contract: counts on the device, replays, rejections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.comm.symmetric import Symmetric
from moeserve.errors import PeerLost
from moeserve.kernels.exchange import ABORT
from moeserve.moe.all2all.base import All2All, Checked
from moeserve.moe.all2all.cuda_ipc import CudaIpcAll2All
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.triton import TritonExperts
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from moeserve.ops.native import native
from tests.comm.host_memory import HostMemory, HostStream, interpreting
from tests.comm.ranks import members_of
from tests.kernels.interpreted import ordered_dots
from tests.moe.contract.backends import LOCAL, WIDTH, group
from tests.moe.contract.test_contract import alone, batch, cases, same_bits
from tests.warm import Program

pytestmark = [
    pytest.mark.skipif(native() is None, reason="the native module was not built"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # NumPy, which interprets
]


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there the kernels are not interpreted"
)


@pytest.fixture
def _ordered_dots() -> Iterator[None]:
    with ordered_dots():
        yield


def weights_of(local: slice) -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(2 * LOCAL, 32, WIDTH, generator=generator) / 5
    w2 = torch.randn(2 * LOCAL, WIDTH, 16, generator=generator) / 4
    return ExpertWeights(w13[local], w2[local])


def layer(
    backend: All2All, x_TD: Tensor, routing: Routing, local: slice, most_tokens: int
) -> Tensor:
    kernel = TritonExperts()
    ubatch = UBatch()
    ubatch.most_tokens = most_tokens
    ticket = backend.dispatch(x_TD, routing, ubatch).wait()
    y = torch.empty_like(ticket.inbound.x) if ticket.y is None else ticket.y
    with interpreting():
        kernel.run(ticket.inbound, kernel.pack(weights_of(local)), y)
    return backend.combine(ticket, y, torch.full_like(x_TD, torch.nan), ubatch).wait()


@interpreted
@pytest.mark.usefixtures("_ordered_dots")
def test_experts_that_learn_the_counts_from_the_device(tmp_path: Path) -> None:
    """The bits equal those of one rank whose host knows all counts."""
    chosen = {name: cases(2)[name] for name in ("uneven", "none on some", "all to one expert")}
    parts = [
        [batch(ids, torch.float32, r) for r, ids in enumerate(by_rank)]
        for by_rank in chosen.values()
    ]
    most = [max(len(x) for x, _ in by_rank) for by_rank in parts]

    def work(rank: int, backend: All2All) -> list[Tensor]:
        own = slice(rank * LOCAL, (rank + 1) * LOCAL)
        return [
            layer(backend, *by_rank[rank], own, tokens)
            for by_rank, tokens in zip(parts, most, strict=True)
        ]

    with group("cuda_ipc", torch.float32, 2, str(tmp_path)) as ranks_of:
        found = ranks_of.run(work)
    for rank, outs in enumerate(found):
        for out, by_rank in zip(outs, parts, strict=True):
            alone = layer(LocalAll2All(2 * LOCAL), *by_rank[rank], slice(2 * LOCAL), 0)
            assert torch.equal(
                out.nan_to_num().view(torch.int32), alone.nan_to_num().view(torch.int32)
            )


@interpreted
def test_a_recorded_step_can_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the host does between launches matters.

    The same launches get other inputs in the same memory.
    """
    tapes: dict[int, list[tuple[HostStream, Callable[[], object]]]] = {}
    launch = HostStream.launch

    def taped(stream: HostStream, work: Callable[[], Any]) -> Any:
        tapes.setdefault(threading.get_ident(), []).append((stream, work))
        return launch(stream, work)

    monkeypatch.setattr(HostStream, "launch", taped)

    def work(rank: int, backend: All2All) -> list[tuple[Tensor, Tensor, Tensor]]:
        x = torch.zeros(4, WIDTH)
        ids = torch.full((4, 1), -1, dtype=torch.int32)
        out = torch.empty(4, WIDTH)
        routing = Routing(ids, torch.ones(4, 1))
        ubatch = UBatch()
        random = np.random.default_rng(rank)
        ubatch.most_tokens = 4
        ticket = backend.dispatch(x, routing, ubatch).wait()
        backend.combine(ticket, ticket.inbound.x, out, ubatch).wait()
        seen = []
        for _ in range(3):
            x.copy_(torch.from_numpy(random.random((4, WIDTH), np.float32)))
            ids.copy_(torch.from_numpy(random.integers(-1, 2 * LOCAL, (4, 1))))
            (stream, dispatch), (_, combine) = tapes[threading.get_ident()][:2]
            again: Any = launch(stream, dispatch)()
            again.y.copy_(again.inbound.x)
            launch(stream, combine)()
            seen.append((x.clone(), ids.clone(), out.clone()))
        return seen

    with group("cuda_ipc", torch.float32, 2, str(tmp_path)) as ranks_of:
        for seen in ranks_of.run(work):
            for x, ids, out in seen:
                assert torch.equal(out, torch.where(ids < 0, 0.0, x))


@interpreted
def test_who_is_gone_is_named_at_once(tmp_path: Path) -> None:
    """A rank whose device already waits is told too.

    Completed results stay valid.
    """
    part = batch(cases(2)["uneven"][0], torch.float32, 0)

    def work(rank: int, backend: All2All) -> tuple[int, ...]:
        ticket = backend.dispatch(*part, UBatch()).wait()
        backend.combine(ticket, ticket.inbound.x, torch.empty_like(part[0]), UBatch()).wait()
        if rank == 1:
            time.sleep(0.2)
            backend.leave()
            return ()
        assert isinstance(backend, Checked)
        backend.check()
        pending = backend.dispatch(*part, UBatch())
        with pytest.raises(PeerLost, match="ranks that are gone: 1") as caught:
            pending.wait()
        with pytest.raises(PeerLost):
            backend.check()
        return tuple(caught.value.missing)

    with group("cuda_ipc", torch.float32, 2, str(tmp_path)) as ranks_of:
        began = time.monotonic()
        assert ranks_of.run(work)[0] == (1,)
        assert time.monotonic() - began < 10


def test_ranks_in_processes(tmp_path: Path) -> None:
    """With a GPU this tests CUDA IPC, which the interpreter cannot."""
    children = []
    for members in members_of(2, str(tmp_path)):
        told = [msgspec.json.encode(members).decode(), str(tmp_path / f"{members.rank}.pt")]
        children.append(
            Program(
                "import runpy; runpy.run_module('tests.moe.ipc_rank', run_name='__main__')", *told
            )
        )
    try:
        assert [child.wait(50) for child in children] == [0, 0]
    finally:
        for child in children:
            child.__exit__()
    for rank in range(2):
        outs = torch.load(tmp_path / f"{rank}.pt")
        for (case, by_rank), out in zip(cases(2).items(), outs, strict=True):
            assert same_bits(out, alone(2, batch(by_rank[rank], torch.float32, rank))), (case, rank)


@interpreted
def test_ranks_that_do_not_agree_on_the_most_tokens_are_told(tmp_path: Path) -> None:
    """Otherwise they would read each other's rows from the wrong places."""
    part = batch(cases(2)["uneven"][0], torch.float32, 0)

    def work(rank: int, backend: All2All) -> None:
        ubatch = UBatch()
        ubatch.most_tokens = 5 + rank
        with pytest.raises(RuntimeError, match=rf"ranks \[{1 - rank}\] make other calls"):
            backend.dispatch(*part, ubatch).wait()

    with group("cuda_ipc", torch.float32, 2, str(tmp_path)) as ranks_of:
        ranks_of.run(work)


@interpreted
def test_leaving_needs_nothing_of_the_runners_thread(tmp_path: Path) -> None:
    """That thread is in inference mode, so no other thread may write to its tensors."""
    memory = Symmetric(HostMemory())
    with torch.inference_mode():
        (window,) = memory.join(members_of(1, str(tmp_path))[0], 1, 1 << 16, "")
    memory.leave()
    assert window.control[ABORT]
    memory.check()


@interpreted
def test_what_is_refused(tmp_path: Path) -> None:
    x, routing = batch(cases(1)["uneven"][0], torch.float32, 0)
    with group("cuda_ipc", torch.float32, 1, str(tmp_path)) as ranks_of:
        (backend,) = ranks_of.backends
        assert isinstance(backend, CudaIpcAll2All)
        assert backend.caps.pad_hidden(6) is None
        ubatch = UBatch()
        ubatch.most_tokens = 3
        with pytest.raises(ValueError, match=r"\[5, 24\] .* with T <= 3"):
            backend.dispatch(x, routing, ubatch)
        ubatch.most_tokens = 0
        with pytest.raises(ValueError, match=r"float16 .* takes \[T, 24\] torch.float32"):
            backend.dispatch(x.half(), routing, ubatch)
        tickets = [backend.dispatch(x, routing, ubatch).wait() for _ in range(2)]
        with pytest.raises(RuntimeError, match="2 dispatches of micro-batch 0 are in flight"):
            backend.dispatch(x, routing, ubatch)
        backend.combine(tickets[1], tickets[1].inbound.x, torch.empty_like(x), ubatch).wait()
        backend.dispatch(x, routing, ubatch).wait()
