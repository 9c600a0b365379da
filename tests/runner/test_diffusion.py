"""Blocks of tokens from masks: answers are those of a plain loop, whatever else the engine does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.blocks.linear import INT64
from moeserve.config import Limits, config_of
from moeserve.engine.blocks import groups_of
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.plan import StepPlan
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import CheckpointError, ConfigError, InvalidRequest
from moeserve.messages import FinishReason, Submit
from moeserve.models.hf_config import read_model_spec
from moeserve.models.workspace import workspace_bytes
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.sampling.diffusion import accepted
from moeserve.sampling import GrammarSpec, TokenSampling
from tests.diffusion import (
    DIFFUSION,
    MASK,
    DiffusionCheckpoint,
    block_logits,
    decode_blocks,
    write_diffusion,
)
from tests.models.conftest import Driver, peak_bytes

MAX_TOKENS = 40
CONTEXT = 192
GROUPS = groups_of((KVRule(),), 16)
LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prefill_chunk=64,
    max_model_len=64,
    block_size=16,
    num_blocks=20,
)


@pytest.fixture(scope="module", params=list(DIFFUSION))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> DiffusionCheckpoint:
    return write_diffusion(request.param, tmp_path_factory.mktemp(request.param))


class Engine:
    """A scheduler and a runner, stepped in one thread."""

    def __init__(self, path: Path, **settings: Any) -> None:
        values = {
            "max_num_seqs": 8,
            "kv_cache_bytes": 1 << 22,
            "threads": 1,
            "max_num_batched_tokens": 64,
            "max_model_len": CONTEXT,
        }
        config = config_of(path, **(values | settings))
        self.runner = CPUModelRunner(config, read_model_spec(path), path)
        limits = self.runner.prepare()
        self.scheduler = Scheduler(limits, self.runner.groups, eos_ids=(), vocab_size=256)
        self.answers: dict[int, list[int]] = {}
        self.finish: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.num_preempted = 0
        self.fails_once = False

    def submit(
        self, rid: int, prompt: list[int], answer: list[int] | None = None, **sampling: Any
    ) -> None:
        values = {"seed": 0, "max_tokens": MAX_TOKENS, "temperature": 0.0, **sampling}
        priority = values.pop("priority", 0)
        self.scheduler.submit(
            Submit(
                rid=rid,
                tokens=np.array(prompt + (answer or []), "<i4").tobytes(),
                num_prompt=len(prompt),
                sampling=TokenSampling(**values),
                priority=priority,
            )
        )
        self.answers[rid] = []

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        assert self.scheduler.plan() is None  # the next plan needs the result
        if self.fails_once:  # as after the loss of another rank, with logits that are wrong
            logits = self.runner.model.logits
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.runner.model, "logits", lambda hidden: -logits(hidden))
                self.runner.execute(plan)
        result = self.runner.execute(plan)
        out = self.scheduler.update_from_output(plan, result)
        self.scheduler.audit()
        for rid, token, finish in zip(
            np.frombuffer(out.rids, "<i8").tolist(),
            np.frombuffer(out.tokens, "<i4").tolist(),
            out.finish,
            strict=True,
        ):
            if token >= 0:
                self.answers[rid].append(token)
            if finish:
                self.finish[rid] = finish
        self.errors |= out.errors
        self.cached |= out.cached
        assert out.record is not None
        self.num_preempted += out.record.num_preempted
        return plan

    def run(self) -> dict[int, list[int]]:
        while self.scheduler.has_work:
            self.step()
        return self.answers

    def answer(self, prompt: list[int], **sampling: Any) -> list[int]:
        rid = len(self.answers)
        self.submit(rid, prompt, **sampling)
        return self.run()[rid]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = [1, 3, 4, 15, 16, 17, 32, 33, 50, 64, 79, 100]
    return [rng.integers(8, 256, length).tolist() for length in lengths[:count]]


def expected(checkpoint: DiffusionCheckpoint, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_tokens": MAX_TOKENS, **options}
    return decode_blocks(checkpoint.reference, prompt, block=checkpoint.block, **options)[0]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_logits_are_those_of_transformers(checkpoint: DiffusionCheckpoint, kernels: Any) -> None:
    ids = np.random.default_rng(3).integers(0, 256, 96).tolist()
    wanted = block_logits(checkpoint.reference, ids, checkpoint.block)
    driver = Driver(checkpoint.path, kernels=kernels)
    whole = driver.prefill("whole", ids)
    assert (whole - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    for chunk in (checkpoint.block, 2 * checkpoint.block):
        assert torch.equal(driver.prefill(chunk, ids, chunk), whole)


def test_answers_are_those_of_a_plain_loop(checkpoint: DiffusionCheckpoint) -> None:
    engine = Engine(checkpoint.path)
    rounds = []
    for prompt in prompts(12):
        wanted, num_rounds = decode_blocks(
            checkpoint.reference, prompt, MAX_TOKENS, checkpoint.block
        )
        assert engine.answer(prompt) == wanted
        rounds += num_rounds
    # Tokens are accepted by the threshold, and as the best ones.
    assert 1 < np.mean(rounds) < checkpoint.block
    assert set(engine.finish.values()) == {FinishReason.LENGTH}


def test_company_chunks_hits_and_preemption_change_nothing(checkpoint: DiffusionCheckpoint) -> None:
    wanted = [expected(checkpoint, prompt) for prompt in prompts(12)]
    block = checkpoint.block
    for settings in (
        {"enable_prefix_caching": False},
        {"prefill_chunk": block, "max_num_batched_tokens": 2 * block},
        {"prefill_chunk": 2 * block + 1},
        {"kernels": "torch"},
        {"max_num_seqs": 3},
    ):
        engine = Engine(checkpoint.path, **settings)
        for rid, prompt in enumerate(prompts(12)):
            engine.submit(rid, prompt)
        assert list(engine.run().values()) == wanted, settings
    # The KV cache holds one request of the longest context, and little more.
    block_bytes = (1 << 22) // engine.runner.limits.num_blocks
    engine = Engine(checkpoint.path, kv_cache_bytes=block_bytes * 16)
    for rid, prompt in enumerate(prompts(12)):
        engine.submit(rid, prompt, priority=-rid % 3)
    assert list(engine.run().values()) == wanted
    assert engine.num_preempted > 0


def test_cache_hits_at_every_border(checkpoint: DiffusionCheckpoint) -> None:
    warm = Engine(checkpoint.path)
    prompt = prompts(12)[-1]
    conversation = prompt + warm.answer(prompt)
    cold = Engine(checkpoint.path, enable_prefix_caching=False)
    for length in range(1, len(conversation), 9):
        turn = [*conversation[:length], 9, 10, 11]
        assert warm.answer(turn) == cold.answer(turn)
        # The last block of the first answer was not computed with its final tokens.
        assert warm.cached[len(warm.answers) - 1] == length // 16 * 16 or length > 128


def test_an_answer_resumes_at_a_border(checkpoint: DiffusionCheckpoint) -> None:
    prompt = prompts(12)[5]
    wanted = expected(checkpoint, prompt)
    engine = Engine(checkpoint.path)
    first = -len(prompt) % checkpoint.block
    for rid, done in enumerate(range(first, MAX_TOKENS, checkpoint.block)):
        if done:
            engine.submit(rid, prompt, wanted[:done])
            assert wanted[:done] + engine.run()[rid] == wanted
    with pytest.raises(InvalidRequest, match="resumes at a multiple of"):
        engine.submit(99, prompt, wanted[: first + 1])


def test_lost_steps_change_nothing(checkpoint: DiffusionCheckpoint) -> None:
    wanted = [expected(checkpoint, prompt) for prompt in prompts(6)]
    engine = Engine(checkpoint.path)
    engine.fails_once = True
    for rid, prompt in enumerate(prompts(6)):
        engine.submit(rid, prompt)
    for _ in range(4):
        engine.step()
    engine.scheduler.plan()
    engine.scheduler.start_over()
    assert list(engine.run().values()) == wanted


def test_stop_tokens_end_an_answer_inside_a_block(checkpoint: DiffusionCheckpoint) -> None:
    engine = Engine(checkpoint.path)
    for prompt in prompts(8):
        stop = expected(checkpoint, prompt)[10]
        wanted = expected(checkpoint, prompt, stops=[stop])
        assert engine.answer(prompt, stop_ids=(stop,)) == wanted
        assert engine.finish[len(engine.answers) - 1] == FinishReason.STOP


def test_masks_of_a_prompt_stay(checkpoint: DiffusionCheckpoint) -> None:
    prompt = [*prompts(6)[5][:14], MASK, 20, MASK, MASK]
    engine = Engine(checkpoint.path)
    answer = engine.answer(prompt)
    assert answer == expected(checkpoint, prompt)
    assert MASK not in answer


def test_an_answer_fills_the_context(checkpoint: DiffusionCheckpoint) -> None:
    engine = Engine(checkpoint.path, max_model_len=101)
    limit = 101 // checkpoint.block * checkpoint.block
    prompt = prompts(12)[-1][: limit - 5]
    assert engine.answer(prompt) == expected(checkpoint, prompt, max_tokens=5)
    assert engine.answer(prompt[:-1]) == expected(checkpoint, prompt[:-1], max_tokens=6)


def test_logits_that_are_not_finite_end_a_request(
    checkpoint: DiffusionCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(checkpoint.path)
    logits = engine.runner.model.logits
    monkeypatch.setattr(engine.runner.model, "logits", lambda hidden: logits(hidden) * torch.nan)
    engine.submit(0, prompts(5)[4])
    assert engine.run() == {0: []}
    assert "not finite" in engine.errors[0]


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"allowed_ids": (1, 2)}, "allowed_token_ids"),
        ({"bad_seqs": ((1, 2),)}, "bad_words"),
        ({"grammar": GrammarSpec("regex", "a*")}, "structured_outputs"),
        ({"processors": (("x", "{}"),)}, "logits_processors"),
        ({"receipt": True}, "receipt"),
    ],
)
def test_parameters_without_a_meaning_are_refused(
    checkpoint: DiffusionCheckpoint, sampling: dict[str, Any], name: str
) -> None:
    limits = replace(LIMITS, diffusion_block=checkpoint.block)
    scheduler = Scheduler(limits, GROUPS, vocab_size=256)
    values = {"seed": 0, "max_tokens": 4, "temperature": 0.0, **sampling}
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported") as refusal:
        scheduler.submit(
            Submit(
                rid=1,
                tokens=np.array([1, 2], "<i4").tobytes(),
                num_prompt=2,
                sampling=TokenSampling(**values),
            )
        )
    assert refusal.value.param == name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculate": "ngram:4"}, "omit speculate=ngram:4"),
        ({"itl_target_ms": 5.0}, "omit itl_target_ms=5.0"),
        ({"block_size": 2}, "block_size=2 must be a multiple of"),
        ({"prefill_chunk": 3}, "prefill_chunk=3 must be at least"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens=7 must be at least"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    checkpoint: DiffusionCheckpoint, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(checkpoint.path, **settings)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_bound_on_memory_holds(checkpoint: DiffusionCheckpoint, kernels: Any) -> None:
    driver = Driver(checkpoint.path, kernels=kernels)
    step = [(key, [5] * 512) for key in range(4)]
    peak = peak_bytes(lambda: driver.step(step))
    # The driver asks for the logits of all tokens, which the bound counts as rows.
    spec = driver.spec
    bound = workspace_bytes(spec, 2048, 2048, 512, torch.float32)
    assert peak <= bound, (peak, bound)
    tables_and_indices = 2048 * 512 * INT64
    few_rows = workspace_bytes(spec, 2048, 4, 512, torch.float32)
    causal = workspace_bytes(replace(spec, diffusion=None), 2048, 4, 512, torch.float32)
    assert few_rows - causal > 0.9 * tables_and_indices


def test_a_context_shorter_than_a_block_is_refused(
    checkpoint: DiffusionCheckpoint, tmp_path: Path
) -> None:
    config = json.loads((checkpoint.path / "config.json").read_text())
    shorter = config | {"max_position_embeddings": checkpoint.block - 1}
    (tmp_path / "config.json").write_text(json.dumps(shorter))
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        read_model_spec(tmp_path)


def test_accepted_masks() -> None:
    confidence = torch.tensor([[0.2, 0.6, 0.9], [0.96, 0.1, 0.97], [0.5, 0.5, 0.1], [0.9] * 3])
    is_masked = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0]]).bool()
    wanted = [[0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert accepted(confidence, is_masked, 0.95).int().tolist() == wanted
