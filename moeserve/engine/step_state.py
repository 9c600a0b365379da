"""The scheduler's state of one step, from its plan to its result, and the step record."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.kv_cache_manager import KVCacheManager
from moeserve.engine.plan import I32, NewRequest, Slots, StepPlan, StepResult, concatenate
from moeserve.engine.requests import Request
from moeserve.messages import StepRecord


@dataclass(slots=True)
class PlanBuilder:
    """A plan in the making: the rows that are scheduled so far."""

    budget: int  # tokens that may still be scheduled
    rows: list[tuple[Slots, I32, I32]] = field(default_factory=list)  # slots, starts, counts
    new_requests: list[NewRequest] = field(default_factory=list)
    started: list[int] = field(default_factory=list)  # ids of requests admitted for the first time
    num_tokens: int = 0
    num_preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def columns(self) -> tuple[Slots, I32, I32]:
        """The slots, starts and counts of all rows."""
        return concatenate(self.rows)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A plan whose result has not arrived yet."""

    plan: StepPlan
    slots: Slots
    generation: NDArray[np.int64]  # that of each row's slot when the plan was made
    builder: PlanBuilder


class NoRoom(NamedTuple):
    """The fact that the head of the queue does not fit, until more blocks are available."""

    head: Request
    num_blocks: int  # available blocks at that time


@dataclass(slots=True)
class Fetching:
    """The KV blocks that a connector fetches for a request, until the request is admitted."""

    request: Request
    deadline_s: float  # end of the wait; once the blocks have arrived, end of their lease
    is_begun: bool  # False: the connector did not know its blocks yet, so ask it again


def idle_record(kv_manager: KVCacheManager, num_waiting: int, step: int) -> StepRecord:
    """Return the gauges: running and waiting requests, free blocks, and no work."""
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
    if states:  # skipped otherwise, because the host's part of a decode step takes only 70 us
        record.num_states = sum(pool.num_blocks for pool in states)
        record.num_free_states = sum(pool.num_free for pool in states)
        record.num_cached_states = sum(pool.num_cached for pool in states)
    return record


def step_record(record: StepRecord, in_flight: InFlightStep, result: StepResult) -> StepRecord:
    """Add a step's numbers to the gauges. The core adds the times, because it has the clock."""
    builder = in_flight.builder
    plan = in_flight.plan
    num_drafts: list[int] = []
    num_accepted: list[int] = []
    if plan.num_drafts_R is not None and result.counts_S is not None:
        drafts_S = plan.num_drafts_R[plan.samples_R]
        accepted_S = result.counts_S - 1
        positions = range(int(drafts_S.max(initial=0)))
        num_drafts = [int((drafts_S > i).sum()) for i in positions]
        num_accepted = [int((accepted_S > i).sum()) for i in positions]
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
