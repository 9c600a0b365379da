"""An engine whose steps are counted, not planned: the sums over the rows of each step that its
scheduler would plan, at a cost that does not grow with rows. What the scheduler does is the
specification; tests compare every number.

A decoding row is one token of each step from its first to a last one that is known at once, and
needs a KV block whenever its position is a multiple of the block's size: so that all of an engine
are a few counters, and a step touches only the requests that come, read their prompts or end in it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moeserve.config import Limits
from moeserve.engine.blocks import KVGroup
from moeserve.messages import Submit
from moeserve.plan.report import Clients
from moeserve.plan.roofline import NOTHING, Shape, Spans


class Settled(NamedTuple):
    """What a step came to on one engine: the rows that sampled, those among them that clients have
    not been told of, each of which sampled in the step before as well; the first tokens, with the
    request's prompt tokens from the cache; the requests that ended, and some of the step's record.
    """

    rows: int
    went_on: int
    cached: dict[int, int]
    ended: list[int]
    tokens: int
    free_blocks: int
    prompt_tokens: int
    preempted: int = 0
    cached_tokens: int = 0


class Uncountable(Exception):
    """A step that cannot be counted: a request would be preempted."""


@dataclass(slots=True)
class _Counted:
    """A request. at: positions that planned steps compute. last: no step follows that one."""

    rid: int
    prompt: int
    last: int
    at: int = 0


class CountedStep(NamedTuple):
    """One step: the requests whose first token it samples, those whose last one, in order, and what
    these held.
    """

    shape: Shape
    first: Sequence[_Counted]
    ended: Sequence[_Counted]
    freed: int
    prompt_tokens: int


def is_countable(limits: Limits, groups: Sequence[KVGroup], spans: Spans, longest: int) -> bool:
    """Whether engines may be counted: full attention alone, no cached prefixes, no drafts, no limit
    of a step's time, a token of each row in every step, and requests of at most `longest` tokens
    fit."""
    return (
        spans == (None,)
        and [group.rule.is_full for group in groups] == [True]
        and not (limits.enable_prefix_caching or limits.num_drafts or limits.itl_target_us)
        and limits.max_num_seqs <= limits.max_num_batched_tokens
        and longest <= min(limits.max_model_len - 1, (limits.num_blocks - 1) * limits.block_size)
    )


class CountedEngine:
    """An engine as `Engine`, for requests as `is_countable` wants them. Raises Uncountable where
    the scheduler would preempt a request."""

    def __init__(self, rank: int, limits: Limits) -> None:
        self.rank = rank
        self.inbox: deque[tuple[float, Submit]] = deque()
        self._limits = limits
        self._chunk = min(limits.prefill_chunk, limits.max_num_batched_tokens)
        self._block_size = limits.block_size
        self._waiting: deque[_Counted] = deque()
        self._reading: list[
            _Counted
        ] = []  # rows that have read a part of their prompts, first in line first
        self._ending: dict[int, list[_Counted]] = {}  # decoding rows by the step that is their last
        self._crossing = [0] * limits.block_size  # decoding rows by (position - step) % block size
        self._decoding = self._sum = 0  # rows, and the sum of the positions behind the next step
        self._promised = 0  # blocks that the prompts of _reading still take
        self._step = self._running = 0
        self._free = limits.num_blocks - 1

    @property
    def num_waiting(self) -> int:
        """See `Engine`."""
        return len(self.inbox) + len(self._waiting)

    def plan(self, now_s: float) -> tuple[CountedStep | None, Shape]:
        """See `Engine`."""
        while self.inbox and self.inbox[0][0] <= now_s:
            submit = self.inbox.popleft()[1]
            last = submit.num_prompt + submit.sampling.max_tokens - 1
            self._waiting.append(_Counted(submit.rid, submit.num_prompt, last))
        rows = self._decoding
        ends = float(self._sum)
        step = self._step
        size = self._block_size
        if crossing := self._crossing[-step % size]:
            self._take(crossing)
        shape = Shape(rows, rows, rows, (ends,), (ends,))
        prompt_tokens = 0
        if rows and not (
            self._waiting or self._reading or step in self._ending
        ):  # as before, a position further
            self._step = step + 1
            self._sum = self._sum + rows
            return CountedStep(shape, (), (), 0, 0), shape
        ended = decoded = self._ending.pop(step, [])
        first: list[_Counted] = []
        if self._reading or self._waiting:
            shape, prompt_tokens = self._read(first)
            ended = sorted(
                [*decoded, *(row for row in first if row.at == row.last)], key=lambda row: row.rid
            )
        if not shape.rows:
            return None, NOTHING
        self._step += 1
        for row in decoded:
            self._decoding -= 1
            self._sum -= row.last
            self._crossing[(row.last - 1 - step) % size] -= 1
        self._sum += self._decoding
        for row in first:
            if row.prompt < row.last:
                self._decoding += 1
                self._sum += row.prompt + 1
                self._crossing[(row.prompt - step - 1) % size] += 1
                self._ending.setdefault(step + row.last - row.prompt, []).append(row)
        freed = sum([self._blocks(row.last) for row in ended]) if ended else 0
        return CountedStep(shape, first, ended, freed, prompt_tokens), shape

    def _read(self, first: list[_Counted]) -> tuple[Shape, int]:
        """Grants tokens to prompts behind the decoding rows; those that it ends are added to
        `first`. Returns the shape of the whole step, and the tokens of prompts that begin."""
        counts = [min(row.prompt - row.at, self._chunk) for row in self._reading]
        left = self._limits.max_num_batched_tokens - self._decoding - counts.count(1)
        granted: list[tuple[_Counted, int]] = []
        for row, count in zip(self._reading, counts, strict=True):
            if count > 1:
                count = min(count, left)
                left -= count
            self._grant(row, count, granted)
        prompt_tokens = 0
        while left > 0 and self._waiting and self._running < self._limits.max_num_seqs:
            row = self._waiting[0]
            need = self._blocks(row.prompt)
            if self._running and need > self._free - self._promised - self._limits.watermark_blocks:
                break
            self._waiting.popleft()
            self._running += 1
            self._promised += need
            prompt_tokens += row.prompt
            count = min(row.prompt, left, self._chunk)
            left -= count
            self._reading.append(row)
            self._grant(row, count, granted)
        first += (row for row, _ in granted if row.at == row.prompt)
        self._reading = [row for row in self._reading if row.at < row.prompt]
        rows = self._decoding
        tokens = self._decoding + sum(count for _, count in granted)
        pairs = self._sum + sum(count * (row.at - (count - 1) / 2) for row, count in granted)
        reads = float(self._sum + sum(row.at for row, _ in granted))
        return Shape(
            tokens, rows + len(granted), rows + len(first), (reads,), (float(pairs),)
        ), prompt_tokens

    def _grant(self, row: _Counted, count: int, granted: list[tuple[_Counted, int]]) -> None:
        if count:
            new = self._blocks(row.at + count) - self._blocks(row.at)
            self._take(new)
            self._promised -= new
            row.at += count
            granted.append((row, count))

    def _take(self, blocks: int) -> None:
        self._free -= blocks
        if self._free < 0:
            raise Uncountable

    def _blocks(self, positions: int) -> int:
        return -(-positions // self._block_size)

    def settle(self, plan: CountedStep, clients: Clients, now_s: float) -> Settled:
        """See `Engine`."""
        samples = plan.shape.samples
        tokens = plan.shape.tokens
        if not (plan.first or plan.ended):
            return Settled(samples, samples, {}, [], tokens, self._free, plan.prompt_tokens)
        self._free += plan.freed
        self._running -= len(plan.ended)
        for row in plan.first:
            clients.first_s[row.rid] = now_s
        for row in plan.ended:
            clients.last_s[row.rid] = now_s
            clients.tokens[row.rid] = row.last + 1 - row.prompt
        return Settled(
            samples,
            samples - len(plan.first),
            {row.rid: 0 for row in plan.first},
            [row.rid for row in plan.ended],
            tokens,
            self._free,
            plan.prompt_tokens,
        )
