"""A runner without a model. It makes up tokens, so that the rest of the system can be measured."""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from moeserve.engine.plan import GrammarJob, StepPlan, StepResult
from moeserve.messages import Join, PlacementResult, PlacementTable


class NullHandle:
    """A StepHandle whose result is ready at due_at_s, on the monotonic clock; 0: at once."""

    def __init__(self, result: StepResult, due_at_s: float = 0.0) -> None:
        self._result = result
        self._due_at_s = due_at_s

    async def result(self) -> StepResult:
        wait_s = self._due_at_s - time.monotonic() if self._due_at_s else 0.0
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        return self._result


class NullRunner:
    """A GroupRunner without experts, whose tokens (below vocab_size) depend on the position only.

    step_s: time between two results, so that the load on the front end does not depend on the
    host's speed.
    """

    prepared = 0
    overtaken = False
    on_placement_result: Callable[[PlacementResult], None] | None = None

    def __init__(self, vocab_size: int = 1000, step_s: float = 0.0) -> None:
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._due_at_s = 0.0

    def start(self, plan: StepPlan) -> NullHandle:
        position = (plan.starts_R + plan.counts_R)[plan.samples_R]
        tokens = (position.astype(np.int64) * 48271 % 65537 % self._vocab_size).astype(np.int32)
        if self._step_s:
            self._due_at_s = max(self._due_at_s, time.monotonic()) + self._step_s
        return NullHandle(StepResult(plan.step, tokens), self._due_at_s)

    def prepare_grammar(self, job: GrammarJob, on_done: Callable[[str], None]) -> None:
        on_done("")  # grammars are ignored

    def drop_grammars(self, tickets: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass

    async def join(self, join: Join) -> None:
        pass

    async def leave(self) -> None:
        pass

    def prepare(self, placement: PlacementTable) -> None:
        if self.on_placement_result is not None:
            self.on_placement_result(
                PlacementResult(version=placement.version, error="the null runner has no experts")
            )

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        return plan is None
