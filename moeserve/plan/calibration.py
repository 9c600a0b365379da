"""A model of step times that is fitted to measured steps, for `moeserve simulate --calibration`.

The time of a step is linear in its features: the interpolation weights of its number of tokens
between KNOTS, and a few more features. The time between two steps is fitted in the same way. The
coefficients are not negative, and minimize relative errors. The residuals are kept, and the
simulation replays them.
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
from moeserve.plan.roofline import Shape, Windows

F64 = NDArray[np.float64]
KNOTS = tuple(2**i for i in range(12))  # tokens per step; times between them are interpolated
NUM_ROUNDS = 4  # of iteratively reweighted least squares
INTERRUPTED_FACTOR = 5.0  # steps that took this many times the expected time are ignored
# Names of the features, and so of their coefficients (seconds).
OTHER_TERMS = (
    "other engines' tokens",
    "other engines at work",
    "requests",
    "positions read",
    "query positions",
    "behind a prompt",  # in the step before
)
TERMS = (*(f"{n} tokens" for n in KNOTS), *OTHER_TERMS)
GAP_TERMS = ("between two steps", "between, a request", "between, a prompt")
NUM_NEAREST = 64  # a residual is drawn from those of so many steps with the nearest times
MAX_LOG_RATIO = math.log(1.5)  # steps whose times differ by less are of the same kind
MAX_RESIDUALS = 4000


class StepSample(msgspec.Struct, frozen=True):
    """A measured step: the arguments of `step_features`, and its times."""

    # Of the engine with the most tokens:
    num_tokens: int
    num_rows: int  # requests
    num_reads: float  # KV positions that its rows read
    num_pairs: float  # (query, position) pairs of its attention
    # Of all other engines:
    other_tokens: int
    num_others_busy: int  # engines that have tokens
    device_s: float  # duration of the forward pass
    # Time from the previous result to this one, None if the engine did not have this step queued.
    period_s: float | None = None
    # Whether the previous step had prompt tokens, so that CPU caches hold other data.
    is_after_prompt: bool = False


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The file that `moeserve simulate --measure` writes."""

    model: str  # architecture
    dp: int
    tp: int
    limits: dict[str, int | float | bool]  # `Limits` of a measured engine
    # Seconds of each of TERMS (forward pass) and GAP_TERMS (between two steps).
    terms: dict[str, float]
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
    So the residuals are replayed in measured order, as long as the times of the measured steps
    match. Otherwise the replay goes on at a random one that matches.
    """

    windows: Windows = (None,)

    def __init__(self, calibration: Calibration, seed: int = 0) -> None:
        self._terms = np.array([calibration.terms[name] for name in TERMS])
        self._gap_terms = np.array([calibration.terms[name] for name in GAP_TERMS])
        self._residuals = calibration.residuals
        # Indices of the residuals in the order of their fitted times, and these times.
        self._by_time = sorted(range(len(self._residuals)), key=lambda i: self._residuals[i][0])
        self._sorted_times_s = np.array([self._residuals[i][0] for i in self._by_time])
        self._rng = random.Random(seed)
        self._last_index = -1  # of the residual that was replayed last
        self._is_after_prompt = False

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Return the slowest engine's step time plus the time until the next step."""
        most = max(shapes)  # the first field counts first: the shape with the most tokens
        x = step_features(
            num_tokens=most.num_tokens,
            num_rows=most.num_rows,
            num_reads=most.num_reads[0],
            num_pairs=most.num_pairs[0],
            other_tokens=sum(shape.num_tokens for shape in shapes) - most.num_tokens,
            num_others_busy=sum(shape.num_tokens > 0 for shape in shapes) - 1,
            is_after_prompt=self._is_after_prompt,
        )
        self._is_after_prompt = most.num_tokens > most.num_rows
        gap_x = gap_features(most.num_tokens, most.num_rows)
        fitted_s = float(x @ self._terms + gap_x @ self._gap_terms)
        return fitted_s * self._next_residual(fitted_s)

    def _next_residual(self, fitted_s: float) -> float:
        """Return the ratio of measured to fitted time for a step with this fitted time."""
        if not self._residuals or not fitted_s:
            return 1.0
        self._last_index += 1
        next_s = math.inf  # fitted time of the step that was measured next
        if self._last_index < len(self._residuals):
            next_s = self._residuals[self._last_index][0]
        if not abs(math.log(next_s / fitted_s)) < MAX_LOG_RATIO:
            # Draw one of the NUM_NEAREST, half of them with smaller times, if there are so many.
            num_residuals = len(self._sorted_times_s)
            position = int(np.searchsorted(self._sorted_times_s, fitted_s))
            first = max(0, min(position - NUM_NEAREST // 2, num_residuals - NUM_NEAREST))
            end = min(first + NUM_NEAREST, num_residuals)
            self._last_index = self._by_time[self._rng.randrange(first, end)]
        return self._residuals[self._last_index][1]

    def host_seconds(self, shape: Shape) -> float:
        """Return 0, because `seconds` includes the host's time."""
        return 0.0


def gap_features(num_tokens: int, num_rows: int) -> F64:
    """Return the features of the time between two steps, in the order of GAP_TERMS."""
    return np.array((1.0, num_rows, num_tokens > num_rows))


def step_features(
    num_tokens: float,
    num_rows: float,
    num_reads: float,
    num_pairs: float,
    other_tokens: float,
    num_others_busy: float,
    is_after_prompt: bool = False,
) -> F64:
    """Return the features of a step's time, in the order of TERMS.

    The arguments are fields of `StepSample`. Other engines count because they share the memory
    bandwidth. Tokens are interpolated between KNOTS: 3 tokens have the weight 0.5 at the knots 2
    and 4. After the last knot, time is proportional to tokens.
    """
    knots = np.zeros(len(KNOTS))
    above = min(int(np.searchsorted(KNOTS, num_tokens)), len(KNOTS) - 1)
    if num_tokens > KNOTS[-1] or not above:
        knots[above] = num_tokens / KNOTS[above]
    else:
        low, high = KNOTS[above - 1 : above + 1]
        knots[above] = (num_tokens - low) / (high - low)
        knots[above - 1] = 1 - knots[above]
    others = (other_tokens, num_others_busy, num_rows, num_reads, num_pairs, is_after_prompt)
    return np.concatenate((knots, others))


def fit_calibration(samples: Sequence[StepSample], unfitted: Calibration) -> Calibration:
    """Return `unfitted` with the terms, residuals and error of these samples.

    Raises ConfigError if there are too few of them.
    """
    if len(samples) < 2 * len(TERMS):
        raise ConfigError(
            f"{len(samples)} measured steps are too few to fit {len(TERMS)} terms; at least"
            f" {2 * len(TERMS)} are needed"
        )
    x = np.array(
        [
            step_features(
                num_tokens=sample.num_tokens,
                num_rows=sample.num_rows,
                num_reads=sample.num_reads,
                num_pairs=sample.num_pairs,
                other_tokens=sample.other_tokens,
                num_others_busy=sample.num_others_busy,
                is_after_prompt=sample.is_after_prompt,
            )
            for sample in samples
        ]
    )
    device_s = np.array([sample.device_s for sample in samples])
    terms = fit_relative(x, device_s)
    gap_x = np.array([gap_features(sample.num_tokens, sample.num_rows) for sample in samples])
    period_s = np.array(
        [math.nan if sample.period_s is None else sample.period_s for sample in samples]
    )
    is_usual = period_s < INTERRUPTED_FACTOR * (x @ terms)  # False for nan, an unknown period
    gap_terms = np.zeros(len(GAP_TERMS))
    if is_usual.any():
        gap_terms = solve_not_negative(
            gap_x[is_usual], (period_s - device_s)[is_usual], (x @ terms)[is_usual]
        )
    fitted_s = x @ terms + gap_x @ gap_terms
    has_period = np.flatnonzero(period_s > 0)[:MAX_RESIDUALS]
    return msgspec.structs.replace(
        unfitted,
        terms=dict(zip((*TERMS, *GAP_TERMS), map(float, (*terms, *gap_terms)), strict=True)),
        num_samples=len(samples),
        error=float(np.median(np.abs(x @ terms / device_s - 1))),
        residuals=[
            (round(float(fitted_s[i]), 7), round(float(period_s[i] / fitted_s[i]), 3))
            for i in has_period
        ],
    )


def fit_relative(x: F64, y: F64) -> F64:
    """Return a >= 0 that minimizes the squared relative errors of x @ a, compared with y.

    Errors are relative to the prediction of the previous round (iteratively reweighted least
    squares), so that they are 0 on average. Steps that took much longer were interrupted and are
    ignored.
    """
    a = np.zeros(x.shape[1])
    predicted = y
    for _ in range(NUM_ROUNDS):
        is_usual = y < INTERRUPTED_FACTOR * predicted
        a = solve_not_negative(x[is_usual], y[is_usual], predicted[is_usual])
        predicted = np.maximum(x @ a, 1e-9)
    return a


def solve_not_negative(x: F64, y: F64, size: F64) -> F64:
    """Return a >= 0 that minimizes the squares of (x @ a - y) / size.

    As long as there are negative coefficients, the most negative one is set to 0.
    """
    a = np.zeros(x.shape[1])
    candidates = np.flatnonzero(x.any(0)).tolist()  # columns whose coefficients are not 0
    while candidates:
        columns = x[:, candidates] / size[:, None]
        norms = np.linalg.norm(columns, axis=0)  # without them, lstsq would be ill-conditioned
        solution = np.linalg.lstsq(columns / norms, y / size, rcond=None)[0]
        if (solution >= 0).all():
            a[candidates] = solution / norms
            break
        candidates.pop(int(solution.argmin()))
    return a


def limits_of(calibration: Calibration) -> Limits:
    """Return the limits of the measured engine."""
    return msgspec.convert(calibration.limits, Limits)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration. Raises ConfigError."""
    with ConfigError.instead_of(OSError, f"calibration {path}"):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")


def read_calibration(path: Path) -> Calibration:
    """Read a calibration. Raises ConfigError."""
    remedy = "; write one with `moeserve simulate --measure FILE`"
    with ConfigError.instead_of((OSError, msgspec.DecodeError), f"--calibration {path}", remedy):
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
        limits_of(calibration)  # raises if a limit is missing or has the wrong type
    missing = [name for name in (*TERMS, *GAP_TERMS) if name not in calibration.terms]
    if missing:
        raise ConfigError(f"--calibration {path}: terms lacks {', '.join(missing)}; measure again")
    return calibration
