"""No step on CUDA reads a value from the device.

The GPU runner runs interpreted kernels on a device where reading raises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from moeserve.blocks.gated_delta import GatedDelta
from moeserve.blocks.indexer import Indexer
from moeserve.blocks.kda import KimiDelta
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.blocks.lightning import Lightning
from moeserve.blocks.mamba1 import Mamba1
from moeserve.blocks.mamba2 import Mamba2
from moeserve.blocks.mixer import Mixer
from moeserve.blocks.rope import RopeSpec
from moeserve.blocks.short_conv import ShortConv
from moeserve.engine.plan import StepDecision
from moeserve.runner import gpu, recorder
from moeserve.runner.cpu import host_memory
from moeserve.runner.dummy import dummy_plan
from moeserve.runner.gpu import GPUModelRunner, RingUpload
from moeserve.runner.limits import DeviceProperties
from moeserve.runner.load import Progress
from moeserve.sampling import TokenSampling
from tests.runner.fake_cuda import ASKS, FakeCuda, FakeTorch
from tests.runner.harness import Request
from tests.runner.test_bits import driver_of, random_model

MANY_WAYS = (
    TokenSampling(seed=1, max_tokens=9, temperature=0.0),
    TokenSampling(seed=2, max_tokens=9, top_k=9, top_p=0.9, min_p=0.01),
    TokenSampling(seed=3, max_tokens=9, repetition_penalty=1.2, presence_penalty=0.1),
    TokenSampling(seed=4, max_tokens=9, logprobs=2, prompt_logprobs=1),
)

STATES: list[Mixer] = [
    GatedDelta(
        num_k_heads=1,
        num_v_heads=2,
        k_dim=8,
        v_dim=8,
        conv=4,
        inputs_by_head=True,
        gates_by_head=True,
    ),
    KimiDelta(num_heads=1, head_dim=8, conv=4),
    Mamba1(channels=20, state=4, rank=3, conv=4),
    Mamba2(num_heads=2, num_groups=1, state_dim=8, head_dim=8, conv=4, time_limit=(0.1, 9.0)),
    Lightning(num_heads=2, head_dim=8, rope=RopeSpec(), decay=0.5, norm_groups=1),
    ShortConv(channels=64, conv=3),
]
INDEXER = Indexer(num_heads=2, dim=16, top_k=3)
HEADS = {"num_heads": 2, "nope_dim": 8, "rope_dim": 8, "v_dim": 8, "rank": 24, "q_rank": 16}
SELECTS = LatentAttention(**HEADS, rope=RopeSpec(), indexer=INDEXER)  # type: ignore[arg-type]


class Waits(AssertionError):
    """The host waits for the device."""


class OnHere(GPUModelRunner):
    """The device is CPU memory; its streams put nothing in order, which other tests look at."""

    def load_model(self, progress: Progress) -> None:
        self.model = random_model(self)

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cpu")
        self.upload = RingUpload(self.device, 64, pinned=False)
        self.properties = DeviceProperties("here", host_memory, exclusive=False)
        self._copy_stream = gpu.torch.cuda.Stream(self.device)

    def profile_run(self) -> int:
        return 0

    def warm_up(self) -> None: ...


class Guard:
    """While `armed`, asking a tensor for its values fails, but in what stands for the device or
    fills its buffers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.armed = False
        for name in ASKS:
            monkeypatch.setattr(
                torch.Tensor, name, self._refusing(name, getattr(torch.Tensor, name))
            )
        for owner, name in ((GridExecutor, "__call__"), (RingUpload, "__call__")):
            monkeypatch.setattr(owner, name, self._disarmed(getattr(owner, name)))

    def _refusing(self, name: str, asked: Any) -> Any:
        def ask(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.armed:
                raise Waits(name)
            return asked(tensor, *args, **kwargs)

        return ask

    def _disarmed(self, call: Any) -> Any:
        def calls(*args: Any, **kwargs: Any) -> Any:
            armed = self.armed
            self.armed = False
            try:
                return call(*args, **kwargs)
            finally:
                self.armed = armed

        return calls


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    fake = FakeTorch(FakeCuda())
    for module in (gpu, recorder):
        monkeypatch.setattr(module, "torch", fake)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return Guard(monkeypatch)


@pytest.mark.full("graphs", keep=1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there test_gpu.py asks the driver")
@pytest.mark.parametrize(
    ("model", "mixers"),
    [("windows", []), ("llama", []), ("llama", STATES), ("llama", [SELECTS])],
    ids=["windows", "llama", "states", "selects"],
)
def test_no_step_asks_the_device(model: str, mixers: list[Mixer], guard: Guard) -> None:
    driver = driver_of(
        model, "float32", OnHere, mixers, kernels="triton", determinism="batch", graphs="off"
    )
    requests = [
        driver.add(Request([5 + i, 6, 7, 8], sampling)) for i, sampling in enumerate(MANY_WAYS)
    ]
    newcomer = Request([9] * 12, MANY_WAYS[0])
    a, b, c, d = requests
    steps: list[list[tuple[Request, int]]] = [
        [(a, 4)],
        [(b, 3), (c, 4), (d, 2)],
        [(a, 1), (d, 2), (b, 1), (c, 1)],
    ]
    steps += [[(a, 1), (b, 1), (c, 1), (d, 1)], [(newcomer, 12), (a, 1)]]
    for chunks in steps:
        if newcomer is chunks[0][0]:
            driver.add(newcomer)
        plan = driver.plan(chunks)
        guard.armed = True
        collect = driver.runner.launch(plan)
        guard.armed = False
        driver.update_from_output(chunks, plan, collect())
    assert [len(request.output) for request in (*requests, newcomer)] == [4, 2, 3, 2, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there test_gpu.py asks the driver")
def test_a_step_that_only_serves_others_has_a_result(guard: Guard) -> None:
    """Its expert loads, all zero, are on the device as for any step."""
    runner = driver_of(
        "qwen3_moe", "float32", OnHere, kernels="triton", determinism="batch", graphs="off"
    ).runner
    nothing = dummy_plan(len(runner.groups), 0, [])
    guard.armed = True
    collect = runner.launch(replace(nothing, decision=StepDecision(1, most_tokens=(5, 0))))
    guard.armed = False
    result = collect()
    assert not len(result.tokens_N)
    assert result.expert_tokens_LE is not None
    assert not result.expert_tokens_LE.any()


def test_the_guard_notices(guard: Guard) -> None:
    guard.armed = True
    x = torch.ones(2)
    for ask in (
        lambda: x[0].item(),
        lambda: bool(x[0]),
        lambda: x.numpy(),
        lambda: np.asarray(x),
        lambda: x.tolist(),
    ):
        with pytest.raises(Waits):
            ask()
    with pytest.raises(Waits):
        x.cpu()
    guard.armed = False
    assert x.tolist() == [1.0, 1.0]
