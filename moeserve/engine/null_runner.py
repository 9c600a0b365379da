"""A runner without a model: made-up tokens at once. It measures everything that is not the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from moeserve.engine.plan import StepPlan, StepResult
from moeserve.messages import Join, Placed, PlacementTable


class NullHandle:
    def __init__(self, result: StepResult, turns: int, due_s: float = 0.0) -> None:
        self._result = result
        self._turns = turns
        self._due_s = due_s

    async def result(self) -> StepResult:
        wait_s = self._due_s - time.monotonic() if self._due_s else 0.0
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        for _ in range(self._turns):
            await asyncio.sleep(0)
        return self._result


class NullRunner:
    """Answers each plan with tokens that depend on nothing but their position, in 0..vocab_size-1.

    turns: how often the event loop runs before a result is there, to try what a late result does.
    step_s: time between two results, to offer the front end a load that does not depend on the host's speed.
    In a group it has no experts, so that nothing travels and nothing can be placed.
    """

    placed = 0
    on_placed: Callable[[Placed], None] | None = None

    def __init__(self, vocab_size: int = 1000, turns: int = 0, step_s: float = 0.0) -> None:
        self._vocab_size = vocab_size
        self._turns = turns
        self._step_s = step_s
        self._due_s = 0.0

    def start(self, plan: StepPlan) -> NullHandle:
        position = (plan.starts_R + plan.counts_R)[plan.samples_R]
        tokens = (position.astype(np.int64) * 48271 % 65537 % self._vocab_size).astype(np.int32)
        if self._step_s:
            self._due_s = max(self._due_s, time.monotonic()) + self._step_s
        return NullHandle(StepResult(plan.step, tokens), self._turns, self._due_s)

    def close(self) -> None:
        """Nothing to give back."""

    overtaken = False

    async def join(self, join: Join) -> None:
        """Nobody to connect with."""

    async def leave(self) -> None:
        """Nothing to drop: a step that runs ends by itself."""

    def prepare(self, placement: PlacementTable) -> None:
        if self.on_placed is not None:
            self.on_placed(Placed(version=placement.version, error="the null runner has no experts"))

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        return plan is None
