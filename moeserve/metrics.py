"""One record per step: metrics, traces, dashboards and benchmarks all read this and nothing else."""

from __future__ import annotations

import msgspec


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one engine step did and what it cost. Times in microseconds, `at_s` on the monotonic clock."""

    step: int
    at_s: float
    num_tokens: int
    num_requests: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    plan_us: int = 0
    update_us: int = 0
    device_us: int = 0
    comm_us: int = 0  # between the start of each transfer and the arrival of its last row, summed
    exposed_comm_us: int = 0  # the part of it for which the model stood still
    ubatches: int = 1
    vote_us: int = 0
    dp_rank: int = 0
