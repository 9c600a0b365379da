"""When the front end proposes a placement, and how it handles an engine's answer."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest

from moeserve.messages import ExpertLoad, PlacementResult
from moeserve.moe.placement.placement import Placement
from moeserve.moe.placement.rebalance import MoveThresholds, Rebalancer
from moeserve.moe.placement.solve import balance, rank_loads

LAYERS = 3
EXPERTS = 16
RANKS = 4
EVEN = np.full((LAYERS, EXPERTS), 1000)
SKEWED = np.tile((16_000 / np.arange(1, EXPERTS + 1)).astype(int), (LAYERS, 1))


def report(counts: np.ndarray) -> ExpertLoad:
    return ExpertLoad(counts=counts.astype("<i8").tobytes(), num_layers=LAYERS, version=0)


def rebalancer(expert_bytes: int = 1000, **thresholds: float) -> Rebalancer:
    placement = Placement.initial(LAYERS, EXPERTS, RANKS, 4)
    return Rebalancer(placement, expert_bytes, thresholds=MoveThresholds(**thresholds))


def test_skew_is_answered_once_and_explained() -> None:
    one = rebalancer()
    one.note(report(SKEWED), 0.0)
    one.note(report(SKEWED), 1.0)  # another engine
    new = one.propose(2.0)
    assert new is not None
    assert new.version == 1
    assert one.pending is new
    assert "save" in one.why
    assert balance(rank_loads(SKEWED.astype(float), new)).min() > 0.95
    assert one.propose(3.0, force=True) is None  # never two at once
    assert one.why == "placement 1 is pending for 1 s"
    assert one.conclude(
        PlacementResult(version=1, layers=LAYERS, moved_bytes=5000, took_s=2.0), 4.0
    )
    assert one.current is new
    assert one.pending is None
    assert not one.conclude(
        PlacementResult(version=1, layers=LAYERS, moved_bytes=3000, took_s=2.0), 4.0
    )  # the second engine
    assert one.moved_bytes == 8000
    assert one.balance().min() > 0.95
    assert one.propose(1000.0) is None
    assert "not worth it" in one.why


def test_nothing_is_proposed_without_a_reason() -> None:
    one = rebalancer()
    assert one.propose(0.0) is None
    assert "0 tokens per expert" in one.why
    assert one.propose(0.0, force=True) is None
    one.note(report(EVEN), 1.0)
    assert one.propose(2.0) is None
    assert "save 0.0%" in one.why or "not worth it" in one.why


def test_the_cost_of_moving_is_weighed() -> None:
    dear = rebalancer(10**12)
    cheap = rebalancer(10**6)
    for one in (dear, cheap):
        one.note(report(SKEWED), 0.0)
    assert dear.propose(1.0) is None
    assert dear.why.endswith("not worth it")
    assert cheap.propose(1.0) is not None
    assert dear.propose(2.0) is None  # it does not solve again at once
    forced = dear.propose(3.0, force=True)
    assert forced is not None
    assert dear.why.startswith("requested anyway")


def test_a_measured_bandwidth_replaces_the_assumed_one() -> None:
    costs = []
    for took_s in (1.0, 5.0, 1e6):
        one = rebalancer(10**11, bytes_per_s=1e10)
        one.note(report(SKEWED), 0.0)
        assert one.propose(1.0, force=True) is not None
        one.conclude(
            PlacementResult(version=1, layers=LAYERS, moved_bytes=10**10, took_s=took_s), 2.0
        )
        one.note(report(SKEWED[:, ::-1] * 10), 3.0)
        one.propose(100.0, force=True)
        costs.append(float(one.why.split("costs ")[1].split(" s")[0]))
    assert costs[1] == pytest.approx(5 * costs[0], abs=0.3)
    assert costs[2] == pytest.approx(
        10 * costs[0], abs=0.6
    )  # it waited for steps: at least a tenth of the assumption


def test_old_load_fades() -> None:
    one = rebalancer(half_life_s=10.0)
    one.note(report(SKEWED), 0.0)
    one.note(report(0 * SKEWED), 10.0)
    assert np.allclose(one.load_LE, SKEWED / 2)
    one.note(report(EVEN * 100), 1000.0)
    assert np.allclose(one.load_LE, EVEN * 100)


def test_a_placement_given_up_leaves_the_layers_it_got(caplog: pytest.LogCaptureFixture) -> None:
    one = rebalancer()
    one.note(report(SKEWED), 0.0)
    new = one.propose(1.0)
    old = one.current
    assert new is not None
    with caplog.at_level(logging.WARNING):
        assert one.conclude(PlacementResult(version=1, layers=2, error="disk on fire"), 2.0)
        assert not one.conclude(
            PlacementResult(version=1, layers=2, error="another rank gave it up"), 2.0
        )
    assert len(caplog.records) == 1
    assert one.why == "placement 1 was aborted after 2 of 3 layers: disk on fire"
    assert (one.current.experts_LS[:2] == new.experts_LS[:2]).all()
    assert (one.current.experts_LS[2] == old.experts_LS[2]).all()
    assert one.current.version == 1
    assert one.propose(3.0) is None  # not at once
    later = one.propose(100.0, force=True)
    assert later is not None
    assert later.version == 2


def test_a_join_drops_what_is_on_its_way_and_versions_still_grow() -> None:
    one = rebalancer()
    one.note(report(SKEWED), 0.0)
    before = one.current
    assert one.propose(1.0) is not None
    one.joined(before)
    assert one.pending is None
    assert not one.conclude(PlacementResult(version=1, layers=LAYERS), 2.0)
    larger = one.next_rescaled(6, 4)
    assert (larger.version, larger.num_ranks, larger.experts_per_rank) == (2, 6, 4)
    one.joined(larger)
    again = one.propose(100.0, force=True)
    assert again is None or again.version == 3


def test_a_report_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        rebalancer().note(report(EVEN[:, 1:]), 0.0)


def test_it_runs_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import moeserve.moe.placement.rebalance"
    subprocess.run([sys.executable, "-c", code], check=True)
