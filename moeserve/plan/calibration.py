"""Seconds of a step from measured ones: a table over tokens with a few terms beside it, none negative, fitted together
so that relative errors are least."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeserve.config import Limits
from moeserve.errors import ConfigError
from moeserve.plan.roofline import Shape, Spans

F64 = NDArray[np.float64]
KNOTS = tuple(2**i for i in range(12))  # tokens of a step, between which its time is interpolated
ROUNDS, INTERRUPTED = 4, 5.0
TERMS = (*(f"{n} tokens" for n in KNOTS), "other engines' tokens", "requests", "positions read", "query positions")


class StepSample(msgspec.Struct, frozen=True):
    """A measured step, as `features` takes it. device_s: in the model. period_s: between two results there, where the
    engine had the next step ready."""

    tokens: int
    rows: int
    reads: float
    pairs: float
    others: int
    device_s: float
    period_s: float | None = None


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """A file of `moeserve simulate --measure`.

    model: its architecture and what it was measured with. terms: seconds of each of TERMS. gap_s: between two steps.
    delay_s: from a client to the engine and back. error: median relative error of the
    fit.
    """

    model: str
    dp: int
    tp: int
    limits: dict[str, int | bool]
    terms: dict[str, float]
    gap_s: float
    delay_s: float
    num_samples: int
    error: float


class MeasuredCost:
    """The `StepCost` of a calibration."""

    spans: Spans = (None,)

    def __init__(self, calibration: Calibration) -> None:
        self._file = calibration
        self._terms = np.array([calibration.terms[name] for name in TERMS])

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """See `StepCost`: the slowest engine's time, and what passes before the next step."""
        most = max(shapes)  # by tokens
        others = sum(shape.tokens for shape in shapes) - most.tokens
        device_s = features(most.tokens, most.rows, most.reads[0], most.pairs[0], others) @ self._terms
        return float(device_s) + self._file.gap_s

    def host_seconds(self, shape: Shape) -> float:
        """See `StepCost`: 0, as it is part of `seconds`."""
        return 0.0


def features(tokens: float, rows: float, reads: float, pairs: float, others: float) -> F64:
    """Returns the numbers that the seconds of a step are linear in, in the order of TERMS: those of the engine with
    most tokens, and the others' tokens. 3 tokens lie in the middle between 2 and 4; beyond the last knot time grows as
    tokens do."""
    knots = np.zeros(len(KNOTS))
    above = min(int(np.searchsorted(KNOTS, tokens)), len(KNOTS) - 1)
    if tokens > KNOTS[-1] or not above:
        knots[above] = tokens / KNOTS[above]
    else:
        low, high = KNOTS[above - 1 : above + 1]
        knots[above] = (tokens - low) / (high - low)
        knots[above - 1] = 1 - knots[above]
    return np.concatenate((knots, (others, rows, reads, pairs)))


def fit(samples: Sequence[StepSample], unfitted: Calibration) -> Calibration:
    """Returns the calibration with terms, gap and error of these samples. Raises ConfigError if there are too few."""
    if len(samples) < 2 * len(TERMS):
        raise ConfigError(f"{len(samples)} measured steps are too few to fit {len(TERMS)} terms")
    x = np.array([features(s.tokens, s.rows, s.reads, s.pairs, s.others) for s in samples])
    device_s = np.array([s.device_s for s in samples])
    terms = not_negative(x, device_s)
    between_s = [s.period_s - s.device_s for s in samples if s.period_s is not None]
    gap_s = max(0.0, fmean(between_s)) if between_s else 0.0
    error = float(np.median(np.abs(x @ terms / device_s - 1)))
    return msgspec.structs.replace(
        unfitted,
        terms=dict(zip(TERMS, map(float, terms), strict=True)),
        gap_s=gap_s,
        num_samples=len(samples),
        error=error,
    )


def not_negative(x: F64, y: F64) -> F64:
    """Returns a >= 0 such that the relative errors of x @ a are least, and 0 on average: they are relative to x @ a
    itself, which the last round gave. Steps that took much longer were interrupted, and do not count."""
    a = np.zeros(x.shape[1])
    size = y
    for _ in range(ROUNDS):
        usual = y < INTERRUPTED * size
        left = np.flatnonzero(x[usual].any(0)).tolist()
        a[:] = 0.0
        while left:
            columns = x[usual][:, left] / size[usual, None]
            norm = np.linalg.norm(columns, axis=0)
            found = np.linalg.lstsq(columns / norm, y[usual] / size[usual], rcond=None)[0]
            if (found >= 0).all():
                a[left] = found / norm
                break
            left.pop(int(found.argmin()))
        size = np.maximum(x @ a, 1e-9)
    return a


def limits_of(calibration: Calibration) -> Limits:
    """Returns the limits that the measured engine had."""
    return msgspec.convert(calibration.limits, Limits)


def write(path: Path, calibration: Calibration) -> None:
    """Writes a calibration. Raises ConfigError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"calibration {path}: {error.strerror}") from error


def read(path: Path) -> Calibration:
    """Reads a calibration. Raises ConfigError naming what is wrong."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
        limits_of(found)
    except OSError as error:
        raise ConfigError(f"--calibration {path}: {error.strerror}") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"--calibration {path}: {error}; write one by `moeserve simulate --measure FILE`") from None
    if missing := [name for name in TERMS if name not in found.terms]:
        raise ConfigError(f"--calibration {path}: terms lacks {', '.join(missing)}; measure again")
    return found
