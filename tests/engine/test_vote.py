"""The decision on every small matrix of votes, checked against independent properties."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from moeserve.engine.vote import Action, Decision, Vote, decide
from moeserve.errors import StepSkew

FLAGS = list(product((False, True), repeat=4))  # has_work, pause, drained, trace


def test_every_combination_of_flags_of_three_engines() -> None:
    for matrix in product(FLAGS, repeat=3):
        votes = [Vote(7, 2, has_work=w, pause=p, drained=d, trace=t) for w, p, d, t in matrix]
        decision = decide(votes)
        work = {vote.has_work for vote in votes}
        if True in work:
            assert decision.action is Action.RUN
        elif {vote.drained for vote in votes} == {True}:
            assert decision.action is Action.STOP
        elif {vote.pause or vote.drained for vote in votes} == {True}:
            assert decision.action is Action.PAUSE
        else:
            assert decision.action is Action.PARK
        assert (decision.step_decision is not None) == (decision.action is Action.RUN)
        if decision.step_decision is not None:
            assert (decision.step_decision.step, decision.step_decision.ubatches) == (7, 1)
            assert decision.step_decision.trace == (True in {vote.trace for vote in votes})


BATCHES = [(tokens, split_at) for tokens in range(4) for split_at in range(tokens + 1)]


def test_every_combination_of_batches_cuts_and_consent_of_three_engines() -> None:
    rows = list(product(BATCHES, (False, True)))
    for matrix in product(rows, repeat=3):
        votes = [
            Vote(0, 0, has_work=n > 0, tokens=n, split_at=c, ubatches_ok=ok)
            for (n, c), ok in matrix
        ]
        decision = decide(votes).step_decision
        if decision is None:
            assert not any(vote.tokens for vote in votes)
            continue
        ubatches = [
            [(vote.split_at, vote.tokens - vote.split_at) for vote in votes if vote.tokens],
            [vote.ubatches_ok for vote in votes],
        ]
        if decision.ubatches == 2:
            assert all(ubatches[1])
            assert any(first > 0 and second > 0 for first, second in ubatches[0])
            assert decision.most_tokens == tuple(
                max(column) for column in zip(*ubatches[0], strict=True)
            )
        else:
            assert decision.ubatches == 1
            assert not all(ubatches[1]) or all(0 in halves for halves in ubatches[0])
            assert decision.most_tokens == (max(vote.tokens for vote in votes), 0)


def test_a_placement_advances_as_far_as_all_have_prepared_it_and_wakes_a_sleeping_group() -> None:
    for prepared in product(range(3), repeat=3):
        for active in range(min(prepared) + 1):
            for has_work in (False, True):
                votes = [
                    Vote(0, 0, prepared=p, active=active, has_work=has_work and i == 1)
                    for i, p in enumerate(prepared)
                ]
                decision = decide(votes)
                assert (decision.action is Action.RUN) == (has_work or min(prepared) > active)
                if decision.step_decision is not None:
                    assert decision.step_decision.active == min(prepared)


def test_giving_a_placement_up_wakes_a_sleeping_group_once() -> None:
    votes = [Vote(0, 0, prepared=15, active=14), Vote(0, 0, prepared=-5, active=14)]
    decision = decide(votes)
    assert decision.step_decision is not None
    assert decision.step_decision.active == -5
    for later in (-5, 17):  # its own commit is still to come; all have come to rest
        votes = [Vote(1, 0, prepared=17, active=-5), Vote(1, 0, prepared=later, active=-5)]
        assert (decide(votes).action is Action.RUN) == (later == 17)
    assert decide([Vote(2, 0, prepared=17, active=17)] * 2) == Decision(Action.PARK)


def test_the_order_of_the_engines_does_not_matter() -> None:
    votes = [
        Vote(3, 1, has_work=True, tokens=9, split_at=4, ubatches_ok=True, prepared=3),
        Vote(3, 1, ubatches_ok=True, drained=True, prepared=2, trace=True),
        Vote(3, 1, has_work=True, tokens=6, split_at=5, ubatches_ok=True, pause=True, prepared=5),
    ]
    decisions = [decide(order) for order in permutations(votes)]
    assert decisions == [decisions[0]] * 6
    decision = decisions[0].step_decision
    assert decision is not None
    assert (decision.ubatches, decision.most_tokens, decision.active, decision.trace) == (
        2,
        (5, 5),
        2,
        True,
    )


@pytest.mark.parametrize("other", [Vote(4, 1), Vote(5, 2)])
@pytest.mark.parametrize("where", range(3))
def test_a_skew_names_who_is_where(other: Vote, where: int) -> None:
    votes = [Vote(5, 1, has_work=True)] * 3
    votes[where] = other
    with pytest.raises(StepSkew, match=f"engine {where} in epoch {other.epoch}, step {other.step}"):
        decide(votes)


def test_one_engine_decides_for_itself() -> None:
    assert decide([Vote(0, 0)]) == Decision(Action.PARK)
    assert decide([Vote(0, 0, drained=True)]) == Decision(Action.STOP)
