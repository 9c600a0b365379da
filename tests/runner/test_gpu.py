"""The runner with the Triton kernels: interpreted where there is no GPU, and what only a GPU can
show.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.comm.world import World
from moeserve.config import config_of
from moeserve.engine.plan import StepResult
from moeserve.messages import Logprobs
from moeserve.moe.all2all.nccl import MAX_SMALL_BYTES, NcclAll2All
from moeserve.runner.base import ModelRunnerBase
from moeserve.runner.gpu import GPUModelRunner
from moeserve.runner.load import Progress
from moeserve.sampling import TokenSampling
from tests.moe.contract.backends import facts_of
from tests.runner.harness import Driver, Request, spec_of
from tests.runner.test_bits import MODELS, PROMPT, SAMPLINGS, RandomWeights, driver_of, random_model
from tests.runner.test_ep_graph_runs import SPEC

HAS_GPU = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


class OnGPU(GPUModelRunner):
    def load_model(self, progress: Progress) -> None:
        self.model = random_model(self)


def answer(driver: Driver, prompt: list[int], num_tokens: int) -> Request:
    request = driver.add(Request(list(prompt), SAMPLINGS["greedy"]))
    driver.generate(request, num_tokens, chunk=9)
    return request


def same_answer(
    cls: type[ModelRunnerBase], model: str, num_tokens: int, **settings: Any
) -> Request:
    """Check that Triton's and torch's kernels give the same greedy tokens and close logits."""
    prompt = PROMPT[:20]
    found = answer(driver_of(model, "float32", cls, **settings), prompt, num_tokens)
    expected = answer(driver_of(model, "float32", kernels="torch"), prompt, num_tokens)
    assert found.output == expected.output
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)
    return found


@pytest.mark.skipif(HAS_GPU, reason="there the kernels are not interpreted")
def test_interpreted() -> None:
    found = same_answer(RandomWeights, "windows", 2, kernels="triton", prefill_chunk=8)
    expert_tokens_LE = found.results[0].expert_tokens_LE
    assert isinstance(expert_tokens_LE, np.ndarray)
    assert expert_tokens_LE.dtype == np.int64
    assert expert_tokens_LE.sum(1).tolist() == [3 * 9] * 2


def logprobs_of(result: StepResult) -> list[Logprobs]:
    return [
        *(row for output in result.outputs.values() for row in output.logprobs),
        *(
            row
            for output in result.outputs.values()
            if output.prompt_logprobs
            for row in output.prompt_logprobs.rows
        ),
    ]


@pytest.mark.full("graphs")
@pytest.mark.skipif(HAS_GPU, reason="there the kernels are not interpreted")
def test_all_that_a_step_answers() -> None:
    """Tokens, their logprobs and the prompt's, and loads, which the device counts, of two requests
    in one step.
    """
    answers = []
    for kernels in ("triton", "torch"):
        driver = driver_of("qwen3_moe", "float32", kernels=kernels)
        asked = TokenSampling(seed=1, max_tokens=9, temperature=0.0, logprobs=3, prompt_logprobs=2)
        one = driver.add(Request(PROMPT[:12], asked))
        other = driver.add(Request(PROMPT[5:9], SAMPLINGS["greedy"]))
        steps = [[(one, 5)], [(one, 5), (other, 3)], [(other, 1), (one, 2)]]
        answers.append([driver.run(rows) for rows in steps])
    for found, expected in zip(*answers, strict=True):
        assert found.tokens_N.tolist() == expected.tokens_N.tolist()
        assert np.array_equal(found.expert_tokens_LE, expected.expert_tokens_LE)
        assert found.outputs.keys() == expected.outputs.keys()
        for ours, theirs in zip(logprobs_of(found), logprobs_of(expected), strict=True):
            assert (ours.ids, ours.rank) == (theirs.ids, theirs.rank)
            assert ours.values == pytest.approx(theirs.values, abs=1e-4)


@pytest.mark.parametrize("dbo", ["off", "auto"])
def test_graphs_of_small_steps_by_nccl_are_in_the_memory_plan(
    dbo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPUModelRunner, "_measure_step", lambda runner: (0, 0))
    config = config_of(None, dbo=dbo, dp=2, kernels="torch")
    runner = OnGPU(
        config, spec_of(**SPEC | {"hidden_size": 2048}), Path(), World(0, 2, ranks_on_host=2)
    )
    runner.device = torch.device("cuda")
    runner.model = SimpleNamespace(why_mixers_not_recordable=None)  # type: ignore[assignment]
    caps = NcclAll2All(facts_of(runner.dtype, hidden_size=2048)).caps
    found = []
    for rows in (0, caps.recorded_rows):
        runner.peers = SimpleNamespace(
            caps=replace(caps, recorded_rows=rows), why_not_recordable=None
        )  # type: ignore[assignment]
        found.append(runner.profile_run())
    each = MAX_SMALL_BYTES * caps.copies
    assert each <= (found[1] - found[0]) / len(runner.ubatches.ubatches) <= 2 * each


@pytest.mark.parametrize("model", [pytest.param(model, marks=gpu) for model in MODELS])
def test_on_a_gpu(model: str) -> None:
    same_answer(OnGPU, model, 8, kernels="triton", determinism="batch")


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=gpu) for dtype in ("float32", "bfloat16")]
)
def test_bits_on_a_gpu(dtype: str) -> None:
    """determinism=batch: alone, in chunks and in company."""
    expected = answer(driver_of("qwen3_moe", dtype, OnGPU, determinism="batch"), PROMPT, 8)
    driver = driver_of("qwen3_moe", dtype, OnGPU, determinism="batch")
    rng = np.random.default_rng(3)
    others = [
        driver.add(Request(rng.integers(0, 200, 60).tolist(), SAMPLINGS["random"]))
        for _ in range(30)
    ]
    needle = driver.add(Request(list(PROMPT), SAMPLINGS["greedy"]))
    while len(needle.output) < 8:
        rows = [
            (needle, int(rng.integers(1, 40))),
            *((one, int(rng.integers(1, 30))) for one in others),
        ]
        driver.run([rows[i] for i in rng.permutation(len(rows)).tolist()])
    assert needle.output[:8] == expected.output
    assert all(map(torch.equal, needle.logits, expected.logits))


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=gpu) for model in ("llama", "qwen3_moe")]
)
def test_no_step_waits_for_the_gpu(model: str) -> None:
    driver = driver_of(model, "bfloat16", OnGPU)
    requests = [driver.add(Request(list(PROMPT), SAMPLINGS["greedy"])) for _ in range(4)]
    for chunk in (1000, 1, 1):  # everything is compiled, every buffer has its size
        driver.run([(one, chunk) for one in requests])
    in_flight: deque[Any] = deque()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            in_flight.append(driver.runner.launch(driver.plan([(one, 1) for one in requests])))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for collect in in_flight:
        assert len(collect().tokens_N) == 4
