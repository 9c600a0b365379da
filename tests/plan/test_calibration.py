"""Fits of measured steps, and calibration files."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moeserve.errors import ConfigError
from moeserve.plan.calibration import (
    KNOTS,
    TERMS,
    Calibration,
    MeasuredCost,
    StepSample,
    fit_calibration,
    fit_relative,
    limits_of,
    read_calibration,
    step_features,
    write_calibration,
)
from moeserve.plan.roofline import NO_WORK, Shape
from tests.plan.test_simulator import LIMITS

UNFITTED = Calibration(
    model="Model",
    dp=1,
    tp=1,
    limits=asdict(LIMITS),
    terms={},
    delay_s=0.0,
    num_samples=0,
    error=0.0,
)


def seconds(tokens: int, rows: int, reads: float, pairs: float) -> float:
    """A machine that is simple: 1 ms, 20 us a token, 5 us a request, 10 ns a position."""
    return 1e-3 + 20e-6 * tokens + 5e-6 * rows + 1e-8 * reads


def samples(number: int) -> list[StepSample]:
    rng = random.Random(0)
    found = []
    for _ in range(number):
        rows = rng.randint(1, 64)
        tokens = rows + rng.choice((0, 0, 100, 300))
        reads = rows * rng.uniform(16, 500)
        took_s = seconds(tokens, rows, reads, reads) * rng.uniform(0.97, 1.03)
        found.append(StepSample(tokens, rows, reads, reads, 0, 0, took_s, took_s + 1e-4))
    return found


def test_a_fit_predicts_steps_that_it_has_not_seen() -> None:
    cost = MeasuredCost(fit_calibration(samples(600), UNFITTED))
    for tokens, rows, reads in ((3, 3, 200.0), (48, 48, 10_000.0), (250, 20, 5_000.0)):
        found = cost.seconds([Shape(tokens, rows, rows, (reads,), (reads,))])
        assert found == pytest.approx(1e-4 + seconds(tokens, rows, reads, reads), rel=0.05)


def test_what_passes_between_two_steps_grows_with_requests_and_prompts() -> None:
    """Gaps are 50 us, 10 us per request, and 200 us with a prompt.

    Steps themselves do not vary.
    """
    found = []
    for i, plain in enumerate(samples(600)):
        device_s = seconds(plain.num_tokens, plain.num_rows, plain.num_reads, plain.num_pairs)
        gap_s = 50e-6 + 10e-6 * plain.num_rows + 200e-6 * (plain.num_tokens > plain.num_rows)
        late_s = (
            800e-6 if i % 10 == 0 else -800e-6 if i % 10 == 1 else 0.0
        )  # a late result, and what follows it
        period_s = None if i % 7 == 0 else device_s + gap_s + late_s
        found.append(msgspec.structs.replace(plain, device_s=device_s, period_s=period_s))
    terms = fit_calibration(found, UNFITTED).terms
    assert terms["between, a request"] == pytest.approx(10e-6, rel=0.3)
    assert terms["between, a prompt"] == pytest.approx(200e-6, rel=0.3)
    assert terms["between two steps"] == pytest.approx(50e-6, abs=60e-6)


def test_a_step_behind_a_prompt_takes_longer() -> None:
    found = [
        msgspec.structs.replace(
            s, is_after_prompt=i % 3 == 0, device_s=s.device_s + 3e-4 * (i % 3 == 0), period_s=None
        )
        for i, s in enumerate(samples(600))
    ]
    cost = MeasuredCost(fit_calibration(found, UNFITTED))
    decode, prompt = ([Shape(n, 8, 8, (900.0,), (900.0,))] for n in (8, 300))
    before = cost.seconds(decode)
    cost.seconds(prompt)
    assert cost.seconds(decode) == pytest.approx(before + 3e-4, rel=0.1)
    assert cost.seconds(decode) == before


def test_an_engine_beside_idle_ones_is_faster() -> None:
    found = [
        msgspec.structs.replace(
            s,
            other_tokens=busy * 8,
            num_others_busy=busy,
            device_s=s.device_s + 5e-4 * busy,
            period_s=None,
        )
        for i, s in enumerate(samples(600))
        for busy in [i % 2]
    ]
    cost = MeasuredCost(fit_calibration(found, UNFITTED))
    at_work = Shape(8, 8, 8, (900.0,), (900.0,))
    idle = Shape(0, 0, 0, (0.0,), (0.0,))
    assert cost.seconds([at_work] * 2) == pytest.approx(
        cost.seconds([at_work, idle]) + 5e-4, rel=0.1
    )


def test_steps_spread_as_measured_ones_did() -> None:
    """Every fifth result came late and the next one early: so they do in simulation, in pairs, with
    the same mean.
    """
    ratios = (1.8, 0.2, 1.0, 1.0, 1.0)
    found = [
        StepSample(8, 8, 2000.0, 2000.0, 0, 0, 2e-3, 2e-3 * ratios[i % 5]) for i in range(2000)
    ]
    first, again = (MeasuredCost(fit_calibration(found, UNFITTED)) for _ in range(2))
    shape = [Shape(8, 8, 8, (2000.0,), (2000.0,))]
    times = np.array([first.seconds(shape) for _ in range(2000)])
    assert times.tolist() == [again.seconds(shape) for _ in range(2000)]
    typical = float(np.median(times))
    assert np.percentile(times, 99) == pytest.approx(1.8 * typical, rel=0.1)
    assert times.mean() == pytest.approx(typical, rel=0.03)
    late = times > 1.5 * typical
    assert (times[1:][late[:-1]] < 0.5 * typical).mean() > 0.9


def test_interrupted_steps_do_not_count() -> None:
    interrupted = [msgspec.structs.replace(s, device_s=1.0, period_s=1.0001) for s in samples(10)]
    clean, disturbed = (
        fit_calibration(samples(600) + more, UNFITTED) for more in ([], interrupted)
    )
    shape = [Shape(48, 48, 48, (10_000.0,), (10_000.0,))]
    assert MeasuredCost(disturbed).seconds(shape) == pytest.approx(
        MeasuredCost(clean).seconds(shape), rel=0.03
    )


def test_no_term_is_negative() -> None:
    x = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert fit_relative(x, np.array([3.0, 2.0, 1.5])) == pytest.approx([2.0, 0.0], abs=0.2)


def test_tokens_lie_between_knots() -> None:
    assert step_features(3, 1, 0, 0, 0, 0)[:3].tolist() == [0.0, 0.5, 0.5]
    assert step_features(4, 1, 0, 0, 0, 0)[:4].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert step_features(2 * KNOTS[-1], 1, 0, 0, 0, 0)[len(KNOTS) - 1] == 2.0
    assert step_features(1, 7, 8, 9, 6, 5, True)[len(KNOTS) :].tolist() == [
        6.0,
        5.0,
        7.0,
        8.0,
        9.0,
        1.0,
    ]


def test_the_engine_with_most_tokens_decides() -> None:
    cost = MeasuredCost(fit_calibration(samples(600), UNFITTED))
    large = Shape(300, 10, 10, (900.0,), (900.0,))
    small = Shape(4, 4, 4, (90.0,), (90.0,))
    assert (
        cost.seconds([small, large])
        >= cost.seconds([large, NO_WORK])
        > cost.seconds([small, NO_WORK])
    )


def test_a_file_holds_all(tmp_path: Path) -> None:
    found = fit_calibration(samples(100), UNFITTED)
    write_calibration(tmp_path / "c.json", found)
    assert read_calibration(tmp_path / "c.json") == found
    assert limits_of(found) == LIMITS


def test_bad_files_and_too_few_samples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 measured steps are too few"):
        fit_calibration(samples(3), UNFITTED)
    path = tmp_path / "c.json"
    with pytest.raises(ConfigError, match="No such file"):
        read_calibration(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="--measure"):
        read_calibration(path)
    path.write_text(json.dumps({**msgspec.to_builtins(UNFITTED), "terms": {TERMS[0]: 1.0}}))
    with pytest.raises(ConfigError, match=r"lacks .*requests"):
        read_calibration(path)
