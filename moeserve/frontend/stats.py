"""The counters and histograms of the front end. Step records and requests update them, and /metrics
and the logs show them.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec

from moeserve.messages import StepRecord

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
ITL_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)
E2E_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = tuple(float(2**i) for i in range(18))
RECENT_STEPS = 64  # approximate length of the moving average
GAUGES = ("num_running", "num_waiting", "num_free_blocks", "num_free_states", "num_cached_states")
SUMS = ("restarts", "steps", "step_s", "vote_s", "comm_s", "exposed_comm_s")


class Histogram:
    """A histogram for Prometheus.

    counts[i] is the number of values <= bounds[i] and > bounds[i - 1]. The last count is that of
    all larger values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class EngineStats:
    """Totals over the steps of one engine that had requests, across restarts. Times in seconds."""

    last: StepRecord | None = None  # the record of the last step; None: no engine, or no step yet
    restarts: int = 0
    steps: int = 0
    step_s: float = 0.0  # in the model
    mean_step_s: float = 0.0  # moving average over recent steps
    vote_s: float = 0.0
    comm_s: float = 0.0  # transfers of expert rows, summed
    exposed_comm_s: float = 0.0  # the part of comm_s during which the model waited

    def record_step(self, record: StepRecord) -> None:
        """Add one step. A record without requests only updates the gauges."""
        if not record.num_requests and self.last is not None:
            self.last = msgspec.structs.replace(
                self.last, **{name: getattr(record, name) for name in GAUGES}
            )
            return
        self.last = record
        self.steps += 1
        self.step_s += record.device_us / 1e6
        self.mean_step_s += (record.device_us / 1e6 - self.mean_step_s) / min(
            self.steps, RECENT_STEPS
        )
        self.vote_s += record.vote_us / 1e6
        self.comm_s += record.comm_us / 1e6
        self.exposed_comm_s += record.exposed_comm_us / 1e6

    @property
    def overlap_efficiency(self) -> float:
        """Share of the communication time hidden behind computation; 1 without communication."""
        return 1.0 - self.exposed_comm_s / self.comm_s if self.comm_s else 1.0


@dataclass(slots=True)
class FrontStats:
    """Totals since the start of the front end, across restarts of engines. Times in seconds."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    # Verified drafts, by their position after the last known token.
    drafts: list[int] = field(default_factory=list)
    accepted_drafts: list[int] = field(default_factory=list)
    expert_cache: list[int] = field(default_factory=list)  # sums of `StepRecord.expert_cache`
    # By data-parallel rank.
    engines: defaultdict[int, EngineStats] = field(default_factory=lambda: defaultdict(EngineStats))
    rejected: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> sequences
    ttft_s: Histogram = field(default_factory=lambda: Histogram(TTFT_S))
    itl_s: Histogram = field(default_factory=lambda: Histogram(ITL_S))
    e2e_s: Histogram = field(default_factory=lambda: Histogram(E2E_S))
    queue_s: Histogram = field(default_factory=lambda: Histogram(E2E_S))
    prefill_s: Histogram = field(default_factory=lambda: Histogram(E2E_S))
    decode_s: Histogram = field(default_factory=lambda: Histogram(E2E_S))
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    # The longest of a request's n answers.
    request_longest: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    num_active: int = 0  # running and waiting sequences

    def record_step(self, record: StepRecord) -> None:
        """Add one engine's step."""
        self.preemptions += record.num_preempted
        self.prompt_tokens += record.prompt_tokens
        if record.num_drafts:
            self.drafts = _sums(self.drafts, record.num_drafts)
            self.accepted_drafts = _sums(self.accepted_drafts, record.num_accepted)
        if record.expert_cache:
            self.expert_cache = _sums(self.expert_cache, record.expert_cache)
        if record.num_tokens:
            self.step_tokens.add(record.num_tokens)
        self.engines[record.dp_rank].record_step(record)

    def record_lost_engine(self, engine: int, *, died: bool) -> None:
        """Drop the gauges of an engine that is gone. Count a restart if it died.

        engine: the data-parallel rank.
        """
        self.engines[engine].last = None
        self.engines[engine].restarts += died

    @property
    def total(self) -> EngineStats:
        """The sums over all engines."""
        total = EngineStats()
        for engine in self.engines.values():
            for name in SUMS:
                setattr(total, name, getattr(total, name) + getattr(engine, name))
        return total

    @property
    def last(self) -> StepRecord | None:
        """The record of the last step, with gauges (running, waiting, blocks) summed over the last
        records of all engines.
        """
        records = [engine.last for engine in self.engines.values() if engine.last is not None]
        if len(records) <= 1:
            return records[0] if records else None
        newest = max(records, key=lambda record: record.at_s)
        sums = {name: sum(getattr(record, name) for record in records) for name in GAUGES}
        # Each engine has one null block and, if its model has states, one null state. Readers of a
        # record subtract one of each, so all others are left out.
        sums["num_blocks"] = 1 + sum(record.num_blocks - 1 for record in records)
        sums["num_states"] = 0
        if newest.num_states:
            sums["num_states"] = 1 + sum(record.num_states - 1 for record in records)
        return msgspec.structs.replace(newest, **sums)

    def record_end(self, reason: str, *, age_s: float, num_prompt: int, num_generated: int) -> None:
        """Count a finished sequence.

        Args:
            reason: The finish reason.
            age_s: Seconds since the request arrived.
            num_prompt: Tokens of the prompt.
            num_generated: Generated tokens.
        """
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.e2e_s.add(age_s)
        self.request_prompt_tokens.add(num_prompt)
        self.request_generation_tokens.add(num_generated)


def _sums(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the sums of two lists, item by item. The shorter one is padded with zeros."""
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
