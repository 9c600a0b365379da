"""Lookup proposers guess what a rescan of all tokens would, whatever the portions in which tokens
come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.engine.plan import NewRequest
from moeserve.runner.speculation import ngram
from moeserve.runner.speculation.ngram import (
    MAX_MATCH,
    MAX_NGRAM,
    MIN_NGRAM,
    Acceptance,
    NgramProposer,
    RequestIndex,
)
from moeserve.runner.speculation.suffix import MAX_MATCHES, MIN_MATCH, AnswerRing, SuffixProposer
from moeserve.runner.tables import host_upload
from moeserve.sampling import TokenSampling

K = 4
GREEDY = TokenSampling(seed=0, max_tokens=1)
# Few kinds of tokens, so that all repeats; runs and periods; and one token far above the others.
TOKENS = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.lists(st.sampled_from([0, 1, 2, 3, 151_935, 2**31 - 1]), min_size=1, max_size=60),
    st.builds(
        lambda one, times: one * times,
        st.lists(st.integers(0, 9), min_size=1, max_size=9),
        st.integers(1, 8),
    ),
)


def i32(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def request(slot: int, tokens: Sequence[int]) -> NewRequest:
    return NewRequest(slot, i32(tokens), len(tokens), GREEDY)


def rescan(tokens: list[int]) -> tuple[int, int]:
    """Find the latest earlier occurrence of the longest n-gram at the end.

    Returns the position after it, and the length of the match.
    """
    for n in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:] and len(tokens) > n:
                lengths = [n for n in range(1, end + 1) if tokens[end - n : end] == tokens[-n:]]
                return end, min(max(lengths), MAX_MATCH)
    return 0, 0


def behind(tokens: list[int], position: int, count: int) -> list[int]:
    """Return the tokens after a position, repeating the period beyond the end."""
    tokens = list(tokens)
    period = len(tokens) - position
    for _ in range(count):
        tokens.append(tokens[-period])
    return tokens[position : position + count]


def naive_guess(tokens: list[int], num_first: int, k: int) -> list[int]:
    """Return the n-gram draft after all tokens; the first num_first were known at the start."""
    acceptance = Acceptance()
    for end in range(num_first, len(tokens)):
        position, length = rescan(tokens[:end])
        if length:
            acceptance.update(length, tokens[position] == tokens[end])
    position, length = rescan(tokens)
    probabilities = np.cumprod([acceptance.rate(length + j) if length else 0.0 for j in range(k)])
    return (
        behind(tokens, position, int((probabilities >= ngram.MIN_PROBABILITY).sum()))
        if length
        else []
    )


@given(tokens=TOKENS, most_recent=st.sampled_from([0, 7, 1 << 14]), data=st.data())
def test_ngrams_as_by_rescans(tokens: list[int], most_recent: int, data: st.DataObject) -> None:
    num_first = end = data.draw(st.integers(1, len(tokens)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "_MAX_RECENT", most_recent)
        proposer = NgramProposer(2, K, host_upload)
        proposer.add(request(0, tokens[::-1]))
        proposer.add(request(1, tokens[:end]))
        while end < len(tokens):
            start = end
            end = min(end + data.draw(st.integers(1, K + 1)), len(tokens))
            guess = proposer.guess(1, i32(tokens[start:end]))
            proposer.guess(0, i32([7]))
            assert list(guess) == naive_guess(tokens[:end], num_first, K)
        assert list(proposer.guess(1, i32([]))) == naive_guess(tokens, num_first, K)


@given(TOKENS)
def test_a_preempted_request_goes_on_with_the_same_match(tokens: list[int]) -> None:
    index = RequestIndex(i32(tokens[:1]))
    for n, token in enumerate(tokens[1:], 2):
        index.append(token)
        assert index.match == RequestIndex(i32(tokens[:n])).match == rescan(tokens[:n])


def test_the_drafts_of_a_row_reach_the_device_and_nothing_else_does() -> None:
    proposer = NgramProposer(4, 3, host_upload)
    proposer._drafts_SK.fill(-1)
    proposer.add(request(2, [*range(20), *range(9)]))
    proposer.add(request(0, range(20)))
    assert proposer.collect([0, 2], [i32([20]), i32([9])]).tolist() == [0, 3]
    assert proposer._drafts_SK.tolist() == [[-1] * 3, [-1] * 3, [10, 11, 12], [-1] * 3]
    assert proposer.drafts(np.array([2, 2, 0]), np.array([2, 0, 1])).tolist() == [12, 10, -1]
    assert proposer.collect([0], [i32([21])]).tolist() == [0]
    assert proposer.collect([], []).tolist() == []


def test_short_matches_stop_to_count_where_they_mislead_and_count_again() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(100, 900, 400).tolist()
    proposer = NgramProposer(1, K, host_upload)
    proposer.add(request(0, prompt))
    guesses = 0
    for at in rng.permutation(
        398
    ).tolist():  # each pair occurred before, and something else followed
        triple = (prompt[at], prompt[at + 1], 1000 + at)
        guesses += sum(bool(len(proposer.guess(0, i32([token])))) for token in triple)
    assert guesses == 0
    accepted = [
        list(proposer.guess(0, i32([token]))) == prompt[i + 1 : i + 1 + K]
        for i, token in enumerate(prompt)
    ]
    assert sum(accepted) > 300


def places(history: list[int], tokens: list[int], count: int) -> list[tuple[int, list[int]]]:
    """`AnswerRing.matches` by a rescan of everything that was ever added. -1 ends each run."""
    found = []
    for place in range(len(history) - 1, MIN_MATCH - 1, -1):
        if history[place - MIN_MATCH : place] == tokens[-MIN_MATCH:] and len(found) < MAX_MATCHES:
            most = min(MAX_MATCH, place, len(tokens))
            length = max(n for n in range(1, most + 1) if history[place - n : place] == tokens[-n:])
            follow = history[place : place + count]
            found.append((length, follow[: follow.index(-1)] if -1 in follow else follow))
    return found


RUNS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12)


@given(RUNS, st.lists(st.integers(0, 2), max_size=12), st.integers(1, 9))
def test_the_ring_finds_what_a_rescan_finds(
    runs: list[list[int]], tokens: list[int], count: int
) -> None:
    ring = AnswerRing(1 << 12)
    history = []
    for run in runs:
        ring.extend(run)
        history += [*run, -1]
    found = [(length, list(follow)) for length, follow in ring.matches(tokens, count)]
    assert found == (places(history, tokens, count) if len(tokens) >= MIN_MATCH else [])


@given(RUNS, st.lists(st.integers(0, 2), min_size=MIN_MATCH, max_size=12))
def test_a_full_ring_finds_only_what_is_still_there(
    runs: list[list[int]], tokens: list[int]
) -> None:
    """Buckets are shared here, so it may find less than there is."""
    ring = AnswerRing(32)
    history = []
    for run in runs:
        ring.extend(run)
        history += [*run, -1]
    there = places(history[-32:], tokens, 4)
    for length, follow in ring.matches(tokens, 4):
        assert any(length <= n and list(follow) == rest[: len(follow)] for n, rest in there)


def naive_vote(found: list[tuple[int, list[int]]], acceptance: Acceptance, k: int) -> list[int]:
    drafts: list[int] = []
    probability = 1.0
    while len(drafts) < k:
        agree = [
            (n, rest)
            for n, rest in found
            if rest[: len(drafts)] == drafts and len(rest) > len(drafts)
        ]
        if not agree:
            break
        votes = {rest[len(drafts)]: 0 for _, rest in agree}
        for n, rest in agree:
            votes[rest[len(drafts)]] += 2**n
        best = sorted(votes.items(), key=lambda vote: -vote[1])[0][0]
        longest = max(n for n, rest in agree if rest[len(drafts)] == best)
        probability *= votes[best] / sum(votes.values()) * acceptance.rate(longest + len(drafts))
        if probability < ngram.MIN_PROBABILITY:
            break
        drafts.append(best)
    return drafts


@given(RUNS, TOKENS, st.integers(0, 9))
def test_suffixes_vote_as_by_a_rescan(runs: list[list[int]], tokens: list[int], last: int) -> None:
    proposer = SuffixProposer(2, K, host_upload, num_recent=1 << 12)
    history = []
    for answer in runs:
        proposer.add(request(0, [7]))
        proposer.guess(0, i32(answer))
        if answer:
            history += [7, *answer, -1]
    proposer.add(request(0, [7]))  # the last answer ended
    proposer.add(request(1, tokens))
    guess = list(proposer.guess(1, i32([last])))
    known = [*tokens, last]
    position, length = rescan(known)
    found = [(length, behind(known, position, K))] if length else []
    found += places(history, known[-MAX_MATCH:], K) if len(known) >= MIN_MATCH else []
    assert guess == naive_vote(found, Acceptance(), K)


def test_an_answer_helps_the_next_request_and_is_forgotten_in_the_end() -> None:
    answer = np.random.default_rng(1).integers(0, 50_000, 600).astype(np.int32)

    def accepted(proposer: SuffixProposer, slot: int, prompt: list[int]) -> int:
        proposer.add(request(slot, prompt))
        guess = []
        right = 0
        for token in answer.tolist():
            right += list(guess[:1]) == [token]
            guess = list(proposer.guess(slot, i32([token])))
        return right

    proposer = SuffixProposer(4, K, host_upload, num_recent=1 << 11)
    assert accepted(proposer, 0, [1, 2]) == 0
    assert accepted(proposer, 1, [3]) > 0.8 * len(answer)
    for _ in range(4):
        proposer.add(request(2, [5]))
        proposer.guess(2, np.random.default_rng(2).integers(50_000, 99_999, 600).astype(np.int32))
    assert accepted(proposer, 3, [3]) == 0


def test_two_ranks_guess_the_same() -> None:
    rng = np.random.default_rng(3)
    ranks = [SuffixProposer(3, 8, host_upload, num_recent=256) for _ in range(2)]
    for step in range(300):
        slot = int(rng.integers(3))
        new = rng.integers(0, 3, int(rng.integers(1, 9))).astype(np.int32)
        for rank in ranks:
            if step < 3 or step % 10 == 0:
                rank.add(request(step % 3, new.tolist()))
            else:
                rank.collect([slot], [new])
        assert (ranks[0]._drafts_SK == ranks[1]._drafts_SK).all()
    assert ranks[0]._drafts_SK.any()


@pytest.mark.parametrize("vocabulary", [3, 100_000])
def test_a_long_prompt_is_indexed_in_milliseconds(vocabulary: int) -> None:
    """Bounds are ten times what is measured: they catch a rescan, not a slow machine."""
    prompt = np.random.default_rng(4).integers(0, vocabulary, 32_768)
    new = i32(prompt[:500])
    for proposer in (NgramProposer(1, K, host_upload), SuffixProposer(1, K, host_upload)):
        start = time.perf_counter()
        proposer.add(request(0, prompt))
        added = time.perf_counter()
        for token in new:
            proposer.guess(0, i32([token]))
        assert added - start < 0.1
        assert time.perf_counter() - added < 500 * 0.6e-3
