"""The times at which `moeserve bench` sends requests."""

from __future__ import annotations

import math
import statistics

import pytest

from moeserve.cli.bench.load import arrival_times


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0, math.inf])
def test_the_load_is_what_was_asked_for_every_seed(burstiness: float) -> None:
    for seed in range(5):
        times = arrival_times(200, 50.0, burstiness, seed)
        assert times[-1] == pytest.approx(200 / 50.0)
        assert times == sorted(times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    found = gaps(arrival_times(20_000, 10.0, burstiness, 1))
    spread = statistics.stdev(found) / statistics.mean(
        found
    )  # of a gamma distribution: 1 / sqrt(shape)
    assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_infinite_burstiness_is_even() -> None:
    assert gaps(arrival_times(4, 2.0, math.inf, 0)) == pytest.approx([0.5] * 4)


def test_the_same_seed_gives_the_same_times() -> None:
    first = arrival_times(10, 3.0, 1.0, 7)
    assert first == arrival_times(10, 3.0, 1.0, 7)
    assert first != arrival_times(10, 3.0, 1.0, 8)
