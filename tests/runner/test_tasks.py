"""Tasks: results that a step computes from its rows' hidden states, besides sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from moeserve.engine.plan import NewRequest, StepPlan, StepResult, TaskOutput
from moeserve.engine.requests import request_of
from moeserve.errors import InvalidRequest
from moeserve.messages import SAMPLE, Submit
from moeserve.runner.tables import I64
from moeserve.runner.tasks import Arrays, ComputedStep, RowTask, TaskOutputs

from .harness import Driver, Request, fake_runner, greedy


class LastHidden(RowTask):
    """Returns the hidden state of each row's last token as bytes."""

    def __init__(self) -> None:
        self.slots: set[int] = set()

    def add(self, request: NewRequest) -> str | None:
        if request.num_prompt > 6:
            return "too long for this task"
        self.slots.add(request.slot)
        return None

    def refuse(self, slot: int) -> None:
        self.slots.discard(slot)

    def rows(self, plan: StepPlan) -> I64:
        return np.flatnonzero([slot in self.slots for slot in plan.slots_R.tolist()])

    def run(self, step: ComputedStep) -> TaskOutputs:
        rows = self.rows(step.plan)
        last = step.rows.offsets_R1[rows + 1].astype(np.int64) - 1
        return Hidden(step.plan.slots_R[rows].tolist(), step.hidden_TD[last])


class Hidden(TaskOutputs):
    def __init__(self, slots: list[int], hidden_RD: Tensor) -> None:
        self.slots = slots
        self.hidden_RD = hidden_RD

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"hidden": self.hidden_RD}

    def add_to(self, result: StepResult, fetched: Arrays) -> StepResult:
        found = {
            slot: TaskOutput(digests=[row.tobytes()])
            for slot, row in zip(self.slots, fetched["hidden"], strict=True)
        }
        return replace(result, outputs=result.outputs | found)


def without_sampling(plan: StepPlan, slots: set[int]) -> StepPlan:
    """The plan as a scheduler makes it for rows that yield no tokens."""
    yields = np.array([slot not in slots for slot in plan.slots_R.tolist()])
    return replace(plan, samples_R=plan.samples_R & yields)


def test_two_tasks_share_a_step() -> None:
    runner = fake_runner()
    task = LastHidden()
    runner.tasks = {**runner.tasks, "hidden": task}
    driver = Driver(runner)
    pooled, sampled = (
        driver.add(Request([5, 6, 7], greedy())),
        driver.add(Request([8, 9], greedy(logprobs=1))),
    )
    driver.new_requests[0] = replace(driver.new_requests[0], task="hidden")
    plan = without_sampling(driver.plan([(pooled, 9), (sampled, 9)]), {pooled.slot})
    result = runner.execute(plan)
    assert len(result.tokens_N) == 1
    assert not result.failed
    assert set(result.outputs) == {pooled.slot, sampled.slot}
    assert len(result.outputs[sampled.slot].logprobs) == 1
    (hidden,) = result.outputs[pooled.slot].digests
    seen = runner.model.seen[-1]
    assert int(seen.offsets_R1[1]) == 3
    alone = Driver(fake_runner())
    request = alone.add(Request([5, 6, 7], greedy()))
    states: list[Tensor] = []
    logits = alone.runner.model.logits
    alone.runner.model.logits = lambda rows: states.append(rows.clone()) or logits(rows)
    alone.run([(request, 9)])
    assert hidden == states[0][0].numpy().tobytes()


def test_sampling_has_the_tokens_that_it_has_alone() -> None:
    def tokens(others: int) -> list[int]:
        runner = fake_runner()
        runner.tasks = {**runner.tasks, "hidden": LastHidden()}
        driver = Driver(runner)
        rest = [driver.add(Request([5, 6, 7], greedy())) for _ in range(others)]
        one = driver.add(Request([8, 9], greedy()))
        driver.new_requests[:others] = [
            replace(request, task="hidden") for request in driver.new_requests[:others]
        ]
        plan = driver.plan([*((each, 9) for each in rest), (one, 9)])
        result = runner.execute(without_sampling(plan, {each.slot for each in rest}))
        return result.tokens_N.tolist()

    assert tokens(0) == tokens(3)


def test_a_task_refuses_a_request() -> None:
    runner = fake_runner()
    runner.tasks = {**runner.tasks, "hidden": LastHidden()}
    driver = Driver(runner)
    request = driver.add(Request(list(range(1, 9)), greedy()))
    driver.new_requests[0] = replace(driver.new_requests[0], task="hidden")
    plan = without_sampling(driver.plan([(request, 9)]), {request.slot})
    result = runner.execute(plan)
    assert result.failed == {request.slot: "too long for this task"}
    assert not result.outputs


@pytest.mark.parametrize("task", ["pool", ""])
def test_an_unknown_task_is_refused_with_the_known_ones(task: str) -> None:
    fields: dict[str, Any] = {"rid": 1, "tokens": b"\1\0\0\0", "num_prompt": 1}
    known = Submit(**fields, sampling=greedy())
    assert request_of(known, 0, 99, 99).task == SAMPLE
    with pytest.raises(InvalidRequest, match=f"task must be one of sample, got '{task}'"):
        request_of(Submit(**fields, sampling=greedy(), task=task), 0, 99, 99)
