"""The overlap policy against simulated engines: it finds what pays, follows changes, and loses
little elsewhere.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moeserve.engine.plan import StepDecision, StepPlan, StepResult
from moeserve.runner.dbo import MAX_LOSS_SHARE, TRIAL_STEPS, OverlapPolicy


def plan_of(step: int, counts: list[int]) -> StepPlan:
    rows = len(counts)
    index = np.arange(rows, dtype=np.int32)
    return StepPlan(step, index, index * 0, np.array(counts, np.int32), np.ones(rows, np.bool_), ())


class Sim:
    """Engines that share every step.

    A step takes compute + wait in one micro-batch, and max(compute * (1 + overhead), wait) in two,
    all per token. noise is a share of the time. The next step is planned before the last one is
    noted, as in the engine.

    With `recording`, steps are recorded, so that transfers are not timed. The first step of each
    number of tokens and micro-batches takes `recording` times as long.
    """

    def __init__(
        self,
        wait: float,
        overhead: float,
        engines: int = 1,
        noise: float = 0.0,
        recording: float = 0.0,
    ) -> None:
        self.wait = wait
        self.overhead = overhead
        self.noise = noise
        self.recording = recording
        self.recorded = set[tuple[int, int]]()
        self.policies = [OverlapPolicy("auto") for _ in range(engines)]
        self.rng = np.random.default_rng(0)
        self.ubatches: list[int] = []
        self.took_us = 0.0
        self._late: list[tuple[OverlapPolicy, StepPlan, StepResult]] = []

    def run(self, steps: int, counts: list[int]) -> float:
        """Return the time taken, as a multiple of that with one micro-batch."""
        tokens = sum(counts)
        base_us = 0.0
        took_us = 0.0
        for _ in range(steps):
            plan = plan_of(len(self.ubatches), counts)
            votes = [policy.ubatches_ok(plan) for policy in self.policies]
            ubatches = 2 if all(votes) else 1
            one = 100 + self.wait
            two = max(100 * (1 + self.overhead), self.wait)
            us = (
                tokens
                * (two if ubatches == 2 else one)
                * (1 + self.noise * self.rng.standard_normal())
            )
            if self.recording and (tokens, ubatches) not in self.recorded:
                self.recorded.add((tokens, ubatches))
                us *= self.recording
            exposed = tokens * (self.wait if ubatches == 1 else max(0, self.wait - 100))
            times = (
                {}
                if self.recording
                else {"comm_us": 1 + int(exposed), "exposed_comm_us": int(exposed)}
            )
            result = StepResult(plan.step, np.zeros(0, np.int32), device_us=int(us), **times)
            decision = StepDecision(
                plan.step,
                ubatches,
                (tokens, 0) if ubatches == 1 else (tokens // 2, tokens - tokens // 2),
            )
            late = self._late
            self._late = []
            for policy, earlier, outcome in late:
                policy.note(earlier, outcome)
            self._late = [
                (policy, dataclasses.replace(plan, decision=decision), result)
                for policy in self.policies
            ]
            self.ubatches.append(ubatches)
            base_us += tokens * one
            took_us += us
        return took_us / base_us


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("engines", [1, 4])
@pytest.mark.parametrize("counts", [[1024], [1] * 64])
def test_it_finds_what_pays(counts: list[int], engines: int, noise: float) -> None:
    sim = Sim(wait=60, overhead=0.1, engines=engines, noise=noise)
    sim.run(100, counts)
    assert sim.ubatches[:3] == [1, 1, 1]
    assert sim.ubatches[20:].count(2) > 60
    assert sim.run(400, counts) < 0.72  # 110 / 160 at best


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("wait", "overhead"), [(0, 0.05), (2, 0.3), (10, 0.2), (30, 0.31), (30, 1.0), (5, 3.0)]
)
def test_it_loses_little_where_it_does_not_pay(wait: float, overhead: float, noise: float) -> None:
    sim = Sim(wait, overhead, noise=noise)
    assert sim.run(1000, [1] * 32) < 1.02
    if wait <= 2:
        assert sim.ubatches.count(2) == 0, "nothing could be won"
    else:
        assert sim.ubatches.count(2) > 0, "it never tried"


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("engines", [1, 4])
def test_it_finds_what_pays_in_recorded_steps(engines: int, noise: float) -> None:
    """Each of four sizes in turn, all of which cost about the same per token, is recorded when it
    is met.
    """
    sim = Sim(wait=60, overhead=0.1, engines=engines, noise=noise, recording=30)
    for tokens in (60, 61, 62, 63):
        sim.run(25, [1] * tokens)
    assert sim.run(400, [1] * 62) < 0.72


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("overhead", [0.05, 0.3, 3.0])
def test_it_loses_little_in_recorded_steps(overhead: float, noise: float) -> None:
    """Recorded steps do not report whether transfers are waited for.

    So the other way is tried, within the same budget.
    """
    sim = Sim(0, overhead, noise=noise, recording=30)
    sim.run(3, [1] * 32)
    trial = (30 + TRIAL_STEPS) * (1 + overhead) / 2000
    assert sim.run(2000, [1] * 32) < 1 + MAX_LOSS_SHARE + trial
    assert sim.ubatches.count(2) > 0


def test_recording_is_not_mistaken_for_a_cost() -> None:
    """Steps that record come in the middle of those that do not, also on other ranks."""
    sim = Sim(wait=0, overhead=0.05, recording=30)
    for tokens in range(48, 56):
        sim.run(40, [1] * tokens)
    sim.run(100, [1] * 52)
    assert sim.ubatches[-100:].count(2) <= 2 * TRIAL_STEPS


def test_nobody_tries_blindly_what_cannot_pay() -> None:
    """One rank, whose rows do not travel, and steps of few tokens."""
    sim = Sim(wait=0, overhead=0.05, recording=30)
    sim.run(300, [1] * 28)
    sim.policies[0].restart(1)
    sim.run(300, [512])
    assert sim.ubatches.count(2) == 0


def test_it_follows_a_change() -> None:
    sim = Sim(wait=60, overhead=0.1)
    sim.run(100, [512])
    sim.wait = 0  # the link got faster
    sim.run(200, [512])
    assert sim.run(200, [512]) < 1.02
    sim.wait = 60
    sim.run(300, [512])
    assert sim.run(100, [512]) < 0.75


def test_phases_and_sizes_are_apart() -> None:
    """Prefill learns to use two micro-batches; a decode with as many tokens, and a smaller prefill,
    know nothing of it."""
    sim = Sim(wait=60, overhead=0.1)
    sim.run(100, [64])
    policy = sim.policies[0]
    assert policy.ubatches_ok(plan_of(1000, [64]))
    assert not policy.ubatches_ok(plan_of(1001, [1] * 64))
    assert not policy.ubatches_ok(plan_of(1002, [16]))


def test_one_unwilling_engine_costs_the_others_nothing() -> None:
    sim = Sim(wait=60, overhead=0.1, engines=2)
    sim.policies[1] = OverlapPolicy("off")
    assert sim.run(300, [512]) == pytest.approx(1.0)
    sim.policies[1] = OverlapPolicy(
        "auto"
    )  # a willing one takes its place: the first one has budget left to try
    for policy in sim.policies:
        policy.restart(2)
    sim.run(100, [512])
    assert sim.ubatches[-50:].count(2) > 25


def test_trials_stay_in_their_budget() -> None:
    sim = Sim(wait=30, overhead=2.0)
    sim.run(2000, [128])
    one = 130
    two = 300
    lost = sim.ubatches.count(2) * (two - one)
    assert (
        TRIAL_STEPS * (two - one)
        <= lost
        <= MAX_LOSS_SHARE * 2000 * one + (TRIAL_STEPS + 2) * (two - one)
    )


@pytest.mark.parametrize(
    ("mode", "tokens", "none"), [("on", True, True), ("off", False, False), ("auto", False, True)]
)
def test_modes(mode: str, tokens: bool, none: bool) -> None:
    policy = OverlapPolicy(mode)  # type: ignore[arg-type]
    for step in range(40):
        assert policy.ubatches_ok(plan_of(step, [9])) is tokens
        assert policy.ubatches_ok(None) is none


def test_a_new_group_tries_together() -> None:
    """Engines of different ages count different numbers of steps until all of them restart."""
    sim = Sim(wait=60, overhead=0.1, engines=2)
    for _ in range(4):
        sim.policies[1].ubatches_ok(None)
    for policy in sim.policies:
        policy.restart(2)
    sim.run(60, [512])
    assert sim.ubatches.count(2) > 30
