"""A model of step times that is fitted to measured steps, for `moeserve simulate --calibration`.

The time of a step is linear in its features: a table over tokens, plus a few more terms. The time
between two steps is fitted in the same way. Coefficients are not negative and minimize relative
errors. The residuals are kept, and the simulation replays them.
"""

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
KNOTS = tuple(2**i for i in range(12))  # tokens per step; times between them are interpolated
ROUNDS = 4  # of iteratively reweighted least squares
INTERRUPTED = 5.0  # steps that took this many times the expected time are ignored
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
NEAR = 64  # number of residuals, of steps with the nearest times, from which one is drawn
ALIKE = math.log(1.5)  # log ratio up to which two times count as the same kind of step
MOST_RESIDUALS = 4000


class StepSample(msgspec.Struct, frozen=True):
    """A measured step: the arguments of `features`, and its times."""

    tokens: int  # of the engine with the most tokens
    rows: int  # requests of that engine
    reads: float  # KV positions that its rows read
    pairs: float  # (query, position) pairs of its attention
    others: int  # tokens of all other engines
    busy: int  # number of other engines that have tokens
    device_s: float  # time of the forward pass
    # Time from the previous result to this one, None if the engine did not have this step queued.
    period_s: float | None = None
    behind: bool = False  # the previous step had a prompt, so CPU caches hold other data


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The file that `moeserve simulate --measure` writes."""

    model: str  # architecture
    dp: int
    tp: int
    limits: dict[str, int | float | bool]  # `Limits` of a measured engine
    terms: dict[str, float]  # seconds of each of TERMS (forward pass) and GAPS (between two steps)
    delay_s: float  # from a client to the engine and back
    num_samples: int
    error: float  # median relative error of the fit
    # For each step, in measured order: fitted seconds from result to result, and the ratio of the
    # measured time to them.
    residuals: list[tuple[float, float]] = []


class MeasuredCost:
    """The `StepCost` of a calibration, for one group of engines.

    Each step takes the fitted time multiplied by the residual of a measured step with about that
    time. Residuals of consecutive steps are correlated, because an early result follows a late one.
    So measured steps are replayed in order, as long as their times match; otherwise a new start is
    drawn at random.
    """

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
        """Return the slowest engine's step time plus the time until the next step."""
        most = max(shapes)  # the engine with the most tokens
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
        """Return 0, because `seconds` includes the host's time."""
        return 0.0


def between(tokens: int, rows: int) -> F64:
    """Return the features of the time between two steps, in the order of GAPS."""
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
    """Return the features of a step's time, in the order of TERMS.

    The arguments are those of `StepSample`. Other engines count because they share the memory
    bandwidth. Tokens are interpolated between KNOTS: 3 is half of 2 and half of 4. After the last
    knot, time is proportional to tokens.
    """
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
    """Return `unfitted` with the terms, residuals and error of these samples.

    Raises ConfigError if there are too few of them.
    """
    if len(samples) < 2 * len(TERMS):
        raise ConfigError(
            f"{len(samples)} measured steps are too few to fit {len(TERMS)} terms; at least"
            f" {2 * len(TERMS)} are needed"
        )
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
    """Return a >= 0 that minimizes the squared relative errors of x @ a.

    Errors are relative to the prediction of the previous round (iteratively reweighted least
    squares), so that they are 0 on average. Steps that took much longer were interrupted and are
    ignored.
    """
    a = np.zeros(x.shape[1])
    size = y
    for _ in range(ROUNDS):
        usual = y < INTERRUPTED * size
        a = least(x[usual], y[usual], size[usual])
        size = np.maximum(x @ a, 1e-9)
    return a


def least(x: F64, y: F64, size: F64) -> F64:
    """Return a >= 0 that minimizes the squares of (x @ a - y) / size.

    As long as there are negative coefficients, the most negative one is set to 0.
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
    """Return the limits of the measured engine."""
    return msgspec.convert(calibration.limits, Limits)


def write(path: Path, calibration: Calibration) -> None:
    """Write a calibration. Raises ConfigError."""
    with ConfigError.instead_of(OSError, f"calibration {path}"):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")


def read(path: Path) -> Calibration:
    """Read a calibration. Raises ConfigError."""
    remedy = "; write one with `moeserve simulate --measure FILE`"
    with ConfigError.instead_of((OSError, msgspec.DecodeError), f"--calibration {path}", remedy):
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
        limits_of(found)
    if missing := [name for name in (*TERMS, *GAPS) if name not in found.terms]:
        raise ConfigError(f"--calibration {path}: terms lacks {', '.join(missing)}; measure again")
    return found
