"""Admission: whether one more request may wait, by the wait that is predicted for it and by how
many come; and the sequences that were admitted and run, which it is predicted from.

A new sequence waits for two things: for the prompts before it to be read, at the rate at which
prompts were read lately; and, if every place in the engine is taken, for so many sequences to end,
at the rate at which they ended while all places were taken. Both rates are measured; a server that
has measured nothing yet predicts nothing. A request whose wait would be longer than it may be is
refused at once: it would not be served sooner by waiting here, and those that were admitted before
it start in time.

A queue is there to keep the places taken while nobody comes. Where more come than can be served it
always stands, and all it does is to make everybody wait; so then it is only as long as the places
need. If `load` times as many come as end, and k may wait, then load^-k / (load - 1) places are
empty on average. A burst is no such load: what comes is counted over a time in which the server
ends some sequences.
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
# with less than an eighth of the blocks free, they limit the sequences that run, and not their
# number
KV_FULL = 8
EMPTY = 0.01  # share of the places that may be empty for want of a longer queue
COUNTED_ENDS = 8  # what comes is counted over the time of at least so many ends,
COUNTED_WAIT = 0.25  # and of at least this part of the longest wait
_KEPT = 0.95  # weight of what was measured before one more step, or one more end


class Admission:
    """Bounds the number of sequences, and the wait of the last one.

    max_queued: sequences that may wait beyond those that the engine runs at once; None for no bound
    at all. max_wait_s: longest predicted wait where every place is taken; 0 for any, whatever
    comes. unread_tokens: of prompts without a first token, kept by the front end.
    """

    def __init__(self, stats: FrontStats, max_queued: int | None, max_wait_s: float = 0.0) -> None:
        self._stats = stats
        self._max_queued = max_queued
        self._max_wait_s = max_wait_s
        self.unread_tokens = 0
        self._read_tokens = (
            0.0  # prompt tokens of late, cached ones included, and the seconds that they took
        )
        self._read_s = 0.0
        self._seconds_per_end = 0.0  # moving average; 0: not measured yet
        self._last_end_s = 0.0
        self._came = (
            0.0  # sequences that were admitted or refused lately, and when the last one was
        )
        self._came_s = 0.0

    def check(
        self,
        num_live: int,
        num_more: int,
        ready: Ready,
        now_s: float,
        within_s: float | None = None,
        num_behind: int = 0,
    ) -> None:
        """Raise Overloaded unless num_more sequences may come now, InvalidRequest if they never
        may.

        within_s: the time that the request has; DeadlineExceeded if that is over. num_behind: of
        the live ones, those that have to let this request pass, and so are no reason to wait.
        """
        if within_s is not None and within_s <= 0:
            raise DeadlineExceeded("the request's time was over before it could start")
        if self._max_queued is None:
            return
        capacity = ready.max_num_seqs + self._max_queued
        if num_more > capacity:
            raise InvalidRequest(
                f"{num_more} sequences in one request; this server takes at most {capacity} at once"
            )
        if (excess := num_live + num_more - capacity) > 0:
            raise Overloaded(
                f"{num_live} sequences run or wait; no more are taken now",
                retry_after_s=min(max(1.0, excess * self._seconds_per_end), MAX_RETRY_AFTER_S),
            )
        num_then = num_live - num_behind + num_more
        if num_then == num_more:
            return
        places = self._places(ready)
        limits = [
            limit for limit in (self._max_wait_s if num_then > places else 0, within_s) if limit
        ]
        load = (self._came_lately(now_s) + num_more) * self._seconds_per_end / self._counted_s
        wait_s = self.wait_s(num_then, ready)
        too_much_s = (load - 1) * self._counted_s
        if limits and wait_s > min(limits):
            raise Overloaded(
                f"a new request would wait {wait_s:.1f} s for its turn, and may wait "
                f"{min(limits):g} s",
                retry_after_s=min(max(wait_s - min(limits), too_much_s), MAX_RETRY_AFTER_S),
            )
        if (
            self._max_wait_s
            and load > 1
            and num_then > places
            and (load ** (places + 1 - num_then) < EMPTY * places * (load - 1))
        ):
            raise Overloaded(
                f"{load:.1f} times as many requests come as can be served",
                retry_after_s=min(too_much_s, MAX_RETRY_AFTER_S),
            )

    def came(self, num: int, now_s: float, unread_tokens: int = 0) -> None:
        """Count sequences that were admitted or refused. unread_tokens: of the prompts of those
        that were admitted.
        """
        self.unread_tokens += unread_tokens
        self._came = self._came_lately(now_s) + num
        self._came_s = now_s

    def _came_lately(self, now_s: float) -> float:
        return self._came * math.exp((self._came_s - now_s) / self._counted_s)

    @property
    def _counted_s(self) -> float:
        return max(COUNTED_WAIT * self._max_wait_s, COUNTED_ENDS * self._seconds_per_end) or 1.0

    def wait_s(self, num_live: int, ready: Ready) -> float:
        """Return the predicted wait of the last of so many sequences, in seconds."""
        num_engines = sum(engine.last is not None for engine in self._stats.engines.values()) or 1
        reading_s = (
            self.unread_tokens * self._read_s / self._read_tokens if self._read_tokens else 0.0
        )
        return (
            reading_s / num_engines + max(0, num_live - self._places(ready)) * self._seconds_per_end
        )

    def _places(self, ready: Ready) -> int:
        """Return how many sequences can run at once."""
        last = self._stats.last
        if (
            last is not None
            and last.num_waiting
            and last.num_free_blocks * KV_FULL < last.num_blocks
        ):
            return min(ready.max_num_seqs, last.num_running)
        return ready.max_num_seqs

    def step(self, record: StepRecord) -> None:
        """Note how fast a step read prompts, if it did."""
        read = record.num_tokens - record.num_requests + record.cached_tokens
        if read > record.num_requests:  # others are decoding steps, with a few drafts
            self._read_tokens = _KEPT * self._read_tokens + read
            self._read_s = _KEPT * self._read_s + record.device_us / 1e6

    def ended(self, now_s: float, num_live: int, ready: Ready) -> None:
        """Note the end of one sequence; num_live are left."""
        if num_live + 1 < self._places(ready):
            self._last_end_s = (
                0.0  # a place was free: the time to the next end says nothing about a wait
            )
            return
        if self._last_end_s:
            seconds = now_s - self._last_end_s
            self._seconds_per_end += (1 - _KEPT if self._seconds_per_end else 1) * (
                seconds - self._seconds_per_end
            )
        self._last_end_s = now_s


class Reservation:
    """Room for the sequences of one request, from its admission until they are submitted.

    Leaving the `with` block releases what was not used.
    """

    def __init__(self, running: "Running", num_sequences: int, priority: int) -> None:
        self._running = running
        self._num_left = num_sequences
        self._priority = priority
        running.count_live(num_sequences, priority)

    def use(self, num_sequences: int) -> None:
        """Release the room of sequences that are added to the running ones now."""
        assert num_sequences <= self._num_left, "more sequences than were admitted"
        self._num_left -= num_sequences
        self._running.count_live(-num_sequences, self._priority)

    def release(self) -> None:
        """Release the room that is left. Idempotent."""
        self.use(self._num_left)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Running:
    """The sequences that run, by rid, and what is counted of each from start to end. idle: set when
    none runs.
    """

    def __init__(self, stats: FrontStats, admission: Admission) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.idle = asyncio.Event()
        self._stats = stats
        self._admission = admission
        self._num_live = Counter[int]()  # running and reserved sequences by priority

    @property
    def num_live(self) -> int:
        """The number of sequences that run or are reserved."""
        return self._num_live.total()

    def count_live(self, num: int, priority: int) -> None:
        """Count sequences that were added or reserved; a negative number takes some back."""
        self._num_live[priority] += num
        if not self._num_live[priority]:
            del self._num_live[priority]  # clients choose priorities: zeros would pile up

    def num_behind(self, priority: int) -> int:
        """Return how many have to let a request of this priority pass."""
        return sum(num for later, num in self._num_live.items() if later > priority)

    def add(self, sequences: Collection[Sequence]) -> None:
        """Count sequences of one request that begin."""
        for sequence in sequences:
            owner = sequence.owner
            self.sequences[sequence.rid] = sequence
            self.count_live(1, owner.priority)
            self._admission.came(1, owner.submitted_at, len(owner.prompt_token_ids))
        self._stats.num_active = len(self.sequences)

    def replace(self, before: Sequence, now: Sequence) -> None:
        """Give the rows of a running sequence to another one, with the same rid, from now on."""
        if self.sequences.get(before.rid) is before:
            self.sequences[before.rid] = now

    def note_starts(self, rids: list[int], began_s: float) -> None:
        """Note when these sequences stopped waiting. began_s: when their first step began."""
        for rid in rids:
            if (
                sequence := self.sequences.get(rid)
            ) and sequence.started_at is None:  # a replay does not start again
                sequence.started_at = max(began_s, sequence.owner.submitted_at)
                self._stats.queue_s.add(sequence.started_at - sequence.owner.submitted_at)

    def count_token(self, sequence: Sequence, now: float) -> None:
        """Count one more token of a sequence."""
        stats = self._stats
        stats.generation_tokens += 1
        if sequence.first_at is None:
            sequence.first_at = now
            self._admission.unread_tokens -= len(sequence.owner.prompt_token_ids)
            stats.ttft_s.add(now - sequence.owner.submitted_at)
            if sequence.started_at is not None:
                stats.prefill_s.add(now - sequence.started_at)
        else:
            stats.itl_s.add(now - sequence.last_at)
        sequence.last_at = now

    def end(self, sequence: Sequence, reason: str, ready: Ready) -> None:
        """Count the end of a sequence, which is not known here any more."""
        now = monotonic()
        stats = self._stats
        del self.sequences[sequence.rid]
        owner = sequence.owner
        owner.num_live -= 1
        self.count_live(-1, owner.priority)
        stats.num_active = len(self.sequences)
        stats.end(
            reason, now - owner.submitted_at, len(owner.prompt_token_ids), len(sequence.tokens)
        )
        if sequence.first_at is None:
            self._admission.unread_tokens -= len(owner.prompt_token_ids)
        else:
            stats.decode_s.add(sequence.last_at - sequence.first_at)
        if not owner.num_live:
            stats.request_longest.add(max(len(s.tokens) for s in owner.sequences))
        self._admission.ended(now, len(self.sequences), ready)
        if not self.sequences:
            self.idle.set()
