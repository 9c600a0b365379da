"""Counted steps are those of the scheduler: every time, every sum, every choice of an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest

from moeserve.config import Limits
from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.plan.counted import Uncountable, is_countable
from moeserve.plan.roofline import Shape
from moeserve.plan.simulator import Simulation
from moeserve.plan.trace import Arrival, RequestTrace

GROUPS = (KVGroup(FULL, 4, (0,)),)
LIMITS = Limits(
    max_num_seqs=6,
    max_num_batched_tokens=24,
    prefill_chunk=16,
    max_model_len=128,
    block_size=4,
    num_blocks=200,
    watermark_blocks=2,
    enable_prefix_caching=False,
)


class ByEverything:
    """Notes all shapes; no two kinds of steps take equally long."""

    windows = (None,)

    def __init__(self) -> None:
        self.seen: list[Sequence[Shape]] = []

    def __copy__(self) -> ByEverything:
        return self

    def seconds(self, shapes: Sequence[Shape]) -> float:
        self.seen.append(shapes)
        return sum(
            1
            + s.num_tokens / 7
            + s.num_rows / 11
            + s.num_samples / 13
            + sum(s.num_reads) / 1700
            + sum(s.num_pairs) / 9000
            for s in shapes
        )

    def host_seconds(self, shape: Shape) -> float:
        return shape.num_rows / 100


def both(
    trace: RequestTrace, limits: Limits, dp: int, together: bool
) -> tuple[Simulation, Simulation]:
    """Run the trace both ways, which must agree in everything."""
    costs = ByEverything(), ByEverything()
    counted, planned = (
        Simulation(limits, GROUPS, cost, dp, is_one_group=together, counted=way).run(trace)
        for cost, way in zip(costs, (True, False), strict=True)
    )
    assert costs[0].seen == costs[1].seen
    assert asdict(counted.steps) == asdict(planned.steps)
    for name in ("first_s", "last_s", "is_done", "num_tokens", "gap_counts"):
        np.testing.assert_array_equal(
            getattr(counted.clients, name), getattr(planned.clients, name), name
        )
    assert counted.clients.is_done.all()
    return counted, planned


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("dp", "together"), [(1, True), (3, True), (3, False)])
def test_counted_steps_are_those_of_the_scheduler(seed: int, dp: int, together: bool) -> None:
    """Prompts in chunks, of one token, answers of one token, more than fits into a step, all slots
    in use, pauses.
    """
    rng = random.Random(seed)
    at_s = 0.0
    arrivals = []
    for _ in range(150):
        at_s += rng.choice(
            (0.0, 0.0, rng.expovariate(dp / 9), 200.0 if rng.random() < 0.05 else 1.0)
        )
        arrivals.append(
            Arrival(
                at_s,
                rng.choice((1, rng.randint(1, 80), 17)),
                rng.choice((1, rng.randint(1, 40), 4)),
            )
        )
    depth = rng.choice((1, 2, 3))
    limits = replace(
        LIMITS, depth=depth, prefill_chunk=rng.choice((16, 24)), watermark_blocks=rng.choice((0, 9))
    )
    both(RequestTrace(arrivals), limits, dp, together)


def test_requests_that_wait_for_blocks_are_counted_until_one_is_preempted() -> None:
    trace = RequestTrace([Arrival(0.1 * i, 40, 2) for i in range(12)])
    counted, _ = both(trace, replace(LIMITS, num_blocks=40, watermark_blocks=10), 1, True)
    assert counted.steps.max_waiting > 6
    long = RequestTrace([Arrival(0.1 * i, 40, 60) for i in range(12)])
    limits = replace(LIMITS, num_blocks=60)
    assert Simulation(limits, GROUPS, ByEverything()).run(long).steps.num_preempted
    with pytest.raises(Uncountable):
        Simulation(limits, GROUPS, ByEverything(), counted=True).run(long)


def test_what_the_sums_do_not_know_is_not_counted() -> None:
    assert is_countable(LIMITS, GROUPS, (None,), 100)
    window = KVGroup(KVRule(window=8), 4, (1,))
    for limits, groups, windows, longest in (
        (replace(LIMITS, enable_prefix_caching=True), GROUPS, (None,), 100),
        (replace(LIMITS, itl_target_us=1e4), GROUPS, (None,), 100),
        (replace(LIMITS, num_drafts=2), GROUPS, (None,), 100),
        (replace(LIMITS, max_num_seqs=32), GROUPS, (None,), 100),
        (LIMITS, (*GROUPS, window), (None,), 100),
        (LIMITS, (window,), (None,), 100),
        (LIMITS, GROUPS, (None, 8), 100),
        (LIMITS, GROUPS, (None,), 128),
        (replace(LIMITS, num_blocks=20), GROUPS, (None,), 100),
    ):
        assert not is_countable(limits, groups, windows, longest)
