"""On real families, a request's tokens and logit bits depend only on the request and the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.blocks.mixer import Mixer
from moeserve.config import config_of
from moeserve.models.build import build_decoder
from moeserve.models.load_plan import load_plan
from moeserve.ops.pick import pick_ops
from moeserve.runner.base import ModelRunnerBase
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.load import Progress
from moeserve.sampling import TokenSampling
from tests.runner.harness import Driver, Request, spec_of

VOCAB = 200  # not a multiple of a vector
PROMPT = np.random.default_rng(5).integers(0, VOCAB, 75).tolist()
NUM_TOKENS = 8
DENSE: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}
MOE: dict[str, Any] = DENSE | {
    "architecture": "Qwen3MoeForCausalLM",
    "qk_norm": "head",
    "num_experts": 8,
    "experts_per_token": 3,
    "expert_size": 32,
    "moe_layers": (True, True),
}
WINDOWED: dict[str, Any] = MOE | {"windows": (None, 24)}
MODELS = {"llama": DENSE, "qwen3_moe": MOE, "windows": WINDOWED}
SAMPLINGS = {
    "greedy": TokenSampling(seed=1, max_tokens=99, temperature=0.0),
    "random": TokenSampling(
        seed=2,
        max_tokens=99,
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
    ),
}


class RandomWeights(CPUModelRunner):
    def load_model(self, progress: Progress) -> None:
        self.model = random_model(self)


def random_model(runner: ModelRunnerBase) -> Any:
    """Return a model with the runner's dtype, kernels and device; weights are always the same."""
    device = runner.config.device
    generator = torch.Generator().manual_seed(0)

    def weights(param: Any) -> torch.Tensor:
        values = torch.randn(param.shape, generator=generator) * 0.15 + ("norm" in param.name)
        return values.to(runner.device, runner.dtype)

    params = {param.name: weights(param) for param in load_plan(runner.spec, ()).params}
    exact = device.exact
    ops = pick_ops(
        runner.device, runner.dtype, device.kernels, obstacle=runner.spec.obstacle, exact=exact
    )
    return build_decoder(runner.spec, params, ops)


def driver_of(
    model: str,
    dtype: str,
    cls: type[ModelRunnerBase] = RandomWeights,
    mixers: Sequence[Mixer] = (),
    **settings: Any,
) -> Driver:
    """mixers: of the layers in front of the model's own."""
    config = config_of(
        None, dtype=dtype, max_num_seqs=65, kv_cache_bytes=1 << 24, block_size=16, **settings
    )
    spec = spec_of(**MODELS[model])
    spec = replace(
        spec, layers=(*(replace(spec.layers[0], mixer=mixer) for mixer in mixers), *spec.layers)
    )
    runner = cls(config, spec, Path())
    runner.prepare()
    return Driver(runner)


@cache
def alone(model: str, dtype: str, sampling: str) -> Request:
    driver = driver_of(model, dtype)
    request = driver.add(Request(list(PROMPT), SAMPLINGS[sampling]))
    driver.generate(request, NUM_TOKENS)
    return request


@dataclass(frozen=True)
class Crowd:
    """Circumstances that must not matter: other requests, tokens per step, steps in flight, blocks
    that others have used before, and being thrown out after that many tokens."""

    others: int
    chunk: int
    depth: int
    used_blocks: bool = False
    preempt_after: int | None = None


CROWDS = [
    Crowd(others=0, chunk=1, depth=1),
    Crowd(others=1, chunk=7, depth=2, used_blocks=True),
    Crowd(others=2, chunk=1000, depth=2, preempt_after=3),
    Crowd(others=13, chunk=64, depth=1, used_blocks=True),
    Crowd(others=63, chunk=7, depth=2, preempt_after=5, used_blocks=True),
]


def in_company(model: str, dtype: str, sampling: str, crowd: Crowd) -> Request:
    rng = np.random.default_rng(crowd.others)
    driver = driver_of(model, dtype)
    samplings = list(SAMPLINGS.values())

    def other() -> Request:
        prompt = rng.integers(0, VOCAB, rng.integers(1, 90)).tolist()
        return driver.add(Request(prompt, samplings[int(rng.integers(2))]))

    if crowd.used_blocks:
        first = [other() for _ in range(5)]
        driver.run([(one, 1000) for one in first])
        for one in first:
            driver.remove(one)
        rng.shuffle(driver.free_blocks)
    others = [other() for _ in range(crowd.others)]
    needle = driver.add(Request(list(PROMPT), SAMPLINGS[sampling]))
    in_flight: deque[tuple[Any, Any, Any]] = deque()

    def update_from_output() -> None:
        chunks, plan, collect = in_flight.popleft()
        driver.update_from_output(chunks, plan, collect())

    preempted = crowd.preempt_after is None
    while len(needle.output) < NUM_TOKENS:
        rows = [(needle, crowd.chunk)]
        rows += [(one, int(rng.integers(1, 40))) for one in others if rng.random() < 0.8]
        order = rng.permutation(len(rows)).tolist()
        chunks = [rows[i] for i in order]
        plan = driver.plan(chunks)
        in_flight.append((chunks, plan, driver.runner.launch(plan)))
        if len(in_flight) == crowd.depth:
            update_from_output()
        if not preempted and len(needle.output) >= (crowd.preempt_after or 0):
            while in_flight:
                update_from_output()
            driver.remove(needle)
            preempted = True
            driver.add(needle)
    while in_flight:
        update_from_output()
    return needle


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("crowd", CROWDS, ids=str)
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("qwen3_moe", "float32"),
        ("qwen3_moe", "bfloat16"),
        ("windows", "float32"),
    ],
)
def test_circumstances_do_not_change_a_bit(
    model: str, dtype: str, crowd: Crowd, sampling: str
) -> None:
    expected = alone(model, dtype, sampling)
    needle = in_company(model, dtype, sampling, crowd)
    assert needle.output[:NUM_TOKENS] == expected.output
    for ours, theirs in zip(needle.logits, expected.logits, strict=False):
        assert torch.equal(ours, theirs)


def test_two_threads_give_the_bits_of_one() -> None:
    expected = alone("qwen3_moe", "float32", "random")
    torch.set_num_threads(2)
    needle = in_company("qwen3_moe", "float32", "random", Crowd(others=1, chunk=1000, depth=2))
    assert needle.output[:NUM_TOKENS] == expected.output
    assert all(map(torch.equal, needle.logits, expected.logits))


def test_different_circumstances_were_really_different() -> None:
    """The comparison above could not fail if all logits were alike."""
    request = alone("qwen3_moe", "float32", "random")
    assert len(set(request.output)) > 3
    assert not torch.equal(request.logits[0], request.logits[1])
    assert request.output != alone("qwen3_moe", "float32", "greedy").output


def test_expert_load_is_reported() -> None:
    driver = driver_of("qwen3_moe", "float32")
    result = driver.run([(driver.add(Request(list(PROMPT), SAMPLINGS["greedy"])), 1000)])
    assert result.expert_tokens_LE is not None
    assert result.expert_tokens_LE.sum(1).tolist() == [3 * len(PROMPT)] * 2
    assert alone("llama", "float32", "greedy").results[0].expert_tokens_LE is None
