"""The front end's sums over step records."""

from __future__ import annotations

import pytest

from moeserve.frontend.stats import FrontStats
from moeserve.messages import StepRecord


def record(comm_us: int, exposed_comm_us: int) -> StepRecord:
    return StepRecord(
        step=0,
        at_s=0.0,
        num_tokens=4,
        num_requests=1,
        num_running=1,
        num_waiting=0,
        num_free_blocks=1,
        num_blocks=2,
        comm_us=comm_us,
        exposed_comm_us=exposed_comm_us,
    )


def test_overlap_efficiency_is_over_all_steps() -> None:
    stats = FrontStats()
    assert stats.total.overlap_efficiency == 1.0, "nothing travelled, so nothing was exposed"
    stats.record_step(record(0, 0))
    assert stats.total.overlap_efficiency == 1.0
    stats.record_step(record(1000, 1000))
    assert stats.total.overlap_efficiency == 0.0
    stats.record_step(record(9000, 1000))
    assert stats.total.overlap_efficiency == pytest.approx(0.8)
    assert (stats.total.comm_s, stats.total.exposed_comm_s) == pytest.approx((0.01, 0.002))
