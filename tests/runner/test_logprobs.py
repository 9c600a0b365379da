"""Logprobs of answers and prompts against log_softmax in float64."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from moeserve.messages import Logprobs
from moeserve.runner.sampling import logprobs
from moeserve.runner.sampling.logprobs import likeliest, logprob_rows, to_messages
from moeserve.sampling import TokenSampling
from tests.runner.harness import VOCAB, Driver, Request, fake_runner, greedy

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def expected_row(logits: torch.Tensor, chosen: int, n: int) -> tuple[list[int], torch.Tensor, int]:
    exact = logits.double().log_softmax(0)
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    ids = [chosen, *order[:n]]
    return ids, exact[ids], int((logits >= logits[chosen]).sum())


def check(row: Logprobs, logits: torch.Tensor, chosen: int, n: int) -> None:
    ids, values, rank = expected_row(logits, chosen, n)
    assert row.ids == ids
    assert row.rank == rank
    np.testing.assert_allclose(row.values, values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "sampling", [greedy(logprobs=3), TokenSampling(seed=1, max_tokens=9, top_k=4, logprobs=0)]
)
def test_they_describe_the_raw_logits_of_each_token(sampling: TokenSampling) -> None:
    driver = Driver(fake_runner())
    request = driver.add(Request(list(PROMPT), sampling))
    neighbour = driver.add(Request([1, 2], greedy(logprobs=5)))
    silent = driver.add(Request([1, 2], greedy()))
    for _ in range(4):
        driver.run([(neighbour, 99), (request, 99), (silent, 99)])
    assert sampling.logprobs is not None
    for one, n in ((request, sampling.logprobs), (neighbour, 5)):
        for result, logits, token in zip(one.results, one.logits, one.output, strict=True):
            check(result.outputs[one.slot].logprobs[0], logits, token, n)
    assert all(silent.slot not in result.outputs for result in silent.results)


def test_digests_are_of_the_raw_logits_of_requests_that_want_them_on_one_rank() -> None:
    driver = Driver(fake_runner())
    changed = {"repetition_penalty": 1.3, "logit_bias": {5: 2.0}, "receipt": True}
    with_both, only = (
        driver.add(Request(list(PROMPT), greedy(**changed, logprobs=n))) for n in (1, None)
    )
    silent = driver.add(Request([1, 2], greedy(logprobs=2)))
    for _ in range(4):
        driver.run([(only, 99), (silent, 99), (with_both, 99)])
    for request in (with_both, only):
        for result, logits in zip(request.results, request.logits, strict=True):
            assert result.outputs[request.slot].digests == [
                hashlib.sha256(logits.numpy().tobytes()).digest()
            ]
    assert not any(result.outputs[silent.slot].digests for result in silent.results)
    assert not any(result.outputs[only.slot].logprobs for result in only.results)
    driver.runner.sampler.digests = False  # another rank of the same engine
    other = driver.add(Request(list(PROMPT), greedy(**changed)))
    driver.run([(other, 99)])
    assert not other.results[0].outputs


@pytest.mark.parametrize("rows_at_once", [2, 1 << 20])
@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_prompt_logprobs_cross_chunk_borders(
    chunk: int, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "PROMPT_ELEMENTS", rows_at_once * VOCAB)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", rows_at_once * VOCAB)
    driver = Driver(fake_runner())
    request = driver.add(Request(list(PROMPT), greedy(prompt_logprobs=2)))
    driver.generate(request, 3, chunk)
    rows: dict[int, Logprobs] = {}
    for result in request.results:
        for slot, output in result.outputs.items():
            assert slot == request.slot
            part = output.prompt_logprobs
            assert part is not None
            rows |= {part.start + i: row for i, row in enumerate(part.rows)}
    assert sorted(rows) == list(range(1, len(PROMPT)))
    for position, row in rows.items():
        shorter = driver.add(Request(PROMPT[:position], greedy()))
        driver.generate(shorter, 1)
        driver.remove(shorter)
        check(row, shorter.logits[0], PROMPT[position], 2)


def test_a_request_that_returns_with_an_answer_had_its_prompt_logprobs() -> None:
    driver = Driver(fake_runner())
    request = driver.add(Request(list(PROMPT), greedy(prompt_logprobs=1)))
    driver.generate(request, 2)
    driver.remove(request)
    request.results.clear()
    driver.add(request)
    driver.generate(request, 4)
    assert not any(result.outputs for result in request.results)


def test_equally_likely_tokens_come_in_order_of_their_ids() -> None:
    rows = logprob_rows(torch.zeros(1, 6), torch.tensor([4]), 6)
    (row,) = to_messages([6], *(tensor.numpy() for tensor in rows))
    assert row.ids == [4, 0, 1, 2, 3, 4, 5]
    assert row.rank == 6


def test_prompt_logits_that_are_not_finite_fail_that_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(fake_runner())
    bad = driver.add(Request(list(PROMPT), greedy(prompt_logprobs=1)))
    good = driver.add(Request([1, 2, 3], greedy(prompt_logprobs=1)))
    plain = driver.runner.model.logits

    def with_nan(hidden_SD: torch.Tensor) -> torch.Tensor:
        logits_SV = plain(hidden_SD)
        if len(logits_SV) > 2:
            logits_SV[2, 0] = float("nan")
        return logits_SV

    monkeypatch.setattr(driver.runner.model, "logits", with_nan)
    result = driver.run([(bad, 5), (good, 5)])
    assert list(result.failed) == [bad.slot]
    assert list(result.outputs) == [good.slot]
    assert result.outputs[good.slot].prompt_logprobs is not None


@pytest.mark.parametrize("width", [3, 64, 200, 1300, 9001])
def test_ties_go_to_the_lowest_ids_however_many_are_asked_for(width: int) -> None:
    x = (
        torch.randint(-3, 3, (7, width), generator=torch.Generator().manual_seed(width))
        .float()
        .log_softmax(-1)
    )
    x[0] = 0.0
    x[1, ::2] = -0.0
    x[2, 1:] = float("-inf")
    whole = likeliest(x, 20)
    for row, ids in zip(x.tolist(), whole.tolist(), strict=True):
        assert ids == sorted(range(width), key=lambda token: (-row[token], token))[:20]
    for n in (0, 1, 2, 5, 19):
        assert torch.equal(likeliest(x, n), whole[:, :n])
