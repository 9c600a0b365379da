"""Drafts, right and wrong ones, change no token and no bit of a logprob: real models under the real
scheduler.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.config import config_of
from moeserve.engine.plan import I32, NewRequest, StepPlan, StepResult
from moeserve.engine.scheduler import Scheduler
from moeserve.messages import FinishReason, Logprobs, Submit
from moeserve.models.hf_config import read_model_spec
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.speculation.base import LookupProposer, count_accepted
from moeserve.runner.tables import host_upload
from moeserve.sampling import TokenSampling
from tests.checkpoints import Checkpoint

# One of each kind of cache and mixer.
FEW = (
    "llama",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v32",
    "llama4_text",
    "qwen3_next",
    "kimi_linear",
    "granite_moe_hybrid",
    "jamba",
    "lfm2_moe",
    "bailing_moe_linear_v2",
    "glm5_next",
    "qwen4_exp_text",
)
EOS = 7
NUM_DRAFTS = 4


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: str = ""


class Knowing(LookupProposer):
    """Knows the right answers, and errs in a quarter of its guesses."""

    def __init__(
        self, slots: int, answers: dict[tuple[int, ...], list[int]], vocab_size: int
    ) -> None:
        super().__init__(slots, NUM_DRAFTS, host_upload)
        self.answers = answers
        self.vocab_size = vocab_size
        self.rng = random.Random(1)
        self.known: dict[int, list[int]] = {}
        self.prompt: dict[int, tuple[int, ...]] = {}

    def add(self, request: NewRequest) -> None:
        tokens = request.tokens.tolist()
        self.prompt[request.slot] = (*tokens[: request.num_prompt], request.sampling.seed)
        self.known[request.slot] = tokens[request.num_prompt :]

    def guess(self, slot: int, tokens: I32) -> Sequence[int]:
        known = self.known[slot]
        known += tokens.tolist()
        right = self.answers[self.prompt[slot]]
        drafts = right[len(known) :][: self.rng.randint(0, NUM_DRAFTS)]
        return [
            t if self.rng.random() < 0.75 else self.rng.randrange(self.vocab_size) for t in drafts
        ]


def runner_of(path: Path, **settings: Any) -> CPUModelRunner:
    values = {
        "max_num_seqs": 5,
        "kv_cache_bytes": 1 << 23,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
    }
    runner = CPUModelRunner(config_of(path, **(values | settings)), read_model_spec(path), path)
    runner.prepare()
    return runner


def serve(
    runner: Any, submits: Sequence[Submit], num_blocks: int | None = None
) -> tuple[list[Answer], int, int]:
    """Run all requests, two steps deep.

    Returns the answers, and how many drafts were verified and accepted.
    """
    limits = runner.limits
    scheduler = Scheduler(limits, runner.groups, eos_ids=(EOS,), vocab_size=runner.spec.vocab_size)
    answers = {msg.rid: Answer() for msg in submits}
    verified = right = 0
    for msg in submits:
        scheduler.submit(msg)
    in_flight: deque[tuple[StepPlan, StepResult]] = deque()
    rng = random.Random(2)
    while scheduler.has_work or in_flight:
        if rng.random() < 0.02 and not in_flight:
            scheduler.start_over()
        plan = scheduler.plan() if len(in_flight) < 2 else None
        if plan is not None:
            in_flight.append((plan, runner.execute(plan)))
            continue
        output = scheduler.update_from_output(*in_flight.popleft())
        assert output.record is not None
        verified = verified + sum(output.record.num_drafts)
        right = right + sum(output.record.num_accepted)
        rids = np.frombuffer(output.rids, "<i8").tolist()
        tokens = np.frombuffer(output.tokens, "<i4").tolist()
        assert all(kept <= min(num, rids.count(rid)) for rid, (num, kept) in output.drafts.items())
        for rid, token, finish in zip(rids, tokens, output.finish, strict=True):
            answer = answers[rid]
            assert not answer.finish
            answer.finish = FinishReason.NAMES[finish]
            answer.tokens.append(token)
            if rid in output.logprobs:
                answer.logprobs.append(output.logprobs[rid].pop(0))
        scheduler.audit()
    return list(answers.values()), verified, right


def submits_of(vocab_size: int, count: int) -> list[Submit]:
    """Make requests with all sampling parameters that affect tokens; prompts share prefixes."""
    rng = np.random.default_rng(3)
    stem = rng.integers(20, vocab_size, 70)
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "logprobs": 0, "stop_ids": (EOS, 30, 31)},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 2},
        {
            "temperature": 1.0,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.5,
        },
        {"temperature": 1.2, "stop_ids": tuple(range(20)), "min_tokens": 12, "prompt_logprobs": 1},
        {
            "temperature": 0.9,
            "logit_bias": {9: 3.0, 10: -5.0},
            "bad_seqs": ((9,), (11, 12), (50,)),
            "logprobs": 1,
        },
        {"temperature": 1.0, "allowed_ids": tuple(range(20, 60)), "speculate": False},
    ]
    submits = []
    for rid in range(count):
        prompt = np.concatenate(
            (stem[: rng.integers(0, 71)], rng.integers(20, vocab_size, rng.integers(1, 9)))
        )
        values = {"seed": rid, "max_tokens": int(rng.integers(1, 50)), "stop_ids": (EOS,)}
        values |= samplings[rid % len(samplings)]
        values["max_tokens"] = max(values["max_tokens"], values.get("min_tokens", 0) + 1)
        tokens = prompt.astype("<i4").tobytes()
        submits.append(
            Submit(rid=rid, tokens=tokens, num_prompt=len(prompt), sampling=TokenSampling(**values))
        )
    return submits


def knowing(
    runner: CPUModelRunner, submits: Sequence[Submit], answers: Sequence[Answer]
) -> Knowing:
    known = {
        (*np.frombuffer(msg.tokens, "<i4").tolist(), msg.sampling.seed): answer.tokens
        for msg, answer in zip(submits, answers, strict=True)
    }
    return Knowing(runner.limits.max_num_seqs, known, runner.spec.vocab_size)


def speculate(runner: Any, proposer: Any) -> None:
    """Make the runner verify this proposer's drafts."""
    runner.proposer = proposer
    runner.limits = replace(runner.limits, num_drafts=proposer.num_drafts)


@pytest.mark.parametrize("family", FEW)
def test_drafts_change_nothing(make_checkpoint: Callable[..., Checkpoint], family: str) -> None:
    path = make_checkpoint(family).path
    plain = runner_of(path)
    other = runner_of(path)
    submits = submits_of(plain.spec.vocab_size, 14)
    expected, *none = serve(plain, submits)
    assert none == [0, 0]
    speculate(other, knowing(other, submits, expected))
    found, verified, right = serve(other, submits)
    assert found == expected
    assert verified > right > verified // 3


@pytest.mark.parametrize(
    "settings", [{"kv_cache_bytes": 320_000}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 8}]
)
def test_short_of_room(
    make_checkpoint: Callable[..., Checkpoint], settings: dict[str, Any]
) -> None:
    path = make_checkpoint("qwen3_moe").path
    plain = runner_of(path)
    other = runner_of(path, **settings)
    submits = submits_of(plain.spec.vocab_size, 20)
    expected, *_ = serve(plain, submits)
    speculate(other, knowing(other, submits, expected))
    assert serve(other, submits)[0] == expected


def test_a_failure_behind_a_right_draft_comes_at_its_place(
    make_checkpoint: Callable[..., Checkpoint],
) -> None:
    """A request whose tenth token fails keeps its first nine, with and without drafts."""
    path = make_checkpoint("llama").path

    def broken(runner: Any) -> Any:
        def hook(plan: StepPlan, logits_NV: torch.Tensor) -> None:
            ends = plan.starts_R + plan.counts_R
            drafts = np.zeros_like(ends) if plan.num_drafts_R is None else plan.num_drafts_R
            row = 0
            for end, k, samples in zip(
                ends.tolist(), drafts.tolist(), plan.samples_R.tolist(), strict=True
            ):
                for at in range(end - k, end + 1) if samples else ():
                    if at == 5 + 9:
                        logits_NV[row] = float("nan")
                    row += 1

        runner.sampling.on_logits = hook
        return runner

    tokens = np.arange(30, 35, dtype="<i4").tobytes()
    submits = [
        Submit(
            rid=rid,
            tokens=tokens,
            num_prompt=5,
            sampling=TokenSampling(seed=rid, max_tokens=30, temperature=1.0),
        )
        for rid in range(3)
    ]
    whole, *_ = serve(runner_of(path), submits)
    expected, *_ = serve(broken(runner_of(path)), submits)
    assert [answer.finish for answer in expected] == ["error"] * 3
    assert [answer.tokens for answer in expected] == [[*answer.tokens[:9], -1] for answer in whole]
    other = broken(runner_of(path))
    speculate(other, knowing(other, submits, whole))
    found, verified, _ = serve(other, submits)
    assert found == expected
    assert verified


def test_accepted_tokens_are_counted() -> None:
    right = torch.tensor([True, False, True, True, True, True, False, False])
    assert count_accepted(right, np.array([3, 0, 2], np.int32), host_upload).tolist() == [2, 1, 2]
    rng = np.random.default_rng(0)
    for _ in range(50):
        drafts = rng.integers(0, 5, rng.integers(1, 6)).astype(np.int32)
        drafts[0] = max(drafts[0], 1)
        right_N = rng.random(int((drafts + 1).sum())) < 0.7
        at = 0
        expected = []
        for k in drafts.tolist():
            expected.append(1 + next((i for i in range(k) if not right_N[at + i]), k))
            at += k + 1
        assert count_accepted(torch.from_numpy(right_N), drafts, host_upload).tolist() == expected


@pytest.mark.full("graphs", keep=1)
@pytest.mark.parametrize("graphs", ["full", "piecewise"])
def test_steps_with_drafts_in_graphs(graphs: str) -> None:
    """Interpreted kernels; token 0, which is drafted now and then, makes NaN of whatever its place
    reaches.
    """
    from tests.kernels.interpreted import ordered_dots
    from tests.runner.test_graphs import by_triton

    rng = np.random.default_rng(5)
    submits = []
    for rid in range(5):
        tokens = rng.integers(1, 50, rng.integers(2, 12)).astype("<i4")
        sampling = TokenSampling(
            seed=rid, max_tokens=9, temperature=0.9 * (rid % 2), logit_bias={0: -100.0}, logprobs=1
        )
        submits.append(
            Submit(rid=rid, tokens=tokens.tobytes(), num_prompt=len(tokens), sampling=sampling)
        )
    with ordered_dots():
        expected, *_ = serve(by_triton("off").runner, submits)
        other = by_triton(graphs).runner
        speculate(other, knowing(other, submits, expected))
        other.graphs.num_drafts = NUM_DRAFTS
        found, _, right = serve(other, submits)
        assert found == expected
        assert right
        if graphs == "full":  # one request alone has as many tokens as every other
            assert serve(other, submits[:1])[0] == expected[:1]
            assert any(shape.num_tokens > shape.num_reqs for shape in other.graphs._recordings)
