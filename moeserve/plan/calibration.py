"""Seconds of a step from measured ones: a table over tokens with a few terms beside it, what passes
between two steps, none of it negative and fitted so that relative errors are least; and how far
measured steps lay from that."""

import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeserve.config import Limits
from moeserve.errors import ConfigError
from moeserve.plan.roofline import Shape, Spans

F64 = NDArray[np.float64]
KNOTS = tuple(2**i for i in range(12))  # tokens of a step, between which its time is interpolated
ROUNDS = 4
INTERRUPTED = 5.0
SIDES = (
    "other engines' tokens",
    "other engines at work",
    "requests",
    "positions read",
    "query positions",
    "behind a prompt",
)
TERMS = (*(f"{n} tokens" for n in KNOTS), *SIDES)
GAPS = ("between two steps", "between, a request", "between, a prompt")
NEAR, ALIKE = (
    64,
    math.log(1.5),
)  # residuals that one is drawn from; times so close count as of the same kind of step
MOST_RESIDUALS = 4000


class StepSample(msgspec.Struct, frozen=True):
    """A measured step, as `features` takes it. others: tokens of the other engines, of which `busy`
    have any. device_s: in the model. period_s: from the result before to this one, where the engine
    had this step ready. behind: the step before had a prompt, and left other things in the caches.
    """

    tokens: int
    rows: int
    reads: float
    pairs: float
    others: int
    busy: int
    device_s: float
    period_s: float | None = None
    behind: bool = False


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """A file of `moeserve simulate --measure`.

    model: its architecture and what it was measured with. terms: seconds of each of TERMS, in the
    model, and of GAPS, between two steps. delay_s: from a client to the engine and back. error:
    median relative error of the fit. residuals: of steps in their order, the fitted seconds from
    result to result, and the measured share of them.
    """

    model: str
    dp: int
    tp: int
    limits: dict[str, int | float | bool]
    terms: dict[str, float]
    delay_s: float
    num_samples: int
    error: float
    residuals: list[tuple[float, float]] = []


class MeasuredCost:
    """The `StepCost` of a calibration, for one group of engines: each step takes the fitted time,
    times what a measured step of about that time took of its own. A late result is followed by an
    early one, so that the measured steps behind are gone through as long as they are of the same
    kind."""

    spans: Spans = (None,)

    def __init__(self, calibration: Calibration, seed: int = 0) -> None:
        self._terms = np.array([calibration.terms[name] for name in TERMS])
        self._gaps = np.array([calibration.terms[name] for name in GAPS])
        self._residuals = calibration.residuals
        self._by_time = sorted(range(len(self._residuals)), key=lambda i: self._residuals[i][0])
        self._times = np.array([self._residuals[i][0] for i in self._by_time])
        self._rng = random.Random(seed)
        self._last = -1
        self._behind = False

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """See `StepCost`: the slowest engine's time, and what passes before the next step."""
        most = max(shapes)  # by tokens
        others = sum(shape.tokens for shape in shapes) - most.tokens
        busy = sum(shape.tokens > 0 for shape in shapes) - 1
        x = features(
            most.tokens, most.rows, most.reads[0], most.pairs[0], others, busy, self._behind
        )
        self._behind = most.tokens > most.rows
        fitted_s = float(x @ self._terms + between(most.tokens, most.rows) @ self._gaps)
        return fitted_s * self._residual(fitted_s)

    def _residual(self, fitted_s: float) -> float:
        if not self._residuals or not fitted_s:
            return 1.0
        self._last += 1
        known = self._residuals[self._last][0] if self._last < len(self._residuals) else math.inf
        if not abs(math.log(known / fitted_s)) < ALIKE:
            size = len(self._times)
            first = max(
                0, min(int(np.searchsorted(self._times, fitted_s)) - NEAR // 2, size - NEAR)
            )
            self._last = self._by_time[self._rng.randrange(first, min(first + NEAR, size))]
        return self._residuals[self._last][1]

    def host_seconds(self, shape: Shape) -> float:
        """See `StepCost`: 0, as it is part of `seconds`."""
        return 0.0


def between(tokens: int, rows: int) -> F64:
    """Return the numbers that the seconds between two steps are linear in, in the order of GAPS."""
    return np.array((1.0, rows, tokens > rows))


def features(
    tokens: float,
    rows: float,
    reads: float,
    pairs: float,
    others: float,
    busy: float,
    behind: bool = False,
) -> F64:
    """Return the numbers that the seconds of a step are linear in, in the order of TERMS: those of
    the engine with most tokens, the others' tokens, and how many others have any, as those share
    the memory's rate. 3 tokens lie in the middle between 2 and 4; beyond the last knot time grows
    as tokens do."""
    knots = np.zeros(len(KNOTS))
    above = min(int(np.searchsorted(KNOTS, tokens)), len(KNOTS) - 1)
    if tokens > KNOTS[-1] or not above:
        knots[above] = tokens / KNOTS[above]
    else:
        low, high = KNOTS[above - 1 : above + 1]
        knots[above] = (tokens - low) / (high - low)
        knots[above - 1] = 1 - knots[above]
    return np.concatenate((knots, (others, busy, rows, reads, pairs, behind)))


def fit(samples: Sequence[StepSample], unfitted: Calibration) -> Calibration:
    """Return the calibration with terms, residuals and error of these samples. Raises ConfigError
    if there are too few."""
    if len(samples) < 2 * len(TERMS):
        raise ConfigError(f"{len(samples)} measured steps are too few to fit {len(TERMS)} terms")
    x = np.array(
        [features(s.tokens, s.rows, s.reads, s.pairs, s.others, s.busy, s.behind) for s in samples]
    )
    device_s = np.array([s.device_s for s in samples])
    terms = not_negative(x, device_s)
    gap_x = np.array([between(s.tokens, s.rows) for s in samples])
    period_s = np.array([math.nan if s.period_s is None else s.period_s for s in samples])
    usual = period_s < INTERRUPTED * (x @ terms)  # False for nan
    gaps = np.zeros(len(GAPS))
    if usual.any():
        gaps = least(gap_x[usual], (period_s - device_s)[usual], (x @ terms)[usual])
    fitted_s = x @ terms + gap_x @ gaps
    known = np.flatnonzero(period_s > 0)[:MOST_RESIDUALS]
    return msgspec.structs.replace(
        unfitted,
        terms=dict(zip((*TERMS, *GAPS), map(float, (*terms, *gaps)), strict=True)),
        num_samples=len(samples),
        error=float(np.median(np.abs(x @ terms / device_s - 1))),
        residuals=[
            (round(float(fitted_s[i]), 7), round(float(period_s[i] / fitted_s[i]), 3))
            for i in known
        ],
    )


def not_negative(x: F64, y: F64) -> F64:
    """Return a >= 0 such that the relative errors of x @ a are least, and 0 on average: they are
    relative to x @ a itself, which the last round gave. Steps that took much longer were
    interrupted, and do not count."""
    a = np.zeros(x.shape[1])
    size = y
    for _ in range(ROUNDS):
        usual = y < INTERRUPTED * size
        a = least(x[usual], y[usual], size[usual])
        size = np.maximum(x @ a, 1e-9)
    return a


def least(x: F64, y: F64, size: F64) -> F64:
    """Return a >= 0 such that the squares of (x @ a - y) / size are least, by leaving out negative
    terms.
    """
    a = np.zeros(x.shape[1])
    left = np.flatnonzero(x.any(0)).tolist()
    while left:
        columns = x[:, left] / size[:, None]
        norm = np.linalg.norm(columns, axis=0)
        found = np.linalg.lstsq(columns / norm, y / size, rcond=None)[0]
        if (found >= 0).all():
            a[left] = found / norm
            break
        left.pop(int(found.argmin()))
    return a


def limits_of(calibration: Calibration) -> Limits:
    """Return the limits that the measured engine had."""
    return msgspec.convert(calibration.limits, Limits)


def write(path: Path, calibration: Calibration) -> None:
    """Write a calibration. Raises ConfigError."""
    with ConfigError.instead_of(OSError, f"calibration {path}"):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")


def read(path: Path) -> Calibration:
    """Read a calibration. Raises ConfigError naming what is wrong."""
    remedy = "; write one by `moeserve simulate --measure FILE`"
    with ConfigError.instead_of((OSError, msgspec.DecodeError), f"--calibration {path}", remedy):
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
        limits_of(found)
    if missing := [name for name in (*TERMS, *GAPS) if name not in found.terms]:
        raise ConfigError(f"--calibration {path}: terms lacks {', '.join(missing)}; measure again")
    return found
