"""Graphs: which step is replayed in which shape, that replays change no bit, and that nothing is
used too early or too late."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.blocks.gated_delta import GatedDelta
from moeserve.blocks.indexer import Indexer
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.blocks.mamba1 import Mamba1
from moeserve.blocks.mixer import Mixer
from moeserve.blocks.rope import RopeSpec
from moeserve.config import Limits, config_of
from moeserve.kernels.inputs import StepArrays, StepWords
from moeserve.loader.load_plan import LINEAR_KINDS
from moeserve.models.build import build_decoder
from moeserve.models.load_plan import load_plan
from moeserve.models.spec import ModelSpec
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import LayerCache, StepInputs
from moeserve.ops.pick import pick_ops
from moeserve.ops.quantized import quantization_of
from moeserve.runner import base, gpu, recorder, triton_inputs
from moeserve.runner.cpu import CPUModelRunner, host_memory
from moeserve.runner.gpu import GPUModelRunner, RingUpload
from moeserve.runner.graphs import GraphManager, Mode, sizes_of, sizes_up_to
from moeserve.runner.limits import DeviceProperties
from moeserve.runner.load import Progress
from moeserve.runner.sampling.reference import ReferenceSampler
from moeserve.runner.sampling.sampler import Sampler
from moeserve.runner.tables import Tables, Upload
from moeserve.sampling import TokenSampling
from tests.runner.fake_cuda import FakeCuda, FakeTorch, Hazard
from tests.runner.harness import Driver, Request, fake_runner, greedy, spec_of
from tools.gpu.references import step_reference, write_reference

VOCAB = 50
SPEC: dict[str, Any] = {
    "architecture": "Qwen2MoeForCausalLM",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_size": 16,
    "shared_expert_size": 16,
    "moe_layers": (True, False),
    "windows": (None, 12),
    "max_position": 64,
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "kv_cache_bytes": 1 << 20,
}


OnHere: Any = GPUModelRunner if torch.cuda.is_available() else CPUModelRunner


class ByTriton(OnHere):  # type: ignore[misc]
    """CUDA's graphs where there is a GPU, else the stand-in with interpreted kernels. Token 0,
    which padding is, makes everything NaN that it reaches, and so does the null block. The first
    layer's weights are int8."""

    def load_model(self, progress: Progress) -> None:
        generator = torch.Generator().manual_seed(0)
        params: dict[str, Any] = {
            param.name: (
                torch.randn(param.shape, generator=generator) * 0.2 + ("norm" in param.name)
            ).to(self.device)
            for param in load_plan(self.spec, ()).params
        }
        params["embed"][0] = torch.nan
        for name in params:
            if name.startswith("layers.0.") and name.rpartition(".")[2] in LINEAR_KINDS:
                params[name], rounding = quantization_of(params[name], "int8", name)
                for job in rounding:
                    job()
        self.model = build_decoder(
            self.spec, params, pick_ops(self.device, self.dtype, "triton", exact=True)
        )

    def warm_up(self) -> None:
        for cache in self.kv.layers:
            cache[0][0] = torch.nan
            cache[1][0] = torch.nan


def by_triton(graphs: str, spec: ModelSpec | None = None) -> Driver:
    runner = ByTriton(config_of(None, graphs=graphs, **SETTINGS), spec or spec_of(**SPEC), Path())
    runner.prepare()
    return Driver(runner)


def serve(driver: Driver) -> list[Request]:
    """Requests that come and go, alone and together, decoding and in chunks."""
    rng = np.random.default_rng(3)
    never = {"logit_bias": {0: -100.0}}
    sampling = TokenSampling(seed=2, max_tokens=99, temperature=0.9, top_k=20, **never)
    a, b, c, d = requests = [
        Request(rng.integers(1, VOCAB, n).tolist(), sampling if n % 2 else greedy(**never))
        for n in (9, 3, 12, 1)
    ]
    driver.add(a)
    driver.run([(a, 7)])
    driver.add(b)
    driver.run([(b, 3), (a, 5)])
    driver.run([(a, 1), (b, 1)])
    driver.add(c)
    driver.add(d)
    driver.run([(c, 10), (a, 1), (d, 1), (b, 1)])
    driver.remove(b)
    driver.run([(c, 3), (d, 1), (a, 1)])
    driver.run([(d, 1), (c, 1), (a, 1)])
    driver.run([(c, 1)])
    return requests


def assert_same(requests: Sequence[Request], others: Sequence[Request]) -> None:
    for request, other in zip(requests, others, strict=True):
        assert request.output == other.output
        assert 0 not in request.output
        for logits, expected in zip(request.logits, other.logits, strict=True):
            assert torch.equal(logits, expected)
        for result, expected in zip(request.results, other.results, strict=True):
            np.testing.assert_array_equal(result.expert_tokens_LE, expected.expert_tokens_LE)


@pytest.fixture(scope="module")
def eager() -> list[Request]:
    return serve(by_triton("off"))


@pytest.mark.full("graphs", keep=1)
@pytest.mark.parametrize("graphs", ["full", "piecewise"])
def test_replays_change_no_bit(
    graphs: str, eager: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size is recorded when it is met: the first steps of a size are its recording's warm-up,
    too.
    """
    monkeypatch.setattr(GraphManager, "capture", lambda manager: None)
    driver = by_triton(graphs)
    assert_same(serve(driver), eager)
    sizes = {"full": {1, 2, 4}, "piecewise": {1, 2, 4, 8, 16}}[graphs]
    assert {descriptor.num_tokens for descriptor in driver.runner.graphs._recordings} == sizes


HEADS = {"num_heads": 2, "nope_dim": 8, "rope_dim": 8, "v_dim": 8, "rank": 24, "q_rank": 16}
SELECTS = LatentAttention(**HEADS, rope=RopeSpec(), indexer=Indexer(num_heads=2, dim=16, top_k=6))  # type: ignore[arg-type]


def serve_tiles(driver: Driver) -> list[Request]:
    """Requests that cross a tile's border in a chunk, between two, and decoding."""
    rng = np.random.default_rng(3)
    a, b, c = requests = [
        Request(rng.integers(1, VOCAB, n).tolist(), greedy(logit_bias={0: -100.0}))
        for n in (31, 16, 3)
    ]
    for request in requests:
        driver.add(request)
    for chunks in (
        [(a, 14)],
        [(a, 3), (b, 11)],
        [(b, 5), (c, 3)],
        [(a, 14)],
        [(a, 1), (b, 1), (c, 1)],
        [(b, 1), (a, 1)],
    ):
        driver.run(chunks)
    return requests


@pytest.mark.full("graphs")
@pytest.mark.parametrize("graphs", ["full", "piecewise"])
@pytest.mark.parametrize(
    "mixer",
    [
        GatedDelta(
            num_k_heads=1,
            num_v_heads=2,
            k_dim=8,
            v_dim=8,
            conv=4,
            inputs_by_head=True,
            gates_by_head=True,
        ),
        Mamba1(channels=20, state=4, rank=3, conv=4),
        SELECTS,
    ],
    ids=["gated_delta", "mamba1", "selects"],
)
def test_replays_of_other_layers(
    mixer: Mixer, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels find a step's tiles and its queries' rows on the device, and padding leaves no state.

    In a recorded step every query selects; in others only those that see more than 6 tokens.
    """
    monkeypatch.setattr(GraphManager, "capture", lambda manager: None)
    attention, other = spec_of(**SPEC).layers
    spec = replace(spec_of(**SPEC), layers=(attention, replace(other, mixer=mixer)))
    driver = by_triton(graphs, spec)
    assert_same(serve_tiles(driver), serve_tiles(by_triton("off", spec)))
    sizes = {"full": {2, 4}, "piecewise": {2, 4, 8, 16}}[graphs]
    assert {descriptor.num_tokens for descriptor in driver.runner.graphs._recordings} == sizes


LIMITS = Limits(
    max_num_seqs=300,
    max_num_batched_tokens=2048,
    prefill_chunk=2048,
    max_model_len=64,
    block_size=16,
    num_blocks=9,
)


class Nothing:
    """A recorder of empty recordings, with inputs that are not read."""

    def __init__(self) -> None:
        self.largest_first: list[int] = []

    def record(self, work: recorder.Work) -> recorder.Recording:
        return recorder.Recording(work(lambda aside: None), lambda: None)

    def largest(self, tokens: int, rows: int | None) -> Any:
        self.largest_first.append(tokens)
        return StepInputs(*[None] * 7)  # type: ignore[arg-type]


def manager_of(asked: str, limits: Limits = LIMITS) -> tuple[GraphManager, Nothing]:
    nothing = Nothing()
    manager = GraphManager(
        lambda step, decision, split_at: torch.zeros(1, 1),
        nothing,
        nothing,
        [UBatch()],
        sizes_of(asked, limits),  # type: ignore[arg-type]
    )
    return manager, nothing


def test_every_step_gets_the_smallest_shape_that_holds_it() -> None:
    sizes = sizes_up_to(512)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-2:] == (496, 512)
    assert sizes_up_to(20) == (1, 2, 4, 8, 16, 20)
    assert sizes_up_to(1) == (1,)
    both, full, piecewise = (manager_of(asked)[0] for asked in ("auto", "full", "piecewise"))
    for tokens in range(1, 600):
        fits = min((size for size in sizes if size >= tokens), default=None)
        fits_full = min((size for size in sizes_up_to(300) if size >= tokens), default=None)
        for uniform in (1, tokens, None):
            here = tokens, uniform
            alone = full.dispatch(*here)
            if uniform == 1 and fits_full:
                assert alone == both.dispatch(*here)
                assert alone is not None
                assert (alone.mode, alone.num_tokens, alone.num_reqs) == (
                    Mode.FULL,
                    fits_full,
                    fits_full,
                )
            else:
                assert alone is None
                assert both.dispatch(*here) == piecewise.dispatch(*here)
            cut = piecewise.dispatch(*here)
            if fits:
                assert cut is not None
                assert (cut.mode, cut.num_tokens, cut.num_reqs) == (Mode.PIECEWISE, fits, None)
            else:
                assert cut is None


def test_common_sizes_are_recorded_at_start_and_the_largest_first() -> None:
    manager, nothing = manager_of("auto")
    manager.capture()
    asked = nothing.largest_first[::2]
    powers = [256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert asked == [300, *powers, 512, *powers]


class Exact:
    """Sums of whole numbers by torch, which the fake device sees: attention adds up what the cache
    has of a context.

    Nothing of a step may be read from the host but its rows' bounds, and nothing asked of the
    device."""

    why_not_recordable = None
    moe_layers = ()

    def __init__(self, spec: ModelSpec) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.randint(1, 9, (spec.vocab_size, 4), generator=generator).float()
        self.head = torch.randn(97, spec.vocab_size, generator=generator)

    def forward(self, step: StepInputs, kv: Sequence[LayerCache], ubatch: UBatch) -> Tensor:
        x = self.embed.index_select(0, step.ids_T) + step.positions.text_T[:, None]
        is_live = (
            torch.ones(len(x)) if step.live is None else (torch.arange(len(x)) < step.live).float()
        )
        for index, cache in enumerate(kv):
            group = step.groups[index % len(step.groups)]
            cache[0].view(-1, 2).index_copy_(0, group.slot_mapping_T, x[:, :2])
            ubatch.record_layer_load((x[:, :2] % 2 * is_live[:, None]).sum(0).int())
            q = x.view(len(x), 2, 2)
            x = x + self.attend(q, step, index % len(step.groups), cache[0]) % 13
        return x

    def attend(self, q: Tensor, step: StepInputs, group: int, k: Tensor) -> Tensor:
        def plan(now: StepInputs) -> tuple[Tensor, Tensor]:
            counts_R = np.diff(now.offsets_R1)
            rows_T = torch.tensor(np.repeat(np.arange(len(counts_R)), counts_R))
            starts_R, offsets_R1 = now.rows_on_device
            sees_T = torch.arange(len(rows_T)) - offsets_R1[rows_T] + starts_R[rows_T]
            return now.groups[group].blocks_RN[rows_T].long(), sees_T

        def attend(q: Tensor, plan: tuple[Tensor, Tensor], out: Tensor) -> None:
            blocks_TN, sees_T = plan
            context_TL = k[blocks_TN].flatten(1)[:, ::2]
            is_seen_TL = torch.arange(context_TL.shape[1])[None] <= sees_T[:, None]
            out.zero_()
            out[: len(sees_T)] = (
                q.flatten(1)[: len(sees_T)] + torch.where(is_seen_TL, context_TL, 0).sum(1)[:, None]
            )

        if step.graph_break is not None:
            make_plan = partial(self.planned, step, group, plan)
            return step.graph_break(q, make_plan, attend, q[0].numel())
        out = torch.empty_like(q).flatten(1)
        attend(q, plan(step), out)
        return out

    def planned(
        self, recorded: StepInputs, group: int, plan: Callable[[StepInputs], Any], now: StepInputs
    ) -> Any:
        assert now is not recorded
        return plan(now)

    def serve(self, ubatch: UBatch) -> None: ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return self.head.index_select(0, hidden_SD.sum(1).long() % 97)


class ExactOnCPU(CPUModelRunner):
    def load_model(self, progress: Progress) -> None:
        self.model = Exact(self.spec)

    def profile_run(self) -> int:
        return 0


class ExactOnFake(GPUModelRunner):
    load_model = ExactOnCPU.load_model
    profile_run = ExactOnCPU.profile_run

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cpu")
        self.upload = RingUpload(self.device, 64, pinned=False)
        self.properties = DeviceProperties("fake", host_memory, exclusive=False)
        self._copy_stream = gpu.torch.cuda.Stream(self.device)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The device is CPU memory; kernels that it would not see run as their references."""

    def fill(
        table: Tensor, blocks: Tensor, size: int, step: StepWords, words: Tensor, out: StepArrays
    ) -> None:
        assert torch.equal(words, torch.from_numpy(step.words))
        step_reference(table, blocks, size, step, out)

    def reference_sampler(
        vocab: int, tables: Tables, upload: Upload, kernels: str, *, is_async: bool
    ) -> Sampler:
        return ReferenceSampler(vocab, tables, upload)

    monkeypatch.setattr(base, "make_sampler", reference_sampler)
    fake = FakeCuda()
    for module in (gpu, recorder):
        monkeypatch.setattr(module, "torch", FakeTorch(fake))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: fake.record_stream(tensor, stream)
    )
    monkeypatch.setattr(triton_inputs, "fill_step", fill)
    monkeypatch.setattr(triton_inputs, "write", write_reference)
    with fake.watching():
        yield fake


def serve_ahead(driver: Driver) -> list[Request]:
    """Two steps are in flight at a time."""
    a, b, c = requests = [
        driver.add(Request(prompt, greedy())) for prompt in ([5, 6, 7], list(range(20)), [9])
    ]
    in_flight: list[Any] = []
    steps: list[list[tuple[Request, int]]] = [[(a, 3), (b, 12)], [(c, 1), (b, 8), (a, 1)]]
    steps += [
        [(a, 1), (b, 1), (c, 1)],
        [(c, 1), (a, 1), (b, 1)],
        [(b, 1)],
        [(b, 1), (a, 1)],
        [(a, 1), (b, 1), (c, 1)],
    ]
    for chunks in steps:
        plan = driver.plan(chunks)
        in_flight.append((chunks, plan, driver.runner.launch(plan)))
        if len(in_flight) == 2:
            chunks, plan, collect = in_flight.pop(0)
            driver.update_from_output(chunks, plan, collect())
    driver.update_from_output(*in_flight[0][:2], in_flight[0][2]())
    return requests


@pytest.mark.parametrize("graphs", ["full", "piecewise", "auto"])
def test_on_a_device_that_notices_what_is_too_early_or_too_late(
    graphs: str, cuda: FakeCuda
) -> None:
    settings = {
        "spec": spec_of(windows=(None, None)),
        "block_size": 16,
        "max_num_batched_tokens": 20,
    }
    expected = serve_ahead(Driver(fake_runner(cls=ExactOnCPU, **settings)))
    driver = Driver(fake_runner(cls=ExactOnFake, graphs=graphs, **settings))
    assert_same(serve_ahead(driver), expected)
    assert len(driver.runner.graphs._recordings) >= 4


def test_the_fake_device_notices_each_of_them(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(2)
    recording = recorder.CudaRecorder(torch.device("cpu")).record(lambda pause: (x * 2,))
    (y,) = recording.results
    assert y.isnan().all()  # recorded, not computed
    recording.replay()
    other = cuda.Stream()
    written = cuda.Event()
    copied = cuda.Event()
    with cuda.stream(other):
        with pytest.raises(Hazard, match="does not wait for what another stream writes"):
            y.clone()
        other.wait_stream(cuda.default)
        x.add_(1)
        written.record()
    with pytest.raises(Hazard, match=r"mul.* does not wait"):
        recording.replay()
    cuda.current_stream().wait_event(written)
    recording.replay()
    written.record()
    other.wait_event(written)
    with cuda.stream(other):
        assert torch.equal(y.clone(), torch.full((2,), 4.0))
        copied.record()
    with pytest.raises(Hazard, match=r"copy.* overwrites what another stream may still read"):
        recording.replay()
    cuda.current_stream().wait_event(copied)
    recording.replay()
    with pytest.raises(Hazard, match="asks the device"):
        recorder.CudaRecorder(torch.device("cpu")).record(
            lambda pause: (x * (1 if cuda.tape is None else x[0].item()),)
        )
    assert cuda.tape is None


def test_what_is_dropped_can_be_recorded_again(cuda: FakeCuda) -> None:
    """This happens after every change of the placement or the group."""
    settings = {"spec": spec_of(windows=(None, None)), "block_size": 16, "cls": ExactOnFake}
    driver = Driver(fake_runner(graphs="auto", **settings))
    manager = driver.runner.graphs
    assert isinstance(manager, GraphManager)
    manager._recordings.clear()
    gc.collect()
    assert serve_ahead(driver)
    assert manager._recordings


def test_the_largest_step_is_run_to_measure_it(cuda: FakeCuda) -> None:
    class Measured(ExactOnFake):
        profile_run = GPUModelRunner.profile_run

    runner = Measured(
        config_of(None, **SETTINGS), spec_of(vocab_size=5000, max_position=64), Path()
    )
    runner.load(lambda phase, percent: None)
    runs: list[int] = []
    allocate = runner.initialize_kv_cache

    def allocate_and_watch() -> None:
        allocate()
        runner.sampling.on_logits = lambda plan, logits_SV: runs.append(int(plan.counts_R.sum()))

    runner.initialize_kv_cache = allocate_and_watch  # type: ignore[method-assign]
    step_bytes, table_bytes = runner._measure_step()
    assert runs == [1, SETTINGS["max_num_batched_tokens"]]
    logits = SETTINGS["max_num_seqs"] * 5000 * 4
    assert logits < step_bytes < 9 * logits
    assert table_bytes > 0
    assert not {"limits", "kv", "tables", "sampling", "tasks", "fixed_inputs"} & set(vars(runner))
    runner.allocate(runner.resolve(1 << 20), lambda phase, percent: None)
    assert serve_ahead(Driver(runner))


def test_a_missing_wait_in_the_runner_is_noticed(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"spec": spec_of(), "block_size": 16, "cls": ExactOnFake, "graphs": "full"}
    monkeypatch.setattr(cuda.Stream, "wait_event", lambda stream, event: None)
    with pytest.raises(Hazard):
        fake_runner(**settings)


@pytest.mark.parametrize("change", [{}, {"why_not_recordable": "rows are counted on the host"}])
def test_where_graphs_cannot_be_steps_run_without(
    change: dict[str, Any],
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(Exact, name, value)
    settings = {"spec": spec_of(), "block_size": 16, "cls": ExactOnFake}
    with caplog.at_level("INFO"):
        runner = fake_runner(graphs="auto" if change else "off", **settings)
    assert runner.graphs is None
    why = change.get("why_not_recordable", "graphs: off")
    assert caplog.text.count(f"all steps run without graphs: {why}") == 1
