"""The record of one step, which metrics, dashboards and benchmarks read."""

from __future__ import annotations

import msgspec


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The work and the cost of one engine step. Times in microseconds; at_s: its start on the monotonic clock."""

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
    comm_us: int = 0  # from the start of each transfer to its last row, summed
    exposed_comm_us: int = 0  # the part of comm_us during which the model waited
    ubatches: int = 1
    vote_us: int = 0
    dp_rank: int = 0
