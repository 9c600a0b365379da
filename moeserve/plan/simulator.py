"""Engines in simulated time: the real schedulers, balancer and votes; only the model's forward pass is an estimate.

An engine turns as `engine/core.py` does: it plans up to `depth` steps ahead, and settles the oldest one when no more
can be planned. Engines of a group vote before each step, and the step lasts as long as the slowest of them needs; those
with nothing to do run it all the same. Requests are read between two steps.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy

import numpy as np

from moeserve.cluster.balance import Balancer
from moeserve.config import Limits
from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import StepPlan, StepResult
from moeserve.engine.scheduler import Scheduler
from moeserve.engine.vote import Action, Vote, decide
from moeserve.errors import RequestError
from moeserve.messages import Ready, StepOutput, Submit
from moeserve.plan.report import Clients, Steps
from moeserve.plan.roofline import NOTHING, Shape, StepCost, shape_of
from moeserve.plan.trace import RequestTrace, prompt_of
from moeserve.sampling import TokenSampling

PAST = 2000  # steps of engines, that the others' steps are drawn from
Observe = Callable[[int, StepPlan], object]  # (engine, its plan)


class Engine:
    """One engine's scheduler, and the requests that it has not read yet."""

    def __init__(self, rank: int, limits: Limits, groups: tuple[KVGroup, ...]) -> None:
        self.rank = rank
        self.scheduler = Scheduler(limits, groups)
        self.inbox: deque[tuple[float, Submit]] = deque()

    def read(self, now_s: float, refused: Callable[[int, int, str], object]) -> None:
        """Submits the requests that are there by now."""
        while self.inbox and self.inbox[0][0] <= now_s:
            _, submit = self.inbox.popleft()
            try:
                self.scheduler.submit(submit)
            except RequestError as error:
                refused(self.rank, submit.rid, error.code or "")


class Group:
    """Engines that step together. `advance` runs them up to a point in time."""

    def __init__(
        self, engines: Sequence[Engine], cost: StepCost, simulation: Simulation, observe: Observe | None = None
    ) -> None:
        self.engines = engines
        self._cost, self._simulation, self._observe = cost, simulation, observe
        self._depth = engines[0].scheduler.limits.depth
        self._now_s = self._free_s = self._took_s = 0.0
        self._in_flight: deque[tuple[list[StepPlan | None], float, float]] = deque()  # plans, their end, host's time
        self._num_others = round(len(engines) * (simulation.copies - 1))
        self._past: deque[Shape] = deque(maxlen=PAST)
        self._rng = random.Random(0)
        self._num_votes = 0
        self._woken = False

    @property
    def next_s(self) -> float:
        """When the next thing happens: the end of the oldest step, or the start of one if the engines were woken."""
        return self._in_flight[0][1] if self._in_flight else self._now_s if self._woken else math.inf

    def wake(self, now_s: float) -> None:
        """Lets engines that sleep read a request that came now."""
        if not self._in_flight:
            if self._num_others and self._took_s:  # so do the others
                slept = len(self.engines) * (now_s - self._now_s) / self._took_s
                self._past.extend([NOTHING] * min(PAST, int(slept)))
            self._now_s = max(self._now_s, now_s)
            self._woken = True

    def advance(self, until_s: float) -> None:
        """Runs steps until none ends before `until_s`. Requests that come by then are in the engines' inboxes."""
        while True:
            if len(self._in_flight) < self._depth and self._now_s < until_s and self._start():
                continue
            if not self._in_flight or self._in_flight[0][1] >= until_s:
                return
            plans, end_s, host_s = self._in_flight.popleft()
            self._now_s = max(self._now_s, end_s)
            for engine, plan in zip(self.engines, plans, strict=True):
                if plan is not None:
                    self._settle(engine, plan)
            self._now_s += host_s

    def _start(self) -> bool:
        """Plans and votes; starts the step that was agreed. Returns False if no engine has anything to do."""
        self._woken = False
        plans: list[StepPlan | None] = []
        for engine in self.engines:
            engine.read(self._now_s, self._simulation.refused)
            plans.append(engine.scheduler.plan() if engine.scheduler.has_work else None)
        shapes = [NOTHING if plan is None else shape_of(plan, self._cost.spans) for plan in plans]
        votes = [Vote(self._num_votes, 0, s.rows > 0, s.tokens, requests=s.rows) for s in shapes]
        self._num_votes += 1
        if decide(votes).action is not Action.RUN:
            return False
        busy = [shape for shape in shapes if shape.rows]
        begin_s = max(self._now_s, self._free_s)
        took_s = self._cost.seconds([*shapes, *self._others()])
        self._past.extend(shapes)
        self._took_s, self._free_s = took_s, begin_s + took_s
        self._in_flight.append((plans, self._free_s, max(map(self._cost.host_seconds, busy))))
        steps = self._simulation.steps
        steps.number += len(shapes)
        steps.empty += len(shapes) - len(busy)
        steps.busy_s += took_s
        steps.rows += sum(shape.rows for shape in busy)
        steps.tokens += sum(shape.tokens for shape in busy)
        if self._observe is not None:
            for engine, plan in zip(self.engines, plans, strict=True):
                if plan is not None:
                    self._observe(engine.rank, plan)
        return True

    def _others(self) -> list[Shape]:
        """Returns what the engines that are not simulated do in this step: as much as these did lately."""
        if not self._num_others or not self._past:
            return []
        return self._rng.choices(tuple(self._past), k=self._num_others)

    def _settle(self, engine: Engine, plan: StepPlan) -> None:
        tokens = np.zeros(int(np.count_nonzero(plan.samples_R)), np.int32)
        output = engine.scheduler.update_from_output(plan, StepResult(plan.step, tokens))
        self._simulation.settled(engine.rank, output, self._now_s)


class Simulation:
    """One run of a trace. cost: of a step of all engines that step together.

    dp: engines that are simulated, which form one group if `together`, or each its own. copies: engines that each of
    them stands for: the others' steps are drawn from theirs of late. Requests are those of the
    simulated ones. observe: is told of every plan.
    """

    def __init__(
        self, limits: Limits, groups: tuple[KVGroup, ...], cost: StepCost, dp: int = 1, *, together: bool = True,
        copies: float = 1.0, observe: Observe | None = None,
    ) -> None:  # fmt: skip
        self.steps, self.copies = Steps(), copies
        engines = [Engine(rank, limits, groups) for rank in range(dp)]
        parts = [engines] if together else [[engine] for engine in engines]
        self.groups = [Group(part, copy(cost), self, observe) for part in parts]  # a cost may know its last step
        self._home = {engine.rank: (group, engine) for group in self.groups for engine in group.engines}
        self._balancer = Balancer()
        for engine in engines if dp > 1 else ():
            self._balancer.open(engine.rank, _ready(limits))
        self._num_blocks = limits.num_blocks
        self.clients = Clients(np.zeros(0))

    def run(self, trace: RequestTrace) -> None:
        """Simulates all requests to their ends. May be called once."""
        self.clients = Clients(np.array([arrival.at_s for arrival in trace.arrivals]))
        for rid, arrival in enumerate(trace.arrivals):
            for group in self.groups:
                if group.next_s < arrival.at_s:
                    group.advance(arrival.at_s)
            sampling = TokenSampling(seed=0, max_tokens=arrival.output)
            self._send(arrival.at_s, Submit(
                rid=rid, tokens=prompt_of(rid, arrival), num_prompt=arrival.input, sampling=sampling
            ))  # fmt: skip
        for group in self.groups:
            group.advance(math.inf)

    def _send(self, at_s: float, submit: Submit) -> None:
        rank = 0
        if len(self._home) > 1:
            rank = self._balancer.choose(submit, self._home)
            self._balancer.assign(submit, rank)
        group, engine = self._home[rank]
        engine.inbox.append((at_s, submit))
        group.wake(at_s)
        waiting = len(engine.inbox) + engine.scheduler.num_waiting
        self.steps.most_waiting = max(self.steps.most_waiting, waiting)

    def refused(self, rank: int, rid: int, code: str) -> None:
        """Counts a request that an engine refused."""
        self.steps.refused[code] = self.steps.refused.get(code, 0) + 1
        self._balancer.end(rid)

    def settled(self, rank: int, output: StepOutput, now_s: float) -> None:
        """Takes the output of a step."""
        rids = np.frombuffer(output.rids, "<i8")
        if len(rids):
            self.clients.emitted(rids, now_s)
        record, ended = output.record, rids[np.frombuffer(output.finish, np.uint8) > 0]
        assert record is not None
        steps = self.steps
        steps.preempted += record.num_preempted
        steps.prompt_tokens += record.prompt_tokens
        steps.cached_tokens += record.cached_tokens
        steps.least_free = min(steps.least_free, record.num_free_blocks / (self._num_blocks - 1))
        self.clients.done[ended] = True
        if len(self._home) > 1:
            self._balancer.note(rank, output)
            for rid in ended.tolist():
                self._balancer.end(rid)


def _ready(limits: Limits) -> Ready:
    """Returns what an engine says of itself, as far as the balancer reads it."""
    return Ready(
        pid=0, architecture="", dtype="", device="", vocab_size=0, max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs, num_blocks=limits.num_blocks, block_size=limits.block_size, eos_token_ids=(),
        num_params=0, num_active_params=0, weight_bytes=0, startup_s=0.0,
    )  # fmt: skip
