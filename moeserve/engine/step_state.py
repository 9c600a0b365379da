"""The scheduler's notes about one step, from its plan to its result, and the step record."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.kv_cache_manager import KVCacheManager
from moeserve.engine.plan import I32, NewRequest, Slots, StepPlan, StepResult
from moeserve.engine.requests import Request
from moeserve.messages import StepRecord


@dataclass(slots=True)
class PlanBuilder:
    """The rows that the scheduler has granted so far in this step. budget: tokens that are left to
    grant.
    """

    budget: int
    rows: list[tuple[Slots, I32, I32]] = field(default_factory=list)  # slots, starts, counts
    new_requests: list[NewRequest] = field(default_factory=list)
    started: list[int] = field(default_factory=list)  # rids
    num_tokens: int = 0
    num_preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A plan without a result yet. occupancy: which occupant of each row's slot the plan was made
    for.
    """

    plan: StepPlan
    slots: Slots
    occupancy: NDArray[np.int64]
    builder: PlanBuilder


@dataclass(slots=True)
class Fetching:
    """KV blocks that a connector fetches for a request, until it is admitted."""

    request: Request
    deadline_s: float  # when the request stops waiting; once they arrived, when their lease ends
    begun: bool  # False: the connector must be asked again


def idle_record(kv_manager: KVCacheManager, num_waiting: int, step: int) -> StepRecord:
    """Return the record of a step without work: running and waiting requests, free blocks."""
    pool = kv_manager.pool
    states = kv_manager.pools[1:]
    record = StepRecord(
        step=step,
        num_tokens=0,
        num_requests=0,
        num_running=kv_manager.batch.num_running,
        num_waiting=num_waiting,
        num_free_blocks=pool.num_free,
        num_blocks=pool.num_blocks,
    )
    if states:  # skipped without recurrent layers: a decode step of one request takes 70 us
        record.num_states = sum(pool.num_blocks for pool in states)
        record.num_free_states = sum(pool.num_free for pool in states)
        record.num_cached_states = sum(pool.num_cached for pool in states)
    return record


def step_record(record: StepRecord, in_flight: InFlightStep, result: StepResult) -> StepRecord:
    """Add a step's numbers to an idle record. The core, which has a clock, sets the times."""
    builder = in_flight.builder
    plan = in_flight.plan
    num_drafts = []
    num_accepted = []
    if plan.num_drafts_R is not None and result.counts_S is not None:
        drafts_S = plan.num_drafts_R[plan.samples_R]
        right_S = result.counts_S - 1
        places = range(int(drafts_S.max(initial=0)))
        num_drafts, num_accepted = (
            [int((n_S > i).sum()) for i in places] for n_S in (drafts_S, right_S)
        )
    record.num_tokens = builder.num_tokens
    record.num_requests = len(in_flight.slots)
    record.num_preempted = builder.num_preempted
    record.prompt_tokens = builder.prompt_tokens
    record.cached_tokens = builder.cached_tokens
    record.device_us = result.device_us
    record.comm_us = result.comm_us
    record.exposed_comm_us = result.exposed_comm_us
    record.expert_cache = result.expert_cache
    record.num_drafts = num_drafts
    record.num_accepted = num_accepted
    return record
