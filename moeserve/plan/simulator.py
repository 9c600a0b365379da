"""Engines in simulated time: the real schedulers and balancer; only the model's forward pass is an
estimate.

An engine turns as `engine/core.py` does: it plans up to `depth` steps ahead, and settles the oldest
one when no more can be planned. Engines of a group run a step if any of them has work
(engine/vote.py), and it lasts as long as the slowest of them needs; those with nothing to do run it
all the same. Requests are read between two steps.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from operator import itemgetter
from typing import Any

import numpy as np

from moeserve.cluster.balance import Balancer
from moeserve.config import Limits
from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import StepPlan, StepResult
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import RequestError
from moeserve.messages import Submit
from moeserve.plan.counted import CountedEngine, Settled
from moeserve.plan.report import Clients, Steps
from moeserve.plan.roofline import NOTHING, Shape, Spans, StepCost, shape_of
from moeserve.plan.trace import RequestTrace, prompt_of
from moeserve.sampling import TokenSampling

Observe = Callable[[int, StepPlan], object]  # (engine, its plan)


class Engine:
    """One engine with its real scheduler. inbox: requests that it has not read yet, and when they
    came. refused: is told (rank, rid, code) of requests that can never fit."""

    def __init__(
        self,
        rank: int,
        limits: Limits,
        groups: tuple[KVGroup, ...],
        spans: Spans,
        refused: Callable[[int, int, str], object],
    ) -> None:
        self.rank = rank
        self._spans = spans
        self._refused = refused
        self.scheduler = Scheduler(limits, groups)
        self.inbox: deque[tuple[float, Submit]] = deque()

    @property
    def num_waiting(self) -> int:
        """Requests that no step has begun."""
        return len(self.inbox) + self.scheduler.num_waiting

    def plan(self, now_s: float) -> tuple[Any, Shape]:
        """Read the requests that are there by now, and returns the next step and its size; None if
        there is none.
        """
        while self.inbox and self.inbox[0][0] <= now_s:
            _, submit = self.inbox.popleft()
            try:
                self.scheduler.submit(submit)
            except RequestError as error:
                self._refused(self.rank, submit.rid, error.code or "")
        plan = self.scheduler.plan() if self.scheduler.has_work else None
        return plan, NOTHING if plan is None else shape_of(plan, self._spans)

    def settle(self, plan: StepPlan, clients: Clients, now_s: float) -> Settled:
        """End the oldest step."""
        tokens = np.zeros(int(np.count_nonzero(plan.samples_R)), np.int32)
        output = self.scheduler.update_from_output(plan, StepResult(plan.step, tokens))
        rids = np.frombuffer(output.rids, "<i8")
        record = output.record
        if len(rids):
            clients.emitted(rids, now_s)
        assert record is not None
        return Settled(
            len(rids),
            0,
            output.cached,
            rids[np.frombuffer(output.finish, np.uint8) > 0].tolist(),
            record.num_tokens,
            record.num_free_blocks,
            record.prompt_tokens,
            record.num_preempted,
            record.cached_tokens,
        )


class Group:
    """Engines that step together. `advance` runs them up to a point in time."""

    def __init__(
        self,
        engines: Sequence[Engine | CountedEngine],
        cost: StepCost,
        depth: int,
        simulation: "Simulation",
        observe: Observe | None = None,
    ) -> None:
        self.engines = engines
        self._cost = cost
        self._depth = depth
        self._simulation = simulation
        self._observe = observe
        self._now_s = self._free_s = self._before_s = 0.0
        self._in_flight: deque[tuple[tuple[Any, ...], float, float]] = (
            deque()
        )  # plans, their end, host's time
        self._woken = False

    @property
    def next_s(self) -> float:
        """When the next thing happens: the end of the oldest step, or the start of one if the
        engines were woken.
        """
        return (
            self._in_flight[0][1] if self._in_flight else self._now_s if self._woken else math.inf
        )

    def wake(self, now_s: float) -> None:
        """Let engines that sleep read a request that came now."""
        if not self._in_flight:
            self._now_s = max(self._now_s, now_s)
            self._woken = True

    def advance(self, until_s: float) -> None:
        """Run steps until none ends before `until_s`. Requests that come by then are in the
        engines' inboxes.
        """
        while True:
            if len(self._in_flight) < self._depth and self._now_s < until_s and self._start():
                continue
            if not self._in_flight or self._in_flight[0][1] >= until_s:
                return
            plans, end_s, host_s = self._in_flight.popleft()
            self._now_s = max(self._now_s, end_s)
            went_on = 0
            clients = self._simulation.clients
            for engine, plan in zip(self.engines, plans, strict=True):
                if plan is not None:
                    found = engine.settle(plan, clients, self._now_s)
                    self._simulation.settled(engine.rank, found)
                    went_on += found.went_on
            clients.went_on(went_on, self._now_s - self._before_s)
            self._before_s = self._now_s
            self._now_s += host_s

    def _start(self) -> bool:
        """Plans, and starts the step if any engine has work. Returns False if none has."""
        self._woken = False
        plans, shapes = zip(*(engine.plan(self._now_s) for engine in self.engines), strict=True)
        busy = [shape for shape in shapes if shape.rows]
        if not busy:
            return False
        begin_s = max(self._now_s, self._free_s)
        took_s = self._cost.seconds(shapes)
        self._free_s = begin_s + took_s
        host_s = self._cost.host_seconds(max(busy, key=itemgetter(1)))  # of most rows
        self._in_flight.append((plans, self._free_s, host_s))
        steps = self._simulation.steps
        steps.number += len(shapes)
        steps.empty += len(shapes) - len(busy)
        steps.rows += sum(shape.rows for shape in busy)
        steps.tokens += sum(shape.tokens for shape in busy)
        if self._observe is not None:
            for engine, plan in zip(self.engines, plans, strict=True):
                if plan is not None:
                    self._observe(engine.rank, plan)
        return True


class Simulation:
    """One run of a trace. cost: of a step of all engines that step together.

    dp: engines, which form one group if `together`, or each its own. observe: is told of every
    plan. counted: steps are counted (plan/counted.py), and there are no plans to observe.
    """

    def __init__(
        self,
        limits: Limits,
        groups: tuple[KVGroup, ...],
        cost: StepCost,
        dp: int = 1,
        *,
        together: bool = True,
        observe: Observe | None = None,
        counted: bool = False,
    ) -> None:
        self.steps = Steps()
        engines: list[Engine | CountedEngine] = [
            CountedEngine(rank, limits)
            if counted
            else Engine(rank, limits, groups, cost.spans, self.refused)
            for rank in range(dp)
        ]
        parts = [engines] if together else [[engine] for engine in engines]
        # A cost may know its last step.
        self.groups = [Group(part, copy(cost), limits.depth, self, observe) for part in parts]
        self._home = {
            engine.rank: (group, engine) for group in self.groups for engine in group.engines
        }
        self._balancer = Balancer()
        for engine in engines if dp > 1 else ():
            self._balancer.open(engine.rank, limits.block_size, limits.num_blocks)
        self._num_blocks = limits.num_blocks
        self.clients = Clients(np.zeros(0))

    def run(self, trace: RequestTrace) -> "Simulation":
        """Simulate all requests to their ends, and returns itself. May be called once."""
        self.clients = Clients(np.array([arrival.at_s for arrival in trace.arrivals]))
        for rid, arrival in enumerate(trace.arrivals):
            for group in self.groups:
                if group.next_s < arrival.at_s:
                    group.advance(arrival.at_s)
            sampling = TokenSampling(seed=0, max_tokens=arrival.output)
            self._send(
                arrival.at_s,
                Submit(
                    rid=rid,
                    tokens=prompt_of(rid, arrival),
                    num_prompt=arrival.input,
                    sampling=sampling,
                ),
            )
        for group in self.groups:
            group.advance(math.inf)
        return self

    def _send(self, at_s: float, submit: Submit) -> None:
        rank = 0
        if len(self._home) > 1:
            rank = self._balancer.choose(submit, self._home)
            self._balancer.assign(submit, rank)
        group, engine = self._home[rank]
        engine.inbox.append((at_s, submit))
        group.wake(at_s)
        self.steps.most_waiting = max(self.steps.most_waiting, engine.num_waiting)

    def refused(self, rank: int, rid: int, code: str) -> None:
        """Count a request that an engine refused."""
        self.steps.refused[code] = self.steps.refused.get(code, 0) + 1
        self._balancer.end(rid)

    def settled(self, rank: int, found: Settled) -> None:
        """Take what a step came to."""
        steps = self.steps
        if found.prompt_tokens or found.preempted:
            steps.preempted += found.preempted
            steps.prompt_tokens += found.prompt_tokens
            steps.cached_tokens += found.cached_tokens
        if (free := found.free_blocks / (self._num_blocks - 1)) < steps.least_free:
            steps.least_free = free
        if found.ended:
            self.clients.done[found.ended] = True
        if len(self._home) > 1:
            self._balancer.stepped(rank, found.rows, found.tokens, found.free_blocks, found.cached)
            for rid in found.ended:
                self._balancer.end(rid)
