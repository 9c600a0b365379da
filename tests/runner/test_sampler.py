"""The sampler against a naive one, its distribution, and independence of rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.plan import NewRequest
from moeserve.ops import native_rows
from moeserve.runner.sampling import noise, reference
from moeserve.runner.sampling.native import NativeSampler
from moeserve.runner.sampling.reference import ReferenceSampler
from moeserve.runner.sampling.rows import row_keys
from moeserve.runner.sampling.rules import NEG_INF
from moeserve.runner.sampling.sampler import Sampled, Sampler, Status
from moeserve.runner.tables import Tables, host_upload
from moeserve.sampling import TokenSampling

CPU = torch.device("cpu")
MAX_LEN = 32


KINDS = [NativeSampler, ReferenceSampler] if native_rows.AVAILABLE else [ReferenceSampler]


def sampler_of(
    vocab: int, slots: int = 64, kind: type[ReferenceSampler] = KINDS[0]
) -> ReferenceSampler:
    upload = host_upload
    tables = Tables(slots, MAX_LEN, (KVGroup(KVRule(), 16, (0,)),), CPU, upload)
    return kind(vocab, tables, upload)


def add(
    sampler: Sampler, slot: int, tokens: list[int], num_prompt: int | None = None, **sampling: Any
) -> None:
    history = np.array(tokens, dtype=np.int32)
    asked = TokenSampling(**({"seed": slot, "max_tokens": 9} | sampling))
    new_requests = NewRequest(
        slot, history, len(tokens) if num_prompt is None else num_prompt, asked
    )
    assert sampler.add(new_requests) is None
    sampler._tables.add(slot, history)
    sampler._tables.apply()


def sample(
    sampler: Sampler, logits: Tensor, slots: list[int], positions: list[int] | int
) -> Sampled:
    at = np.full(len(slots), positions) if isinstance(positions, int) else np.array(positions)
    return sampler.sample(logits, np.array(slots, dtype=np.int64), at.astype(np.int64))


def random_sampling(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    """Parameters of every kind, in every mixture."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.4 else otherwise

    tokens = rng.permutation(vocab)
    return {
        "seed": int(rng.integers(2**63)),
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        "top_k": sometimes(int(rng.integers(1, vocab)), 0),
        "top_p": sometimes(float(rng.uniform(0.1, 1)), 1.0),
        "min_p": sometimes(float(rng.uniform(0, 0.3)), 0.0),
        "repetition_penalty": sometimes(float(rng.uniform(0.5, 1.9)), 1.0),
        "frequency_penalty": sometimes(float(rng.uniform(-1, 1)), 0.0),
        "presence_penalty": sometimes(float(rng.uniform(-1, 1)), 0.0),
        "logit_bias": sometimes({int(t): float(rng.normal()) for t in tokens[:3]}, None),
        "allowed_ids": sometimes(tuple(tokens[: vocab // 2].tolist()), None),
        "bad_seqs": sometimes(
            ((int(tokens[4]),), tuple(rng.integers(0, 5, 2).tolist()), (1, 2, 3)), ()
        ),
        "min_tokens": sometimes(4, 0),
        "stop_ids": tuple(tokens[5:8].tolist()),
    }


def naive_scores(logits: Tensor, history: list[int], num_prompt: int, p: TokenSampling) -> Tensor:
    """Return one row's scores before noise, in float64.

    The rules are applied one after the other, as they are defined.
    """
    x = logits.double().tolist()
    for token in range(len(x)):
        if p.allowed_ids is not None and token not in p.allowed_ids:
            x[token] = NEG_INF
        x[token] += (p.logit_bias or {}).get(token, 0.0)
        if len(history) - num_prompt < p.min_tokens and token in p.stop_ids:
            x[token] = NEG_INF
        if token in history:
            x[token] = (
                x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
            )
        count = history[num_prompt:].count(token)
        x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    for bad in p.bad_seqs:
        if (
            history[len(history) - len(bad) + 1 :] == list(bad[:-1])
            and len(history) >= len(bad) - 1
        ):
            x[bad[-1]] = NEG_INF
    scores = torch.tensor(x, dtype=torch.float64)
    return scores if p.temperature == 0 else naive_filters(scores, p)


def naive_filters(scores: Tensor, p: TokenSampling) -> Tensor:
    scores = (scores - scores.max()) / p.temperature
    if p.min_p > 0:
        scores[scores < math.log(p.min_p)] = NEG_INF
    if p.top_k:
        scores[scores < scores.sort(descending=True).values[p.top_k - 1]] = NEG_INF
    if p.top_p < 1:
        probs = scores.softmax(0)
        ordered = probs.sort(descending=True).values
        needed = int((ordered.cumsum(0) < p.top_p).sum())
        scores[probs < ordered[min(needed, len(ordered) - 1)]] = NEG_INF
    return scores


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_every_mixture_agrees_with_the_naive_sampler(
    seed: int, kind: type[ReferenceSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    vocab = 50
    rows = 24
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 640)
    sampler = sampler_of(vocab, kind=kind)
    gumbel = noise.Gumbel(vocab, CPU)
    logits = torch.from_numpy(rng.normal(0, 2, (rows, vocab)).astype(np.float32))
    slots = rng.permutation(64)[:rows].tolist()
    positions = []
    expected = []
    for slot, row in zip(slots, logits, strict=True):
        history = rng.integers(0, 6, rng.integers(1, 12)).tolist()
        num_prompt = int(rng.integers(1, len(history) + 1))
        asked = random_sampling(rng, vocab)
        add(sampler, slot, history, num_prompt, **asked)
        positions.append(len(history))
        params = TokenSampling(max_tokens=9, **asked)
        scores = naive_scores(row, history, num_prompt, params)
        if params.temperature > 0:
            key = row_keys(np.array([params.seed], dtype=np.uint64), np.array([len(history)]))
            scores = scores + gumbel(*map(torch.from_numpy, key))[0, :vocab].double()
        expected.append(int(scores.argmax()) if scores.max() > NEG_INF else None)
    sampled = sample(sampler, logits, slots, positions)
    status = sampled.status_S.tolist()
    got = [
        t if s == Status.FINE else None
        for t, s in zip(sampled.tokens_S.tolist(), status, strict=True)
    ]
    assert got == expected


@pytest.mark.parametrize("vocab", [50, 49_155])
def test_a_rows_token_depends_on_nothing_but_the_row(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 12
    sampler = sampler_of(vocab)
    logits = torch.from_numpy(rng.normal(0, 2, (rows, vocab)).astype(np.float32))
    for slot in range(rows):
        add(sampler, slot, [1, 2, 3, 4], 2, **random_sampling(rng, min(vocab, 500)), logprobs=3)
    together = sample(sampler, logits, list(range(rows)), 4)
    assert together.logprobs is not None
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for _ in range(3):
            chosen = rng.permutation(rows)[: rng.integers(1, rows)].tolist()
            some = sample(sampler, logits[chosen], chosen, 4)
            assert some.logprobs is not None
            assert torch.equal(some.tokens_S, together.tokens_S[chosen])
            assert torch.equal(some.status_S, together.status_S[chosen])
            assert torch.equal(some.logprobs.values_PN, together.logprobs.values_PN[chosen])


def test_the_short_way_draws_what_the_long_way_draws() -> None:
    """The native sampler narrows wide rows with a cut; rows whose cut is too wide or tied go the
    long way.
    """
    rng = np.random.default_rng(4)
    vocab = 20_000
    rows = 40
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocab)).astype(np.float32))
    logits[5:10] = logits[5:10].round()
    logits[10] = 1.0
    logits[11, 3] = float("nan")
    short, long = (sampler_of(vocab, kind=kind) for kind in (KINDS[0], ReferenceSampler))
    for slot in range(rows):
        sampling: dict[str, Any] = {
            "top_k": int(rng.choice([0, 1, 20, 60, 3000])),
            "min_p": [0.0, 0.05, 1e-9][slot % 3],
        }
        if slot % 2:
            sampling["top_p"] = float(rng.choice([0.3, 0.9, 0.99]))
        for sampler in (short, long):
            add(sampler, slot, [1, 2], 1, temperature=0.7, **sampling)
    for position in range(2, 12):
        one, other = (
            sample(sampler, logits, list(range(rows)), position) for sampler in (short, long)
        )
        assert torch.equal(one.tokens_S, other.tokens_S)
        assert one.status_S.tolist() == [
            Status.NOT_FINITE if i == 11 else Status.FINE for i in range(rows)
        ]
        few = sample(short, logits[7:23:3], list(range(7, 23, 3)), position)
        assert torch.equal(few.tokens_S, one.tokens_S[7:23:3])


CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_draws_follow_the_distribution(case: int) -> None:
    vocab = 20
    draws = 4096
    sampling = CASES[case]
    sampler = sampler_of(vocab, slots=draws)
    generator = torch.Generator().manual_seed(case)
    row = torch.randn(vocab, generator=generator) * 1.5
    for slot in range(draws):
        add(sampler, slot, [1, 2], 1, **sampling)
    tokens = sample(sampler, row.expand(draws, vocab), list(range(draws)), 2).tokens_S
    probs = naive_scores(row, [1, 2], 1, TokenSampling(seed=0, max_tokens=1, **sampling))
    if sampling["temperature"]:
        probs = probs.softmax(0)
    counts = tokens.bincount(minlength=vocab).double()
    possible = probs > 0
    assert counts[~possible].sum() == 0
    chi_square = float(((counts - draws * probs)[possible] ** 2 / (draws * probs[possible])).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_positions_of_one_request_are_independent_draws() -> None:
    sampler = sampler_of(2, slots=1)
    add(sampler, 0, [1], temperature=1.0, seed=5)
    tokens = [int(sample(sampler, torch.zeros(1, 2), [0], at).tokens_S) for at in range(1, 1025)]
    assert abs(sum(tokens) - 512) < 5 * 16
    pairs = np.bincount(np.array(tokens[:-1]) * 2 + np.array(tokens[1:]), minlength=4)
    assert (abs(pairs - 256) < 5 * 14).all()


def test_a_seed_repeats_and_another_does_not() -> None:
    sampler = sampler_of(1000, slots=3)
    logits = torch.zeros(3, 1000)
    for slot, seed in enumerate((-7, -7, 8)):
        add(sampler, slot, [1], temperature=1.0, seed=seed)
    first = [sample(sampler, logits, [0, 1, 2], at).tokens_S.tolist() for at in range(1, 9)]
    assert all(a == b for a, b, _ in first)
    assert any(a != c for a, _, c in first)
    assert first == [sample(sampler, logits, [0, 1, 2], at).tokens_S.tolist() for at in range(1, 9)]


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    sampler = sampler_of(100)
    add(sampler, 0, [1], temperature=0.0)
    add(sampler, 1, [1], temperature=0.0, logit_bias={3: 0.5})
    logits = torch.zeros(2, 100)
    logits[0, [70, 30, 99]] = 2.0
    logits[1, [70, 30]] = 2.0
    logits[1, 3] = 1.5
    assert sample(sampler, logits, [0, 1], 1).tokens_S.tolist() == [30, 3]


def test_a_row_where_everything_is_forbidden_fails_alone() -> None:
    sampler = sampler_of(10)
    add(sampler, 0, [1], temperature=0.0, allowed_ids=(4,), bad_seqs=((4,),))
    add(sampler, 1, [1], temperature=1.0, allowed_ids=(4,), bad_seqs=((4,),), top_p=0.5, top_k=3)
    add(sampler, 2, [1], temperature=1.0, allowed_ids=(4,), top_p=0.5)
    sampled = sample(sampler, torch.randn(3, 10), [0, 1, 2], 1)
    assert sampled.status_S.tolist() == [
        Status.NOTHING_ALLOWED,
        Status.NOTHING_ALLOWED,
        Status.FINE,
    ]
    assert sampled.tokens_S.tolist() == [0, 0, 4]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_exception_in_one_requests_sampling_is_its_own(
    temperature: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = sampler_of(64)
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for slot in range(4):
        add(
            sampler,
            slot,
            [1, 2],
            1,
            temperature=temperature,
            frequency_penalty=0.5,
            min_tokens=5,
            logprobs=slot,
        )
    expected = sample(sampler, logits, [0, 1, 2, 3], 2)
    broken = sampler._rules[2]
    monkeypatch.setitem(sampler._rules, 2, _Broken(broken))
    sampled = sample(sampler, logits, [0, 1, 2, 3], 2)
    assert sampled.failures == {2: "sampling failed: RuntimeError: a rule that breaks"}
    assert sampled.tokens_S[[0, 1, 3]].tolist() == expected.tokens_S[[0, 1, 3]].tolist()
    assert sampled.logprob_rows_P.tolist() == [0, 1, 3]
    assert sampled.logprobs is not None
    assert expected.logprobs is not None
    assert torch.equal(sampled.logprobs.values_PN, expected.logprobs.values_PN[[0, 1, 3]])


class _Broken:
    def __init__(self, rules: Any) -> None:
        self.rules = rules

    def apply(self, *_: Any) -> None:
        raise RuntimeError("a rule that breaks")


def test_extreme_logits_and_temperatures_stay_finite() -> None:
    sampler = sampler_of(64)
    logits = torch.full((3, 64), -3e38)
    logits[:, 9] = 3e38
    for slot, temperature in enumerate((1e-4, 2.0, 1e-5)):
        add(sampler, slot, [1], temperature=temperature, top_p=0.9, min_p=0.1)
    assert sample(sampler, logits, [0, 1, 2], 1).tokens_S.tolist() == [9, 9, 9]
