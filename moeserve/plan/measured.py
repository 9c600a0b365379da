"""Seconds of a step from measured ones: a few coefficients, none negative, fitted so that relative errors are least."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeserve.config import Limits
from moeserve.errors import ConfigError
from moeserve.plan.roofline import Shape, Spans

F64 = NDArray[np.float64]
TERMS = ("step", "distinct experts", "expert rows", "tokens", "requests", "positions read", "query positions")


class Sample(msgspec.Struct, frozen=True):
    """A measured step of one engine. total: tokens of all engines. device_s: in the model; host_s: until the next step
    began, where the engine had another one ready."""

    tokens: int
    rows: int
    reads: float
    pairs: float
    total: int
    device_s: float
    host_s: float | None = None


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """A file of `moeserve simulate --measure`.

    model: its architecture and what it was measured with. terms: seconds of each of TERMS. gap: seconds between two
    steps, and per request in them. delay_s: from a client to the engine and back. error: median relative error of the
    fit.
    """

    model: str
    dp: int
    tp: int
    num_experts: int
    top_k: int
    limits: dict[str, int | bool]
    terms: dict[str, float]
    gap: tuple[float, float]
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
        total = sum(shape.tokens for shape in shapes)
        device_s = max(
            float(features(s.tokens, s.rows, s.reads[0], s.pairs[0], total, self._file) @ self._terms)
            for s in shapes
            if s.rows
        )
        return device_s + self._file.gap[0] + self._file.gap[1] * max(shape.rows for shape in shapes)

    def host_seconds(self, shape: Shape) -> float:
        """See `StepCost`: 0, as it is part of `seconds`."""
        return 0.0


def features(tokens: float, rows: float, reads: float, pairs: float, total: float, of: Calibration) -> F64:
    """Returns the numbers that the seconds of a step are linear in, in the order of TERMS."""
    distinct = of.num_experts * (1 - (1 - of.top_k / of.num_experts) ** total) if of.num_experts else 0.0
    return np.array([1.0, distinct, total * of.top_k / of.dp, tokens, rows, reads, pairs])


def fit(samples: Sequence[Sample], unfitted: Calibration) -> Calibration:
    """Returns the calibration with terms, gap and error of these samples. Raises ConfigError if there are too few."""
    if len(samples) < 2 * len(TERMS):
        raise ConfigError(f"{len(samples)} measured steps are too few to fit {len(TERMS)} terms")
    x = np.array([features(s.tokens, s.rows, s.reads, s.pairs, s.total, unfitted) for s in samples])
    device_s = np.array([s.device_s for s in samples])
    terms = not_negative(x / device_s[:, None], np.ones(len(samples)))
    followed = [(s.rows, s.host_s) for s in samples if s.host_s is not None]
    rows, between_s = np.array(followed or [(1, 0.0)]).T
    first, each = not_negative(np.stack((np.ones_like(rows), rows), 1), between_s)
    gap = float(first), float(each)
    error = float(np.median(np.abs(x @ terms / device_s - 1)))
    return msgspec.structs.replace(
        unfitted, terms=dict(zip(TERMS, map(float, terms), strict=True)), gap=gap, num_samples=len(samples), error=error
    )


def not_negative(x: F64, y: F64) -> F64:
    """Returns the least squares solution of x @ a = y without negative numbers: the most negative one becomes 0 until
    there are none. Large deviations count less, twice over: a step that the machine interrupted says little."""
    weight = np.ones(len(y))
    a = np.zeros(x.shape[1])
    for _ in range(3):
        left = [i for i in range(x.shape[1]) if np.any(x[:, i])]
        a[:] = 0.0
        while left:
            scale = np.linalg.norm(x[:, left], axis=0)
            found = np.linalg.lstsq(x[:, left] / scale * weight[:, None], y * weight, rcond=None)[0] / scale
            if (found >= 0).all():
                a[left] = found
                break
            left.pop(int((found * scale).argmin()))
        off = np.abs(x @ a - y)
        weight = 1 / np.maximum(1.0, off / max(1e-12, 1.5 * float(np.median(off)))) ** 0.5
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
