"""Admission control: decide whether a new request may wait, from its predicted wait and the load.

A new sequence waits for two things. Both rates are measured, and without measurements no wait is
predicted:

- The prompts before it have to be prefilled, at the recent rate of prefill.
- If all slots of the engine are used, enough sequences have to end, at the rate at which sequences
  ended while all slots were used.

A request is refused at once if its predicted wait is too long. Waiting would not serve it sooner,
and requests that were admitted before it start in time.

A queue keeps the slots used while no requests arrive. Under a permanent overload, a long queue only
makes everyone wait. Then the queue may only be as long as the slots need: if `load` times as many
sequences arrive as end, and k sequences may wait, load^-k / (load - 1) slots are empty on average.
A burst is not an overload, because arrivals are counted over a time in which some sequences end.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Collection
from time import monotonic

from moeserve.errors import DeadlineExceeded, InvalidRequest, Overloaded
from moeserve.frontend.generation import Sequence
from moeserve.frontend.stats import FrontStats
from moeserve.messages import Ready, StepRecord

MAX_RETRY_AFTER_S = 60.0
# With a smaller share of free KV blocks, the blocks limit the number of running sequences.
MIN_FREE_BLOCK_SHARE = 1 / 8
MAX_EMPTY_SLOT_SHARE = 0.01  # share of slots that may be empty because the queue is short
# Arrivals are counted over the time in which so many sequences end, and at least over this share of
# the longest wait.
ARRIVAL_WINDOW_ENDS = 8
ARRIVAL_WINDOW_WAIT_SHARE = 0.25
_DECAY = 0.95  # weight of earlier measurements in the moving averages


class Admission:
    """Limits the number of sequences, and their wait.

    max_queued: the most sequences that may wait, beyond those that the engine runs at once; None:
    no limits at all.
    max_wait_s: the longest predicted wait if all slots are used; 0: any wait and any load.
    """

    def __init__(self, stats: FrontStats, max_queued: int | None, max_wait_s: float = 0.0) -> None:
        self._stats = stats
        self._max_queued = max_queued
        self._max_wait_s = max_wait_s
        self.num_waiting_tokens = 0  # prompt tokens of sequences without a first token
        self._num_prefilled_tokens = 0.0  # recently, cached ones included
        self._prefill_duration_s = 0.0  # of the steps that prefilled them
        self._end_interval_s = 0.0  # between two ends, moving average; 0: not measured yet
        self._last_end_at_s = 0.0  # 0: none, or a slot was free since then
        self._num_arrivals = 0.0  # recent arrivals: sequences that were admitted or refused
        self._last_arrival_at_s = 0.0

    def check(
        self,
        num_live: int,
        num_more: int,
        ready: Ready,
        now_s: float,
        within_s: float | None = None,
        num_behind: int = 0,
    ) -> None:
        """Raise Overloaded if num_more sequences cannot be admitted now, and InvalidRequest if they
        never could be.

        within_s: the time that the request has. Raises DeadlineExceeded if it is over.
        num_behind: the live sequences of lower priority, for which this request need not wait.
        """
        if within_s is not None and within_s <= 0:
            raise DeadlineExceeded("the request's time was over before it could start")
        if self._max_queued is None:
            return
        capacity = ready.max_num_seqs + self._max_queued
        if num_more > capacity:
            raise InvalidRequest(
                f"{num_more} sequences in one request; this server accepts at most {capacity} at "
                "once"
            )
        if (excess := num_live + num_more - capacity) > 0:
            raise Overloaded(
                f"{num_live} sequences run or wait; no more are taken now",
                retry_after_s=min(max(1.0, excess * self._end_interval_s), MAX_RETRY_AFTER_S),
            )
        # The live sequences that start before these, and these
        num_in_line = num_live - num_behind + num_more
        if num_in_line == num_more:
            return
        num_slots = self._num_slots(ready)
        wait_limit_s = math.inf if within_s is None else within_s
        if self._max_wait_s and num_in_line > num_slots:
            wait_limit_s = min(wait_limit_s, self._max_wait_s)
        window_s = self._arrival_window_s
        load = (self._recent_arrivals(now_s) + num_more) * self._end_interval_s / window_s
        wait_s = self.predict_wait_s(num_in_line, ready)
        backlog_s = (load - 1) * window_s  # until the excess of recent arrivals is served
        if wait_s > wait_limit_s:
            raise Overloaded(
                f"a new request would wait {wait_s:.1f} s for its turn, and may wait "
                f"{wait_limit_s:g} s",
                retry_after_s=min(max(wait_s - wait_limit_s, backlog_s), MAX_RETRY_AFTER_S),
            )
        # The limit of the queue in the module docstring. There, k is num_in_line - num_slots - 1.
        if (
            self._max_wait_s
            and load > 1
            and num_in_line > num_slots
            and (
                load ** (num_slots + 1 - num_in_line)
                < MAX_EMPTY_SLOT_SHARE * num_slots * (load - 1)
            )
        ):
            raise Overloaded(
                f"{load:.1f} times as many requests arrive as can be served",
                retry_after_s=min(backlog_s, MAX_RETRY_AFTER_S),
            )

    def count_arrivals(self, num_sequences: int, now_s: float, num_prompt_tokens: int = 0) -> None:
        """Count sequences that were admitted or refused.

        num_prompt_tokens: of those that were admitted.
        """
        self.num_waiting_tokens += num_prompt_tokens
        self._num_arrivals = self._recent_arrivals(now_s) + num_sequences
        self._last_arrival_at_s = now_s

    def _recent_arrivals(self, now_s: float) -> float:
        age_s = now_s - self._last_arrival_at_s
        return self._num_arrivals * math.exp(-age_s / self._arrival_window_s)

    @property
    def _arrival_window_s(self) -> float:
        window_s = max(
            ARRIVAL_WINDOW_WAIT_SHARE * self._max_wait_s,
            ARRIVAL_WINDOW_ENDS * self._end_interval_s,
        )
        return window_s or 1.0  # without measurements; it is a divisor

    def predict_wait_s(self, num_live: int, ready: Ready) -> float:
        """Return the predicted wait of the last of num_live sequences, in seconds."""
        num_engines = sum(engine.last is not None for engine in self._stats.engines.values()) or 1
        prefill_s = 0.0
        if self._num_prefilled_tokens:
            prefill_s = (
                self.num_waiting_tokens * self._prefill_duration_s / self._num_prefilled_tokens
            )
        num_excess = max(0, num_live - self._num_slots(ready))
        return prefill_s / num_engines + num_excess * self._end_interval_s

    def _num_slots(self, ready: Ready) -> int:
        """Return how many sequences can run at once."""
        last = self._stats.last
        if (
            last is not None
            and last.num_waiting
            and last.num_free_blocks < MIN_FREE_BLOCK_SHARE * last.num_blocks
        ):
            return min(ready.max_num_seqs, last.num_running)
        return ready.max_num_seqs

    def record_step(self, record: StepRecord) -> None:
        """Measure the rate of prefill in a step with prompts."""
        # Each request that decodes has one token, or a few more with drafts.
        num_prefilled = record.num_tokens - record.num_requests + record.cached_tokens
        if num_prefilled <= record.num_requests:
            return  # nothing was prefilled, or too little to measure
        self._num_prefilled_tokens = _DECAY * self._num_prefilled_tokens + num_prefilled
        self._prefill_duration_s = _DECAY * self._prefill_duration_s + record.device_us / 1e6

    def record_end(self, now_s: float, num_live: int, ready: Ready) -> None:
        """Measure the time between the ends of sequences. num_live: the remaining sequences."""
        if num_live + 1 < self._num_slots(ready):
            self._last_end_at_s = 0.0  # a slot was free, so the time to the next end does not count
            return
        if self._last_end_at_s:
            interval_s = now_s - self._last_end_at_s
            weight = 1 - _DECAY if self._end_interval_s else 1
            self._end_interval_s += weight * (interval_s - self._end_interval_s)
        self._last_end_at_s = now_s


class Reservation:
    """The admission of a request's sequences, until they are submitted.

    Leaving the `with` block releases those that were not submitted.
    """

    def __init__(self, running: "RunningSequences", num_sequences: int, priority: int) -> None:
        self._running = running
        self._num_left = num_sequences
        self._priority = priority
        running.count_live(num_sequences, priority)

    def use(self, num_sequences: int) -> None:
        """Release sequences that are now added to the running ones."""
        assert num_sequences <= self._num_left, "more sequences than were admitted"
        self._num_left -= num_sequences
        self._running.count_live(-num_sequences, self._priority)

    def release(self) -> None:
        """Release the remaining sequences. Idempotent."""
        self.use(self._num_left)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class RunningSequences:
    """The running sequences, and the statistics of each from start to end."""

    def __init__(self, stats: FrontStats, admission: Admission) -> None:
        self.sequences: dict[int, Sequence] = {}  # by id
        self.idle = asyncio.Event()  # set when the last sequence ends
        self._stats = stats
        self._admission = admission
        self._num_live = Counter[int]()  # running and reserved sequences by priority

    @property
    def num_live(self) -> int:
        """The number of sequences that run or are reserved."""
        return self._num_live.total()

    def count_live(self, num: int, priority: int) -> None:
        """Count sequences that were added or reserved. num: negative for removed ones."""
        self._num_live[priority] += num
        if not self._num_live[priority]:
            del self._num_live[priority]  # clients choose the priorities, so zeros would add up

    def num_behind(self, priority: int) -> int:
        """Return the number of sequences that run after a request of this priority."""
        return sum(num for later, num in self._num_live.items() if later > priority)

    def add(self, sequences: Collection[Sequence]) -> None:
        """Add the sequences of a new request."""
        for sequence in sequences:
            owner = sequence.owner
            self.sequences[sequence.rid] = sequence
            self.count_live(1, owner.priority)
            self._admission.count_arrivals(1, owner.submitted_at_s, len(owner.prompt_token_ids))
        self._stats.num_active = len(self.sequences)

    def replace(self, old: Sequence, new: Sequence) -> None:
        """Replace a running sequence by another one with the same id."""
        if self.sequences.get(old.rid) is old:
            self.sequences[old.rid] = new

    def note_starts(self, rids: list[int], began_s: float) -> None:
        """Record the start of these sequences. began_s: when their first step began."""
        for rid in rids:
            sequence = self.sequences.get(rid)
            if sequence and sequence.started_at_s is None:  # otherwise, it was submitted again
                sequence.started_at_s = max(began_s, sequence.owner.submitted_at_s)
                self._stats.queue_s.add(sequence.started_at_s - sequence.owner.submitted_at_s)

    def count_token(self, sequence: Sequence, now: float) -> None:
        """Count one more token of a sequence."""
        stats = self._stats
        stats.generation_tokens += 1
        if sequence.first_token_at_s is None:
            sequence.first_token_at_s = now
            self._admission.num_waiting_tokens -= len(sequence.owner.prompt_token_ids)
            stats.ttft_s.add(now - sequence.owner.submitted_at_s)
            if sequence.started_at_s is not None:
                stats.prefill_s.add(now - sequence.started_at_s)
        else:
            stats.itl_s.add(now - sequence.last_token_at_s)
        sequence.last_token_at_s = now

    def end(self, sequence: Sequence, reason: str, ready: Ready) -> None:
        """Remove a sequence that has ended, and count it."""
        now = monotonic()
        stats = self._stats
        del self.sequences[sequence.rid]
        owner = sequence.owner
        owner.num_live -= 1
        self.count_live(-1, owner.priority)
        stats.num_active = len(self.sequences)
        stats.record_end(
            reason,
            age_s=now - owner.submitted_at_s,
            num_prompt=len(owner.prompt_token_ids),
            num_generated=len(sequence.tokens),
        )
        if sequence.first_token_at_s is None:
            self._admission.num_waiting_tokens -= len(owner.prompt_token_ids)
        else:
            stats.decode_s.add(sequence.last_token_at_s - sequence.first_token_at_s)
        if not owner.num_live:
            stats.request_longest.add(max(len(s.tokens) for s in owner.sequences))
        self._admission.record_end(now, len(self.sequences), ready)
        if not self.sequences:
            self.idle.set()
