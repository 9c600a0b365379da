"""Takes a trace: asks every rank for its spans of one step, and collects the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from moeserve.cluster.link import EngineLink
from moeserve.cluster.view import FleetView
from moeserve.errors import Conflict
from moeserve.messages import Traced, TraceNext

LATE_S = 2.0  # between the first rank's answer and the last one's

Rank = tuple[int, int]  # data-parallel, tensor-parallel


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one step by rank, in rank order. missing: the ranks that did not answer in time."""

    ranks: Sequence[Traced]
    missing: Sequence[Rank]


class Tracing:
    """One trace at a time."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._answers: _Answers | None = None

    async def take(self, view: FleetView, timeout_s: float) -> Trace:
        """Traces the next step. Engines that form a group are traced in the same step, others each in its own.

        Raises Conflict if no step runs within timeout_s seconds, or another trace is being taken.
        """
        if self._answers is not None:
            raise Conflict("another trace is being taken")
        serving = [engine.rank for engine in view.engines if engine.state in ("serving", "draining")]
        if not serving or (view.together and not view.complete):
            raise Conflict("the engines do not serve at the moment")
        wanted = {(rank, tp_rank) for rank in serving for tp_rank in range(view.tp)}
        answers = self._answers = _Answers(wanted, view.together)
        try:
            self._link.send(TraceNext())
            with suppress(TimeoutError):
                await asyncio.wait_for(answers.some.wait(), timeout_s)
                await asyncio.wait_for(answers.all.wait(), LATE_S)
        finally:
            self._answers = None
        ranks = answers.fullest
        if not ranks:
            raise Conflict(f"no step ran within {timeout_s:g} s; send a request meanwhile, or wait longer")
        return Trace([ranks[rank] for rank in sorted(ranks)], sorted(wanted - ranks.keys()))

    def hear(self, msg: Traced) -> None:
        """Adds one rank's answer; one that comes too late is dropped."""
        if self._answers is not None:
            self._answers.add(msg)


class _Answers:
    """Answers by step: a step that was asked for earlier, when nothing ran, may still come."""

    def __init__(self, wanted: set[Rank], together: bool) -> None:
        self.some, self.all = asyncio.Event(), asyncio.Event()
        self._wanted = wanted
        self._together = together
        self._steps: dict[int, dict[Rank, Traced]] = {}

    def add(self, msg: Traced) -> None:
        rank = msg.dp_rank, msg.tp_rank
        if rank in self._wanted:
            answers = self._steps.setdefault(msg.step if self._together else 0, {})
            answers[rank] = msg
            self.some.set()
            if answers.keys() == self._wanted:
                self.all.set()

    @property
    def fullest(self) -> dict[Rank, Traced]:
        """The answers of the step that most ranks answered for."""
        return max(self._steps.values(), key=len, default={})
