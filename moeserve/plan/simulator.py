"""Engines in simulated time: real schedulers and balancer, but a model of the forward pass's time.

An engine runs the loop of `engine/core.py`: it plans up to `depth` steps ahead, and settles the
oldest one when it cannot plan another. Engines of a group run a step if any of them has work
(engine/vote.py). The step takes as long as the slowest engine needs, and idle engines take part in
it. New requests are read between two steps.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
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

Observe = Callable[[int, StepPlan], object]  # called with an engine's rank and its plan


class Engine:
    """One engine with its real scheduler.

    `inbox` has the requests that the engine has not read yet, each with its time of arrival.
    `refused` is called with (rank, rid, error code) for requests that can never fit.
    """

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
        """Read the requests that have arrived, and return the next step and its size.

        The step is None if there is nothing to do.
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
            rows=len(rids),
            continued=0,
            cached=output.cached,
            ended=rids[np.frombuffer(output.finish, np.uint8) > 0].tolist(),
            tokens=record.num_tokens,
            free_blocks=record.num_free_blocks,
            prompt_tokens=record.prompt_tokens,
            preempted=record.num_preempted,
            cached_tokens=record.cached_tokens,
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
        self._now_s = 0.0  # the hosts' clock
        self._free_s = 0.0  # when the devices have finished all planned steps
        self._before_s = 0.0  # when the last step ended
        # Planned steps: the plan of each engine, the time of the end, the host's time afterwards.
        self._in_flight: deque[tuple[tuple[Any, ...], float, float]] = deque()
        self._woken = False

    @property
    def next_s(self) -> float:
        """The time of the next event: the end of the oldest step, or the start of one if woken."""
        if self._in_flight:
            _, end_s, _ = self._in_flight[0]
            return end_s
        return self._now_s if self._woken else math.inf

    def wake(self, now_s: float) -> None:
        """Wake idle engines, because a request has arrived now."""
        if not self._in_flight:
            self._now_s = max(self._now_s, now_s)
            self._woken = True

    def advance(self, until_s: float) -> None:
        """Run all steps that end before `until_s`.

        The requests that arrive before must already be in the engines' inboxes.
        """
        while True:
            if len(self._in_flight) < self._depth and self._now_s < until_s and self._start():
                continue
            if not self._in_flight or self._in_flight[0][1] >= until_s:
                return
            plans, end_s, host_s = self._in_flight.popleft()
            self._now_s = max(self._now_s, end_s)
            continued = 0
            clients = self._simulation.clients
            for engine, plan in zip(self.engines, plans, strict=True):
                if plan is not None:
                    found = engine.settle(plan, clients, self._now_s)
                    self._simulation.settled(engine.rank, found)
                    continued += found.continued
            clients.continued(continued, self._now_s - self._before_s)
            self._before_s = self._now_s
            self._now_s += host_s

    def _start(self) -> bool:
        """Plan and start a step. Return False if no engine has work."""
        self._woken = False
        plans, shapes = zip(*(engine.plan(self._now_s) for engine in self.engines), strict=True)
        busy = [shape for shape in shapes if shape.rows]
        if not busy:
            return False
        begin_s = max(self._now_s, self._free_s)
        took_s = self._cost.seconds(shapes)
        self._free_s = begin_s + took_s
        host_s = self._cost.host_seconds(max(busy, key=lambda shape: shape.rows))
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
    """One run of a trace.

    cost: the time of a step that a group of engines runs together.
    dp: the number of engines. They form one group if `together`, otherwise each is its own group.
    observe: called with every plan.
    counted: use the engines of plan/counted.py, which have no plans to observe.
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
        # Copy the cost for each group, because it may remember the last step.
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
        """Simulate all requests to their ends, and return this simulation. May be called once."""
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
        """Add the outcome of an engine's step to the totals, and report it to the balancer."""
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
