"""A runner without a model, to measure everything else: it makes up tokens at once."""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from moeserve.engine.plan import GrammarJob, StepPlan, StepResult
from moeserve.messages import Join, PlacementResult, PlacementTable


class NullHandle:
    """A StepHandle whose result comes at due_s (monotonic clock)."""

    def __init__(self, result: StepResult, due_s: float = 0.0) -> None:
        self._result = result
        self._due_s = due_s

    async def result(self) -> StepResult:
        """Returns the made-up result when it is due."""
        wait_s = self._due_s - time.monotonic() if self._due_s else 0.0
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        return self._result


class NullRunner:
    """A GroupRunner whose tokens, in 0..vocab_size-1, depend only on their position. It has no
    experts to place.

    step_s: time between two results, for a load on the front end that does not depend on the host's
    speed.
    """

    prepared = 0
    overtaken = False
    on_placement_result: Callable[[PlacementResult], None] | None = None

    def __init__(self, vocab_size: int = 1000, step_s: float = 0.0) -> None:
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._due_s = 0.0

    def start(self, plan: StepPlan) -> NullHandle:
        """Makes up the step's tokens."""
        position = (plan.starts_R + plan.counts_R)[plan.samples_R]
        tokens = (position.astype(np.int64) * 48271 % 65537 % self._vocab_size).astype(np.int32)
        if self._step_s:
            self._due_s = max(self._due_s, time.monotonic()) + self._step_s
        return NullHandle(StepResult(plan.step, tokens), self._due_s)

    def prepare_grammar(self, job: GrammarJob, on_done: Callable[[str], None]) -> None:
        """Report at once: tokens are made up, whatever a grammar allows."""
        on_done("")

    def drop_grammars(self, tickets: Sequence[int]) -> None:
        """Do nothing: no grammar is kept."""

    def close(self) -> None:
        """Does nothing: there are no resources."""

    async def join(self, join: Join) -> None:
        """Does nothing: there are no experts to connect with."""

    async def leave(self) -> None:
        """Does nothing: a running step ends by itself."""

    def prepare(self, placement: PlacementTable) -> None:
        """Reports that there is nothing to place."""
        if self.on_placement_result is not None:
            self.on_placement_result(
                PlacementResult(version=placement.version, error="the null runner has no experts")
            )

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        """Returns False for every step with tokens."""
        return plan is None
