"""The sequences that run, by number, and what is counted from the start of each to its end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from time import monotonic

from moeserve.frontend.admission import Admission
from moeserve.frontend.generation import Sequence
from moeserve.frontend.stats import FrontStats
from moeserve.messages import Ready


class Running:
    """sequences: by rid. idle: set when the last one ends."""

    def __init__(self, stats: FrontStats, admission: Admission) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.idle = asyncio.Event()
        self._stats = stats
        self._admission = admission
        self._num_live = Counter[int]()  # sequences by priority

    def num_behind(self, priority: int) -> int:
        """Returns how many have to let a request of this priority pass."""
        return sum(num for later, num in self._num_live.items() if later > priority)

    def add(self, sequences: Collection[Sequence]) -> None:
        """Counts sequences of one request that begin."""
        for sequence in sequences:
            owner = sequence.owner
            self.sequences[sequence.rid] = sequence
            self._num_live[owner.priority] += 1
            self._admission.came(1, owner.submitted_at, len(owner.prompt_token_ids))
        self._stats.num_active = len(self.sequences)

    def note_starts(self, rids: list[int], began_s: float) -> None:
        """Notes when these sequences stopped waiting. began_s: when their first step began."""
        for rid in rids:
            if (sequence := self.sequences.get(rid)) and sequence.started_at is None:  # a replay does not start again
                sequence.started_at = max(began_s, sequence.owner.submitted_at)
                self._stats.queue_s.add(sequence.started_at - sequence.owner.submitted_at)

    def count_token(self, sequence: Sequence, now: float) -> None:
        """Counts one more token of a sequence."""
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
        """Counts the end of a sequence, which is not known here any more."""
        now, stats = monotonic(), self._stats
        del self.sequences[sequence.rid]
        owner = sequence.owner
        owner.num_live -= 1
        self._num_live -= Counter((owner.priority,))  # without zeros
        stats.num_active = len(self.sequences)
        stats.end(reason, now - owner.submitted_at, len(owner.prompt_token_ids), len(sequence.tokens))
        if sequence.first_at is None:
            self._admission.unread_tokens -= len(owner.prompt_token_ids)
        else:
            stats.decode_s.add(sequence.last_at - sequence.first_at)
        if not owner.num_live:
            stats.request_longest.add(max(len(s.tokens) for s in owner.sequences))
        self._admission.ended(now, len(self.sequences), ready)
        if not self.sequences:
            self.idle.set()
