"""Counters and histograms of the front end, fed by step records and by requests. /metrics and the logs render them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from moeserve.metrics import StepRecord

TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
E2E_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = tuple(float(2**i) for i in range(18))


class Histogram:
    """Cumulative-bucket histogram with the meaning of Prometheus: counts[i] observations are <= bounds[i]
    and above the bound before; the last count is everything larger."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class FrontStats:
    """Totals since the front end started; they survive engine restarts. Times in seconds."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    engine_restarts: int = 0
    rejected: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> sequences
    ttft_s: Histogram = field(default_factory=lambda: Histogram(TTFT_S))
    itl_s: Histogram = field(default_factory=lambda: Histogram(ITL_S))
    e2e_s: Histogram = field(default_factory=lambda: Histogram(E2E_S))
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    last: StepRecord | None = None  # the newest step's gauges: running, waiting, free blocks
    num_active: int = 0  # sequences that the front end is waiting for

    def step(self, record: StepRecord) -> None:
        self.steps += 1
        self.preemptions += record.num_preempted
        self.prompt_tokens += record.prompt_tokens
        if record.num_tokens:
            self.step_tokens.add(record.num_tokens)
        self.last = record

    def end(self, reason: str, age_s: float, num_prompt: int, num_generated: int) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.e2e_s.add(age_s)
        self.request_prompt_tokens.add(num_prompt)
        self.request_generation_tokens.add(num_generated)
