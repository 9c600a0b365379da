"""Engines in simulated time: real schedulers and balancer, but a model of the forward pass's time.

An engine runs the loop of `engine/core.py`: it plans up to `depth` steps ahead, and settles the
oldest step when it cannot plan another. Engines of a group run a step if any of them has work
(engine/vote.py). The step takes as long as the slowest engine needs, and idle engines take part in
it. New requests are read between two steps.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from moeserve.cluster.balance import Balancer
from moeserve.config import Limits
from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import StepPlan, StepResult
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import RequestError
from moeserve.messages import Submit
from moeserve.plan.counted import CountedEngine, StepOutcome
from moeserve.plan.report import Clients, Steps
from moeserve.plan.roofline import NO_WORK, Shape, StepCost, Windows, shape_of
from moeserve.plan.trace import RequestTrace, prompt_of
from moeserve.sampling import TokenSampling

Observe = Callable[[int, StepPlan], object]  # called with an engine's rank and its plan


class Engine:
    """One engine with its real scheduler.

    `inbox` has the requests that the engine has not read yet, each with its time of arrival.
    `on_refused` is called with (rank, rid, error code) for requests that can never fit.
    """

    def __init__(
        self,
        rank: int,
        limits: Limits,
        groups: tuple[KVGroup, ...],
        windows: Windows,
        on_refused: Callable[[int, int, str], object],
    ) -> None:
        self.rank = rank
        self._windows = windows
        self._on_refused = on_refused
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
                self._on_refused(self.rank, submit.rid, error.code or "")
        if not self.scheduler.has_work:
            return None, NO_WORK
        plan = self.scheduler.plan()
        if plan is None:
            return None, NO_WORK
        return plan, shape_of(plan, self._windows)

    def settle(self, plan: StepPlan, clients: Clients, now_s: float) -> StepOutcome:
        """End the oldest step, and record its tokens in `clients`."""
        num_samples = int(np.count_nonzero(plan.samples_R))
        token_ids = np.zeros(num_samples, np.int32)  # any values: no stop token is configured
        output = self.scheduler.update_from_output(plan, StepResult(plan.step, token_ids))
        rids = np.frombuffer(output.rids, "<i8")
        record = output.record
        if len(rids):
            clients.record_tokens(rids, now_s)
        assert record is not None
        return StepOutcome(
            num_sampled=len(rids),
            num_continued=0,
            cached=output.cached,
            ended_rids=rids[np.frombuffer(output.finish, np.uint8) > 0].tolist(),
            num_tokens=record.num_tokens,
            num_free_blocks=record.num_free_blocks,
            prompt_tokens=record.prompt_tokens,
            num_preempted=record.num_preempted,
            cached_tokens=record.cached_tokens,
        )


class _StepInFlight(NamedTuple):
    """A planned step of a group."""

    plans: tuple[Any, ...]  # by engine; None for engines without work
    end_s: float  # when the step ends
    host_s: float  # the host's time afterwards, until it can plan again


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
        self._devices_free_at_s = 0.0  # when the devices have finished all planned steps
        self._last_end_s = 0.0  # when the last step ended
        self._in_flight: deque[_StepInFlight] = deque()
        self._is_woken = False

    @property
    def next_s(self) -> float:
        """The time of the next event: the end of the oldest step, or the start of one if woken."""
        if self._in_flight:
            return self._in_flight[0].end_s
        return self._now_s if self._is_woken else math.inf

    def wake(self, now_s: float) -> None:
        """Wake idle engines, because a request has arrived now."""
        if not self._in_flight:
            self._now_s = max(self._now_s, now_s)
            self._is_woken = True

    def advance(self, until_s: float) -> None:
        """Run all steps that end before `until_s`.

        The requests that arrive before must already be in the engines' inboxes.
        """
        while True:
            if len(self._in_flight) < self._depth and self._now_s < until_s and self._start_step():
                continue
            if not self._in_flight or self._in_flight[0].end_s >= until_s:
                return
            step = self._in_flight.popleft()
            self._now_s = max(self._now_s, step.end_s)
            num_continued = 0
            clients = self._simulation.clients
            for engine, plan in zip(self.engines, step.plans, strict=True):
                if plan is not None:
                    outcome = engine.settle(plan, clients, self._now_s)
                    self._simulation.record(engine.rank, outcome)
                    num_continued += outcome.num_continued
            clients.count_continued(num_continued, gap_s=self._now_s - self._last_end_s)
            self._last_end_s = self._now_s
            self._now_s += step.host_s

    def _start_step(self) -> bool:
        """Plan and start a step. Return False if no engine has work."""
        self._is_woken = False
        plans, shapes = zip(*(engine.plan(self._now_s) for engine in self.engines), strict=True)
        busy_shapes = [shape for shape in shapes if shape.num_rows]
        if not busy_shapes:
            return False
        begin_s = max(self._now_s, self._devices_free_at_s)
        end_s = begin_s + self._cost.seconds(shapes)
        self._devices_free_at_s = end_s
        host_s = self._cost.host_seconds(max(busy_shapes, key=lambda shape: shape.num_rows))
        self._in_flight.append(_StepInFlight(plans, end_s, host_s))
        totals = self._simulation.steps
        totals.num_steps += len(shapes)
        totals.num_empty += len(shapes) - len(busy_shapes)
        totals.num_rows += sum(shape.num_rows for shape in busy_shapes)
        totals.num_tokens += sum(shape.num_tokens for shape in busy_shapes)
        if self._observe is not None:
            for engine, plan in zip(self.engines, plans, strict=True):
                if plan is not None:
                    self._observe(engine.rank, plan)
        return True


class Simulation:
    """One run of a trace.

    cost: the time of a step that a group of engines runs in lockstep.
    dp: the number of engines.
    is_one_group: whether all engines form one group. Otherwise each engine is a group of its own.
    observe: called with every plan.
    counted: whether to use the engines of plan/counted.py, which have no plans to observe.
    """

    def __init__(
        self,
        limits: Limits,
        groups: tuple[KVGroup, ...],
        cost: StepCost,
        dp: int = 1,
        *,
        is_one_group: bool = True,
        observe: Observe | None = None,
        counted: bool = False,
    ) -> None:
        self.steps = Steps()
        engines: list[Engine | CountedEngine] = [
            CountedEngine(rank, limits)
            if counted
            else Engine(rank, limits, groups, cost.windows, self.count_refused)
            for rank in range(dp)
        ]
        engines_of_groups = [engines] if is_one_group else [[engine] for engine in engines]
        # Copy the cost for each group, because it may remember the last step.
        self.groups = [
            Group(group_engines, copy(cost), limits.depth, self, observe)
            for group_engines in engines_of_groups
        ]
        self._by_rank = {
            engine.rank: (group, engine) for group in self.groups for engine in group.engines
        }
        self._balancer = Balancer()
        if dp > 1:  # a single engine needs no balancing
            for engine in engines:
                self._balancer.add_engine(engine.rank, limits.block_size, limits.num_blocks)
        self._num_blocks = limits.num_blocks
        self.clients = Clients(np.zeros(0))

    def run(self, trace: RequestTrace) -> "Simulation":
        """Simulate all requests to their ends, and return this simulation. May be called once."""
        self.clients = Clients(np.array([arrival.at_s for arrival in trace.arrivals]))
        for rid, arrival in enumerate(trace.arrivals):
            for group in self.groups:
                if group.next_s < arrival.at_s:
                    group.advance(arrival.at_s)
            submit = Submit(
                rid=rid,
                tokens=prompt_of(rid, arrival),
                num_prompt=arrival.input,
                sampling=TokenSampling(seed=0, max_tokens=arrival.output),
            )
            self._send(arrival.at_s, submit)
        for group in self.groups:
            group.advance(math.inf)
        return self

    def _send(self, at_s: float, submit: Submit) -> None:
        rank = 0
        if len(self._by_rank) > 1:
            rank = self._balancer.choose(submit, self._by_rank)
            self._balancer.assign(submit, rank)
        group, engine = self._by_rank[rank]
        engine.inbox.append((at_s, submit))
        group.wake(at_s)
        self.steps.max_waiting = max(self.steps.max_waiting, engine.num_waiting)

    def count_refused(self, rank: int, rid: int, code: str) -> None:
        """Count a request that an engine refused."""
        self.steps.refused[code] = self.steps.refused.get(code, 0) + 1
        self._balancer.remove_request(rid)

    def record(self, rank: int, outcome: StepOutcome) -> None:
        """Add the outcome of an engine's step to the totals, and report it to the balancer."""
        totals = self.steps
        if outcome.prompt_tokens or outcome.num_preempted:  # few steps have either
            totals.num_preempted += outcome.num_preempted
            totals.prompt_tokens += outcome.prompt_tokens
            totals.cached_tokens += outcome.cached_tokens
        free_share = outcome.num_free_blocks / (self._num_blocks - 1)  # without the null block
        if free_share < totals.min_free_share:
            totals.min_free_share = free_share
        if outcome.ended_rids:
            self.clients.is_done[outcome.ended_rids] = True
        if len(self._by_rank) > 1:
            self._balancer.on_step(
                rank,
                num_sampled=outcome.num_sampled,
                num_tokens=outcome.num_tokens,
                num_free_blocks=outcome.num_free_blocks,
                cached=outcome.cached,
            )
            for rid in outcome.ended_rids:
                self._balancer.remove_request(rid)
