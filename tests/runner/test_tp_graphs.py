"""Ranks of an engine replay what they recorded, gathers and all: on devices that notice what is too
early or too late, and whether ranks gather different things. NCCL is tests/comm/fake_nccl.py, ranks
are threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.comm.nccl import ABORT_TIMEOUT_S, DeviceMesh
from moeserve.comm.tensor import DeviceTensor, TensorParallel
from moeserve.comm.world import World
from moeserve.config import config_of
from moeserve.errors import PeerLost
from moeserve.kernels.inputs import StepArrays, StepWords
from moeserve.ops.inputs import StepInputs
from moeserve.runner import base, gpu, recorder, triton_inputs
from moeserve.runner.graphs import GroupGraphs
from moeserve.runner.load import Progress
from moeserve.runner.sampling.reference import ReferenceSampler
from moeserve.runner.sampling.sampler import Sampler
from moeserve.runner.tables import Tables, Upload
from tests.comm import fake_nccl
from tests.comm.ranks import members_of, together
from tests.runner.fake_cuda import Devices, FakeTorch, Hazard, refuse_to_wait
from tests.runner.harness import Driver, Request, fake_runner, greedy, spec_of
from tests.runner.test_graphs import Exact, ExactOnCPU, ExactOnFake, assert_same
from tools.gpu.references import step_reference, write_reference

SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 20,
    "kv_cache_bytes": 1 << 16,
}
SPEC = spec_of(windows=(None, None), vocab_size=100)


class Halves(Exact):
    """Each rank attends for all, and keeps half of the columns until they are gathered."""

    def __init__(self, spec: Any, tp: TensorParallel) -> None:
        super().__init__(spec)
        self.tp = tp

    def attend(self, q: Tensor, step: StepInputs, group: int, k: Tensor) -> Tensor:
        whole = super().attend(q, step, group, k)
        return self.tp.gather_columns(whole.chunk(2, 1)[self.tp.rank].contiguous(), 0)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        mine = super().logits(hidden_SD).chunk(2, 1)[self.tp.rank].contiguous()
        return self.tp.gather_columns(mine, 0)


class HalvesOnFake(ExactOnFake):
    def load_model(self, progress: Progress) -> None:
        self.model = Halves(self.spec, self.tp)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    def fill(
        table: Tensor, blocks: Tensor, size: int, step: StepWords, words: Tensor, out: StepArrays
    ) -> None:
        step_reference(table, blocks, size, step, out)

    def reference_sampler(
        vocab: int, tables: Tables, upload: Upload, kernels: str, *, is_async: bool
    ) -> Sampler:
        return ReferenceSampler(vocab, tables, upload)

    both = Devices(2)
    refuse_to_wait(monkeypatch, both)
    fake_nccl.use(monkeypatch, both.here)
    monkeypatch.setattr(base, "make_sampler", reference_sampler)
    for module in (gpu, recorder):
        monkeypatch.setattr(module, "torch", FakeTorch(both))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: both.record_stream(tensor, stream)
    )
    monkeypatch.setattr(triton_inputs, "fill_step", fill)
    monkeypatch.setattr(triton_inputs, "write", write_reference)
    return both


class Engine:
    """Two ranks with the same plans."""

    def __init__(self, devices: Devices, graphs: str, directory: Path) -> None:
        self.devices = devices
        self.drivers = [self.prepared(rank, graphs) for rank in range(2)]
        members = members_of(2, str(directory), tp_size=2, deadline_s=5.0)
        self.each(lambda rank: self.drivers[rank].runner.join(members[rank], None))

    def prepared(self, rank: int, graphs: str) -> Driver:
        world = World(rank, 2, tp_size=2, ranks_on_host=2, host_rank=rank)
        runner = HalvesOnFake(
            config_of(None, graphs=graphs, **SETTINGS), SPEC, Path(os.devnull), world
        )
        with self.devices.on(rank):
            runner.prepare()
        return Driver(runner)

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        def on(rank: int) -> Callable[[], Any]:
            def run() -> Any:
                with self.devices.on(rank):
                    return work(rank)

            return run

        return together([on(0), on(1)])

    def serve(self) -> list[list[Request]]:
        prompts = ([5, 6, 7], list(range(20)), [9])
        requests = [
            [driver.add(Request(list(p), greedy())) for p in prompts] for driver in self.drivers
        ]
        for step in STEPS:
            self.step(requests, step)
        return requests

    def step(self, requests: list[list[Request]], step: Sequence[tuple[int, int]]) -> None:
        self.each(
            lambda rank: self.drivers[rank].run(
                [(requests[rank][index], chunk) for index, chunk in step]
            )
        )


STEPS: list[list[tuple[int, int]]] = [
    [(0, 3), (1, 12)],
    [(2, 1), (1, 8), (0, 1)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 1), (0, 1), (1, 1)],
    [(1, 1)],
    [(1, 1), (0, 1)],
    [(0, 1), (1, 1), (2, 1)],
]


def alone() -> list[Request]:
    driver = Driver(fake_runner(spec=SPEC, cls=ExactOnCPU, **SETTINGS))
    requests = [driver.add(Request(list(p), greedy())) for p in ([5, 6, 7], list(range(20)), [9])]
    for step in STEPS:
        driver.run([(requests[index], chunk) for index, chunk in step])
    return requests


@pytest.mark.parametrize("graphs", ["off", "full", "piecewise", "auto"])
def test_two_ranks_replay_the_bits_of_one(graphs: str, devices: Devices, tmp_path: Path) -> None:
    engine = Engine(devices, graphs, tmp_path)
    expected = alone()
    for requests in engine.serve():
        assert_same(requests, expected)
    shapes = [set(getattr(driver.runner.graphs, "_recordings", ())) for driver in engine.drivers]
    assert shapes[0] == shapes[1]
    assert bool(shapes[0]) == (graphs != "off")
    assert fake_nccl.Group.called, "nothing was gathered"
    began_s = time.monotonic()
    for driver in engine.drivers:
        driver.runner.leave()
    assert time.monotonic() - began_s < ABORT_TIMEOUT_S, "graphs were left, for which NCCL waits"


def test_what_was_recorded_before_ranks_met_is_dropped(devices: Devices, tmp_path: Path) -> None:
    engine = Engine(devices, "full", tmp_path)
    engine.serve()
    (tmp_path / "again").mkdir()
    members = members_of(2, str(tmp_path / "again"), tp_size=2, epoch=2)
    for driver in engine.drivers:
        driver.runner.leave()
        with pytest.raises(PeerLost), devices.on(0):
            driver.runner.tp.gather_columns(torch.ones(1, 1), 0)
    engine.each(lambda rank: engine.drivers[rank].runner.join(members[rank], None))
    assert isinstance(engine.drivers[0].runner.graphs, GroupGraphs)
    assert not engine.drivers[0].runner.graphs._recordings
    for driver in engine.drivers:
        driver.runner.leave()


def asks_the_device(tp: DeviceTensor, mine: Tensor, out: Tensor) -> None:
    mine.sum().item()
    gather(tp, mine, out)


def waits_for_an_event(tp: DeviceTensor, mine: Tensor, out: Tensor) -> None:
    event = recorder.torch.cuda.Event()
    event.record()
    gather(tp, mine, out)
    event.synchronize()


def is_not_waited_for(tp: DeviceTensor, mine: Tensor, out: Tensor) -> None:
    tp._mesh._nccl._allgather_base(out, mine)  # type: ignore[union-attr]


def is_left_behind(tp: DeviceTensor, mine: Tensor, out: Tensor) -> None:
    is_not_waited_for(tp, mine, torch.zeros_like(out))


def runs_elsewhere(tp: DeviceTensor, mine: Tensor, out: Tensor) -> None:
    with recorder.torch.cuda.stream(recorder.torch.cuda.Stream()):
        gather(tp, mine, out)


def differs(tp: DeviceTensor, mine: Tensor, out: Tensor) -> None:
    gather(tp, *((mine, out) if tp.rank else (torch.cat((mine, mine)), torch.cat((out, out)))))


def gather(tp: DeviceTensor, mine: Tensor, out: Tensor) -> None:
    assert isinstance(tp._mesh, DeviceMesh)
    tp._mesh.all_gather(out, mine)()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (asks_the_device, "asks the device while a graph is captured"),
        (waits_for_an_event, "waits for an event while a graph is captured"),
        (is_not_waited_for, "does not wait for what another stream writes"),
        (is_left_behind, "ends before it has waited for all of its streams"),
        (runs_elsewhere, "a stream that is not part of the capture"),
        (differs, r"collective \d+ is .* on one rank and .* on another"),
    ],
)
def test_what_a_capture_forbids_is_noticed(
    wrong: Any, why: str, devices: Devices, tmp_path: Path
) -> None:
    """The stand-in refuses each, and lets the gather as it is pass."""
    members = members_of(2, str(tmp_path), tp_size=2, deadline_s=5.0)

    def work(rank: int) -> Callable[[], None]:
        def run() -> None:
            tp = DeviceTensor(rank, 2)
            x = torch.full((2, 3), float(rank))
            mine = x.view(-1).view(torch.uint8)
            out = torch.zeros(48, dtype=torch.uint8)
            tp.join(members[rank])
            with devices.on(rank):
                for gathers in (gather, wrong):
                    mine.add_(0)
                    recording = recorder.CudaRecorder(torch.device("cpu"), warm=False).record(
                        lambda pause, gathers=gathers: [gathers(tp, mine, out), out + 0][1:]  # type: ignore[misc]
                    )
                    recording.replay()
                    assert (
                        recording.results[0].view(torch.float32).tolist() == [0.0] * 6 + [1.0] * 6
                    )

        return run

    with pytest.raises((Hazard, AssertionError), match=why):
        together([work(0), work(1)])
