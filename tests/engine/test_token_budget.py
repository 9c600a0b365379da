"""A step with both prompts and decodes keeps its time, whatever a token costs, and prompts go on
all the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from moeserve.engine.plan import StepPlan
from tests.engine.harness import Harness, limits_of, random_traffic, submit_of

TARGET_US = 20_000.0
LONG = {
    "max_num_batched_tokens": 512,
    "prefill_chunk": 512,
    "max_model_len": 4_096,
    "num_blocks": 2_200,
}


def a_token(plan: StepPlan) -> float:
    """All tokens cost the same, in addition to reading the weights."""
    return 2_000 + 90.0 * plan.num_tokens


def any_prompt(plan: StepPlan) -> float:
    """The first token of a prompt touches the other experts; more of them cost little."""
    return 4_000 + (6_000 if plan.num_tokens > len(plan.slots_R) else 0) + 20.0 * plan.num_tokens


def far_positions(plan: StepPlan) -> float:
    """A token costs more the further it is."""
    return 1_500 + float((plan.counts_R * (20 + plan.starts_R / 100)).sum())


def disturbed(plan: StepPlan) -> float:
    """Every fifth step is interrupted for as long again."""
    return a_token(plan) * (2 if plan.step % 5 == 0 else 1)


def served(
    cost: Callable[[StepPlan], float], target_us: float, streams: int = 3
) -> list[tuple[StepPlan, float]]:
    """Return the steps, with times, of a prompt of 3,000 tokens beside decoding streams."""
    harness = Harness(replace(limits_of(**LONG), itl_target_us=target_us))
    for rid in range(streams):
        harness.submit(
            submit_of(rid, [20 + rid] * 5, max_tokens=2_000, stop_ids=(), min_tokens=2_000)
        )
    found: list[tuple[StepPlan, float]] = []
    for step in range(1_200):
        if step == 20:
            harness.submit(submit_of(9, [20 + i % 29 for i in range(3_000)], max_tokens=1))
        planned = harness.plan()
        if harness.in_flight and (
            planned is None or len(harness.in_flight) == harness.limits.depth
        ):
            plan = harness.in_flight.popleft()
            took = cost(plan)
            harness.take(
                harness.scheduler.update_from_output(
                    plan, replace(harness.runner.result(), device_us=round(took))
                )
            )
            found.append((plan, took))
        if 9 in harness.answers and harness.answers[9].finish:
            break
    assert harness.answers[9].finish
    return found


@pytest.mark.parametrize("cost", [a_token, any_prompt, far_positions, disturbed])
def test_steps_with_a_prompt_keep_the_target(cost: Callable[[StepPlan], float]) -> None:
    with_prompt = [
        took
        for plan, took in served(cost, TARGET_US)
        if plan.counts_R.max() > 1 and len(plan.slots_R) > 3
    ]
    calm = sorted(with_prompt[6:])  # behind the first, of which nothing was known
    limit = TARGET_US * {disturbed: 2.0, far_positions: 1.1}.get(cost, 1.0)
    assert calm[int(0.95 * len(calm))] <= limit
    assert calm[len(calm) // 2] >= 0.4 * TARGET_US  # and uses it


def test_without_a_target_steps_are_full() -> None:
    steps = [plan for plan, _ in served(a_token, 0.0)]
    assert max(plan.num_tokens for plan in steps) == 512


def test_nobody_decodes_so_the_step_is_full() -> None:
    steps = [plan for plan, _ in served(a_token, TARGET_US, streams=0)]
    assert max(plan.num_tokens for plan in steps) == 512


def test_a_target_below_a_step_without_prompts_still_ends_the_prompt() -> None:
    steps = served(a_token, 100.0)
    assert min(plan.num_tokens for plan, _ in steps[40:-1]) == 3 + 8


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_those_without_a_target(seed: int) -> None:
    rng = random.Random(seed)
    limits = replace(limits_of(max_num_batched_tokens=60, prefill_chunk=60), itl_target_us=500.0)
    harness = Harness(limits, rng=rng)
    result = harness.runner.result
    harness.runner.result = lambda: replace(result(), device_us=rng.randrange(1, 2_000))  # type: ignore[method-assign]
    random_traffic(harness, rng, 40)
    harness.check_answers()
