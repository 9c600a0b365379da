"""Simulated engines schedule as real ones do, and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moeserve.actor.actor import Inbox
from moeserve.config import Limits
from moeserve.engine.blocks import KVGroup
from moeserve.engine.core import EngineCore
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.engine.null_runner import NullHandle, NullRunner
from moeserve.engine.plan import StepPlan
from moeserve.engine.scheduler import Scheduler
from moeserve.messages import Drain, EngineIn, Submit
from moeserve.plan.report import summarise
from moeserve.plan.roofline import Shape
from moeserve.plan.simulator import Engine, Simulation
from moeserve.plan.trace import Arrival, RequestTrace, prompt_of
from moeserve.sampling import TokenSampling

LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    prefill_chunk=16,
    max_model_len=128,
    block_size=4,
    num_blocks=40,
    watermark_blocks=1,
)
GROUPS = (KVGroup(FULL, 4, (0,)), KVGroup(KVRule(window=8), 4, (1,)))
Batch = tuple[tuple[int, int, int, bool], ...]


class EverySecond:
    """Steps of one second."""

    windows = (None,)

    def seconds(self, shapes: Sequence[Shape]) -> float:
        return 1.0

    def host_seconds(self, shape: Shape) -> float:
        return 0.0


def batch_of(plan: StepPlan) -> Batch:
    rows = zip(plan.slots_R, plan.starts_R, plan.counts_R, plan.samples_R, strict=True)
    return tuple(
        (int(slot), int(start), int(count), bool(samples)) for slot, start, count, samples in rows
    )


def simulated(trace: RequestTrace, **options: Any) -> tuple[Simulation, list[Batch]]:
    batches: list[Batch] = []
    cost = options.pop("cost", EverySecond())
    limits = options.pop("limits", LIMITS)
    simulation = Simulation(
        limits, GROUPS, cost, observe=lambda rank, plan: batches.append(batch_of(plan)), **options
    )
    simulation.run(trace)
    return simulation, batches


def submit(rid: int, arrival: Arrival) -> Submit:
    sampling = TokenSampling(seed=0, max_tokens=arrival.output)
    return Submit(
        rid=rid, tokens=prompt_of(rid, arrival), num_prompt=arrival.input, sampling=sampling
    )


class RecordingRunner(NullRunner):
    """Notes each plan; requests come while a step of their number is started."""

    def __init__(self, inbox: Inbox[EngineIn], coming: dict[int, list[Submit]], last: int) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self._inbox = inbox
        self._coming = coming
        self._last = last

    def start(self, plan: StepPlan) -> NullHandle:
        for message in self._coming.pop(len(self.batches), ()):
            self._inbox.put(message)
        if len(self.batches) == self._last:
            self._inbox.put(Drain(60.0))
        self.batches.append(batch_of(plan))
        return super().start(plan)


def test_batches_are_those_of_the_real_engine() -> None:
    """Chunked prompts, shared beginnings, full slots, full blocks, and requests that come while
    others run.
    """
    first = [
        Arrival(0.0, 40, 12, (7,)),
        Arrival(0.0, 21, 30),
        Arrival(0.0, 40, 5, (7,)),
        Arrival(0.0, 3, 25),
    ]
    later = {
        5: [Arrival(4.5, 30, 20, (7,)), Arrival(4.5, 9, 9)],
        9: [Arrival(8.5, 12, 16), Arrival(8.5, 40, 3, (7,))],
    }
    order = [*first, *(arrival for arrivals in later.values() for arrival in arrivals)]
    messages = [submit(rid, arrival) for rid, arrival in enumerate(order)]
    inbox: Inbox[EngineIn] = Inbox("engine", limit=100)
    for message in messages[:4]:
        inbox.put(message)
    runner = RecordingRunner(inbox, {5: messages[4:6], 9: messages[6:]}, last=10)
    asyncio.run(EngineCore(Scheduler(LIMITS, GROUPS), runner, inbox, lambda out: None).run())

    # Plan n is made while step n - 1 begins, a second after the plan before it, but for the first
    # two.
    simulation, batches = simulated(RequestTrace(order))
    assert batches == runner.batches
    assert simulation.steps.num_preempted > 0
    assert simulation.steps.cached_tokens > 0


@pytest.mark.parametrize(("dp", "together"), [(1, True), (3, True), (3, False)])
def test_every_request_ends_with_all_its_tokens(dp: int, together: bool) -> None:
    trace = RequestTrace([Arrival(0.3 * i, 1 + 7 * i % 60, 1 + 11 * i % 40) for i in range(60)])
    simulation, _ = simulated(trace, dp=dp, is_one_group=together)
    clients = simulation.clients
    assert clients.is_done.all()
    assert clients.num_tokens.tolist() == [arrival.output for arrival in trace.arrivals]
    assert (clients.first_s > clients.at_s).all()
    assert clients.gap_counts.sum() == clients.num_tokens.sum() - len(trace.arrivals)
    for group in simulation.groups:
        for engine in group.engines:
            assert isinstance(engine, Engine)
            assert not engine.scheduler.has_work
            engine.scheduler.audit()


def test_an_engine_without_work_runs_the_steps_of_the_others() -> None:
    """One request on two engines: half of all steps are empty; alone, an engine does nothing."""
    one = RequestTrace([Arrival(0.0, 8, 10)])
    assert (
        simulated(one, dp=2)[0].steps.num_empty == simulated(one, dp=2)[0].steps.num_steps / 2 > 0
    )
    assert simulated(one, dp=2, is_one_group=False)[0].steps.num_empty == 0


def test_times_follow_from_steps() -> None:
    """A prompt of 20 in chunks of 16: two steps to the first token, one for each of the others."""
    simulation, _ = simulated(RequestTrace([Arrival(5.0, 20, 4)]))
    assert simulation.clients.first_s[0] == 7.0
    assert simulation.clients.last_s[0] == 10.0
    found = summarise(simulation.clients, simulation.steps, delay_s=0.5)
    assert found["p50_ttft_ms"] == 2500.0
    assert found["p50_itl_ms"] == pytest.approx(1000.0, rel=0.01)
    assert found["output_throughput"] == pytest.approx(4 / 5)


def test_the_slowest_engine_holds_up_the_others() -> None:
    class ByTokens(EverySecond):
        def seconds(self, shapes: Sequence[Shape]) -> float:
            return float(max(shape.num_tokens for shape in shapes))

    trace = RequestTrace([Arrival(0.0, 16, 2), Arrival(0.0, 4, 2)])
    both, _ = simulated(trace, dp=2, cost=ByTokens())
    alone, _ = simulated(trace, dp=2, cost=ByTokens(), is_one_group=False)
    assert both.clients.first_s[1] == 16.0
    assert alone.clients.first_s[1] == 4.0


def test_what_can_never_fit_is_refused_and_counted() -> None:
    simulation, _ = simulated(
        RequestTrace([Arrival(0.0, 120, 50), Arrival(0.0, 4, 4)]),
        limits=replace(LIMITS, num_blocks=12),
    )
    assert simulation.steps.refused == {"does_not_fit": 1}
    assert simulation.clients.is_done.tolist() == [False, True]
    assert summarise(simulation.clients, simulation.steps)["refused"] == 1
