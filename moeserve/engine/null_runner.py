"""A runner without a model: made-up tokens at once. It measures everything that is not the model."""

from __future__ import annotations

import asyncio

import numpy as np

from moeserve.engine.plan import StepPlan, StepResult


class NullHandle:
    def __init__(self, result: StepResult, turns: int) -> None:
        self._result = result
        self._turns = turns

    async def result(self) -> StepResult:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        return self._result


class NullRunner:
    """Answers each plan with tokens that depend on nothing but their position, in 0..vocab_size-1.

    turns: how often the event loop runs before a result is there, to try what a late result does.
    """

    def __init__(self, vocab_size: int = 1000, turns: int = 0) -> None:
        self._vocab_size = vocab_size
        self._turns = turns

    def start(self, plan: StepPlan) -> NullHandle:
        position = (plan.starts_R + plan.counts_R)[plan.samples_R]
        tokens = (position.astype(np.int64) * 48271 % 65537 % self._vocab_size).astype(np.int32)
        return NullHandle(StepResult(plan.step, tokens), self._turns)

    def close(self) -> None:
        """Nothing to give back."""
