"""Rows travel by NCCL inside a recording: on devices that notice what is too early or too late, on
what the host waits, and whether ranks call different collectives. NCCL is tests/comm/fake_nccl.py,
ranks are threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.models.workspace import Inflow, workspace_bytes
from moeserve.moe import streams
from moeserve.moe.all2all import nccl as backends
from moeserve.moe.all2all.base import Inbound
from moeserve.moe.all2all.nccl import MAX_SMALL_BYTES, NcclAll2All
from moeserve.moe.routing import Routing
from moeserve.moe.streams import CudaStream
from moeserve.moe.ubatch import UBatch
from moeserve.ops import native_rows
from moeserve.runner import recorder
from moeserve.runner.recorder import Recording
from tests.comm import fake_nccl
from tests.comm.ranks import members_of, together
from tests.moe.contract.backends import LOCAL, TOP_K, facts_of
from tests.moe.contract.test_contract import Batch, alone, batch, same_bits
from tests.runner.expert_checkpoint import spec_of
from tests.runner.fake_cuda import Devices, FakeTorch, Hazard, refuse_to_wait

ROOM = 6
LAYERS = 2
DTYPE = torch.bfloat16


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    both = Devices(2)
    fake_nccl.use(monkeypatch, both.here)
    refuse_to_wait(monkeypatch, both)
    for module in (streams, recorder):
        monkeypatch.setattr(module, "torch", FakeTorch(both))
    monkeypatch.setattr(backends, "comm_stream", lambda device: CudaStream(torch.device("cuda", 0)))
    monkeypatch.setattr(native_rows, "AVAILABLE", False)  # nobody could watch it
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: both.record_stream(tensor, stream)
    )
    return both


def experts(inbound: Inbound, first: int) -> Tensor:
    """Compute as in the contract without reading from the device; rows beyond the last give NaN."""
    ends_e = torch.as_tensor(inbound.ends_e)
    expert_P = (torch.arange(len(inbound.x))[:, None] >= ends_e).sum(1)
    y = inbound.x * (first + expert_P + 0.5).to(inbound.x.dtype)[:, None]
    return y.masked_fill((expert_P == len(ends_e))[:, None], torch.nan)


class Rank:
    """Two layers over the rows in fixed buffers; the second has the sums of the first as rows."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ubatch = UBatch()
        self.backend = NcclAll2All(facts_of(DTYPE))
        self.x = torch.zeros(ROOM, 24, dtype=DTYPE)
        self.ids = torch.full((ROOM, TOP_K), -1, dtype=torch.int32)
        self.weights = torch.zeros(ROOM, TOP_K)
        self.recording: Recording | None = None

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        self.ubatch.most_tokens = ROOM
        for _ in range(LAYERS):
            ticket = self.backend.dispatch(x, routing, self.ubatch).wait()
            y = experts(ticket.inbound, self.rank * LOCAL)
            x = self.backend.combine(ticket, y, torch.empty_like(x), self.ubatch).wait()
        return x

    def step(self, part: Batch, *, replays: bool) -> Tensor:
        x, routing = part
        if not replays:
            return self.forward(x, routing).clone()
        rows = slice(0, len(x))
        self.ids.fill_(-1)
        for buffer, values in (
            (self.x, x),
            (self.ids, routing.ids_TK),
            (self.weights, routing.weights_TK),
        ):
            buffer[rows].copy_(values)
        if self.recording is None:
            whole = Routing(self.ids, self.weights)
            recording = recorder.CudaRecorder(torch.device("cpu"), warm=False)
            self.recording = recording.record(lambda pause: (self.forward(self.x, whole),))
        self.recording.replay()
        return self.recording.results[0][rows].clone()


def parts_of(step: int) -> list[Batch]:
    """Return up to ROOM tokens for each rank.

    At times a rank has none. Some rows have no expert.
    """
    rng = np.random.default_rng(step)
    found = []
    for rank in range(2):
        tokens = 0 if step == 3 and rank == 1 else int(rng.integers(1, ROOM + 1))
        ids = np.array([rng.permutation(2 * LOCAL)[:TOP_K] for _ in range(tokens)], int).reshape(
            tokens, TOP_K
        )
        found.append(batch(np.where(rng.random(ids.shape) < 0.2, -1, ids), DTYPE, 10 * step + rank))
    return found


def expected(part: Batch) -> Tensor:
    x, routing = part
    for _ in range(LAYERS):
        x = alone(2, (x, routing))
    return x


def serve(
    devices: Devices,
    directory: Path,
    ways: Sequence[tuple[bool, bool]],
    most_recorded: int | None = None,
) -> None:
    members = members_of(2, str(directory), deadline_s=5.0)
    ranks: list[Rank] = [Rank(rank) for rank in range(2)]

    def each(work: Callable[[Rank], Any]) -> list[Any]:
        def on(rank: Rank) -> Callable[[], Any]:
            def run() -> Any:
                with devices.on(rank.rank), torch.inference_mode():
                    return work(rank)

            return run

        return together([on(rank) for rank in ranks])

    def join(rank: Rank) -> None:
        backend = rank.backend
        backend.join(members[rank.rank], LOCAL, 1)
        most = backend.caps.most_recorded if most_recorded is None else most_recorded
        backend.caps = replace(backend.caps, most_recorded=most)

    each(join)
    try:
        for step, replays in enumerate(ways):
            parts = parts_of(step)
            found = each(lambda rank: rank.step(parts[rank.rank], replays=replays[rank.rank]))  # noqa: B023
            assert all(map(same_bits, found, map(expected, parts))), step
        for rank in ranks:
            rank.backend.check()
    finally:
        for rank in ranks:
            rank.recording = None
            rank.backend.leave()


BOTH = (True, True)
LEFT = (True, False)
NONE = (False, False)


def test_ranks_that_replay_and_ranks_that_do_not_give_the_bits_of_one(
    devices: Devices, tmp_path: Path
) -> None:
    serve(devices, tmp_path, [NONE, LEFT, BOTH, LEFT, BOTH, NONE, BOTH])
    assert {called.split(" of ")[0] for called in fake_nccl.Group.called.values()} == {
        "_allgather_base",
        "alltoall_base",
    }
    assert len(fake_nccl.Group.called) == 2 * LAYERS * 7


def test_what_the_largest_small_step_takes_is_in_the_plan(devices: Devices, tmp_path: Path) -> None:
    members = members_of(2, str(tmp_path))
    facts = facts_of(DTYPE, hidden_size=2048, max_tokens=1000)

    def work(rank: int) -> int:
        backend = NcclAll2All(facts)
        ubatch = UBatch()
        with devices.on(rank), torch.inference_mode():
            backend.join(members[rank], LOCAL, 1)
            tokens = ubatch.most_tokens = backend.caps.most_recorded or 0
            x = torch.ones(tokens, 2048, dtype=DTYPE)
            ids_N = torch.arange(tokens * TOP_K, dtype=torch.int32)
            routing = Routing(ids_N.view(tokens, -1) % (2 * LOCAL), torch.ones(tokens, TOP_K))
            out_TD = torch.empty_like(x)
            before = devices.memory_allocated()
            devices.reset_peak_memory_stats(None)
            ticket = backend.dispatch(x, routing, ubatch).wait()
            backend.combine(ticket, ticket.inbound.x * 2, out_TD, ubatch).wait()
            backend.leave()
            return int(devices.max_memory_allocated()) - before

    caps = NcclAll2All(facts).caps
    spec = spec_of(hidden_size=2048, experts_per_token=TOP_K, expert_size=1)
    flow = Inflow(caps.recorded_rows, ubatches=1, copies=caps.copies, moving=0)
    without, planned = (workspace_bytes(spec, 64, 1, 8, DTYPE, 1, each) for each in (None, flow))
    for taken in together([lambda: work(0), lambda: work(1)]):
        assert 4 * MAX_SMALL_BYTES < taken <= planned - without


def test_steps_whose_rows_the_host_counts_cannot_be_recorded(
    devices: Devices, tmp_path: Path
) -> None:
    serve(devices, tmp_path, [NONE, NONE], ROOM - 1)
    (tmp_path / "again").mkdir()
    with pytest.raises(Hazard, match="asks the device while a graph is captured"):
        serve(devices, tmp_path / "again", [BOTH], ROOM - 1)
