"""The policy of `--speculate auto`: what drafts cost where they do not pay, and what they give
where they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from moeserve.engine.draft_policy import DraftPolicy

Cost = Callable[[float], float]


def gpu(tokens: float) -> float:
    """Weights are read once for up to 200 tokens."""
    return 8_000 * max(1.0, tokens / 200)


def experts(tokens: float) -> float:
    """Each of the first tokens reads different experts; later ones only compute."""
    return 5_000 + 60_000 * (1 - (1 - 8 / 128) ** tokens) + 200 * tokens


def linear(tokens: float) -> float:
    return 1_000 + 9_000 * tokens


COSTS = {"gpu": gpu, "experts": experts, "linear": linear}


@dataclass
class Sim:
    """A decode loop with made-up times. Each row has up to k drafts with `chance`; each is right
    with `accept`.
    """

    cost: Cost
    rows: int
    k: int
    accept: float
    chance: float = 1.0
    propose: float = 0.0  # time of the proposer's model, relative to the step
    noise: float = 0.2
    outliers: float = 0.02
    hidden: float = 0.0  # time of a step with drafts that the policy is not told, relative
    seed: int = 0

    def run(self, policy: DraftPolicy, steps: int) -> float:
        """Tokens per time relative to no speculation."""
        rng = np.random.default_rng(self.seed)
        slots = np.arange(self.rows, dtype=np.intp)
        available = np.zeros(self.rows, np.int32)
        time = tokens = 0.0
        for step in range(steps):
            if step % 100 == 0:
                policy.admit(slots[:1])
            drafts = policy.limit(slots, available)
            assert drafts.dtype == np.int32
            assert ((drafts >= 0) & (drafts <= available)).all()
            right = rng.random((self.rows, self.k)) < self.accept
            accepted = np.minimum(np.cumprod(right, axis=1).sum(1), drafts).astype(np.int32)
            num = int(drafts.sum())
            us = self.cost(self.rows + num)
            proposed = policy.propose and self.propose > 0
            us += self.propose * self.cost(self.rows) * proposed
            measured = (
                us
                * max(rng.normal(1, self.noise), 0.3)
                * (5 if rng.random() < self.outliers else 1)
            )
            time += us + self.hidden * self.cost(self.rows) * (num > 0)
            tokens += self.rows + int(accepted.sum())
            if num:
                policy.update(slots, drafts, accepted)
            policy.note(self.rows + num, self.rows, num, int(measured), proposed)
            offered = policy.propose & (rng.random(self.rows) < self.chance)
            available = np.where(offered, self.k, 0).astype(np.int32)
        return tokens / time * self.cost(self.rows) / self.rows


BAD = {  # k, acceptance, how often there are drafts, time of the proposer
    "a model that is never right": (4, 0.05, 1.0, 0.1),
    "a slow model that is seldom right": (3, 0.3, 1.0, 0.3),
    "lookups": (4, 0.2, 0.1, 0.0),
}
GOOD = {"model": (3, 0.85, 1.0, 0.05), "lookups": (8, 0.95, 0.5, 0.0), "head": (1, 0.85, 1.0, 0.05)}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("case", BAD)
def test_text_that_does_not_repeat_loses_three_percent_at_most(cost: str, case: str) -> None:
    k, accept, chance, propose = BAD[case]
    for rows in (1, 2, 8, 24, 64):
        sim = Sim(COSTS[cost], rows, k, accept, chance, propose, hidden=0.005)
        assert sim.run(DraftPolicy(64, k, True), 600) >= 0.97, rows


@pytest.mark.parametrize("case", GOOD)
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_good_drafts_give_most_of_what_they_can(case: str, rows: int) -> None:
    k, accept, chance, propose = GOOD[case]
    for cost in (gpu, experts):
        sim = Sim(cost, rows, k, accept, chance, propose)
        always = sim.run(DraftPolicy(64, k, False), 400)
        assert sim.run(DraftPolicy(64, k, True), 400) >= max(0.8 * always, 0.97)


def test_more_rows_use_fewer_drafts() -> None:
    """This device computes 40 tokens in the time of one."""
    policy = DraftPolicy(64, 3, True)
    used = {}
    for rows in (2, 64, 2):
        Sim(lambda tokens: 8_000 * max(1, tokens / 40), rows, 3, 0.5).run(policy, 200)
        limits = [
            policy.limit(np.arange(rows, dtype=np.intp), np.full(rows, 3, np.int32))
            for _ in range(10)
        ]
        used[rows] = np.mean(np.concatenate(limits))
    assert used[2] > 2
    assert used[64] < 1


def test_a_text_that_begins_to_repeat_gets_drafts_again() -> None:
    policy = DraftPolicy(1, 4, True)
    assert Sim(experts, 1, 4, 0.05).run(policy, 400) >= 0.97
    assert not policy.propose
    Sim(experts, 1, 4, 0.95, seed=1).run(policy, 600)
    assert Sim(experts, 1, 4, 0.95, seed=2).run(policy, 300) > 1.5


def test_only_the_rows_that_are_right_keep_their_drafts() -> None:
    policy = DraftPolicy(8, 4, True)
    slots = np.arange(8, dtype=np.intp)
    four = np.full(8, 4, np.int32)
    right = np.array([4, 4, 0, 0, 0, 0, 0, 0], np.int32)
    for _ in range(60):
        drafts = policy.limit(slots, four)
        policy.update(slots, drafts, np.minimum(right, drafts))
        num = int(drafts.sum())
        policy.note(8 + num, 8, num, int(experts(8 + num)))
    assert drafts.tolist() == [4, 4, 0, 0, 0, 0, 0, 0]
    policy.admit(slots[2:3])
    assert policy.limit(slots, four)[2] <= 4


def test_what_is_fixed_uses_all_drafts_and_steps_with_prompts_count_for_nothing() -> None:
    slots = np.array([3, 1], np.intp)
    available = np.array([2, 0], np.int32)
    fixed = DraftPolicy(4, 2, False)
    for _ in range(20):
        assert fixed.limit(slots, available).tolist() == [2, 0]
        fixed.update(slots, available, np.zeros(2, np.int32))
        fixed.note(4, 2, 2, 10**9)
    assert fixed.propose
    policy = DraftPolicy(4, 2, True)
    for _ in range(20):
        policy.note(100, 2, 0, 5_000)
        assert policy.limit(slots, available).tolist() == [0, 0]  # nothing is known
    assert policy.limit(slots[:0], available[:0]).tolist() == []
    for _ in range(20):
        policy.note(2, 2, 0, 5_000)
    assert policy.limit(slots, available).tolist() == [2, 0]


def test_the_same_calls_have_the_same_results() -> None:
    runs = [Sim(experts, 8, 4, 0.6, 0.5).run(DraftPolicy(8, 4, True), 200) for _ in range(2)]
    assert runs[0] == runs[1]
