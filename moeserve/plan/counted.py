"""A fast simulated engine that computes the totals of each step without running a scheduler.

The scheduler is the specification: tests compare every number with the steps that it plans. The
cost of a step does not grow with the number of decoding rows, because they are only counted:

- A decoding row has one token in each step, from its first to a last step that is known in advance.
- It allocates a KV block whenever its position is a multiple of the block size.

So a few counters describe all decoding rows, and a step touches only the requests that arrive,
prefill or finish in it.
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
    """The outcome of a step on one engine."""

    rows: int  # rows that sampled a token
    # Rows that also sampled in the previous step and were not reported to `Clients` one by one.
    continued: int
    cached: dict[int, int]  # requests that got their first token -> prompt tokens from the cache
    ended: list[int]  # requests that finished
    tokens: int
    free_blocks: int
    prompt_tokens: int  # of the prompts that began
    preempted: int = 0
    cached_tokens: int = 0


class Uncountable(Exception):
    """Raised if a request would be preempted, which cannot be counted."""


@dataclass(slots=True)
class _Counted:
    """A request."""

    rid: int
    prompt: int  # prompt tokens
    last: int  # number of positions that its steps compute in total
    at: int = 0  # number of positions that planned steps compute


class CountedStep(NamedTuple):
    """A planned step."""

    shape: Shape
    first: Sequence[_Counted]  # requests whose first token it samples
    ended: Sequence[_Counted]  # requests whose last token it samples, by rid
    freed: int  # KV blocks of the requests that end
    prompt_tokens: int  # of the prompts that begin


def is_countable(limits: Limits, groups: Sequence[KVGroup], spans: Spans, longest: int) -> bool:
    """Return whether `CountedEngine` can simulate these engines.

    It supports full attention only, and neither prefix caching, speculative decoding nor a limit on
    the time of a step. Every running row must fit into every step, and requests of `longest` tokens
    must fit into the KV cache.
    """
    return (
        spans == (None,)
        and [group.rule.is_full for group in groups] == [True]
        and not (limits.enable_prefix_caching or limits.num_drafts or limits.itl_target_us)
        and limits.max_num_seqs <= limits.max_num_batched_tokens
        and longest <= min(limits.max_model_len - 1, (limits.num_blocks - 1) * limits.block_size)
    )


class CountedEngine:
    """Like `Engine`, without a scheduler, if `is_countable`.

    `plan` raises Uncountable if the scheduler would preempt a request.
    """

    def __init__(self, rank: int, limits: Limits) -> None:
        self.rank = rank
        self.inbox: deque[tuple[float, Submit]] = deque()
        self._limits = limits
        self._chunk = min(limits.prefill_chunk, limits.max_num_batched_tokens)
        self._block_size = limits.block_size
        self._waiting: deque[_Counted] = deque()
        self._reading: list[_Counted] = []  # rows that have begun to prefill, oldest first
        self._ending: dict[int, list[_Counted]] = {}  # decoding rows by their last step
        self._crossing = [0] * limits.block_size  # decoding rows by (position - step) % block size
        self._decoding = 0  # number of decoding rows
        self._sum = 0  # sum of their context lengths in the next step
        self._promised = 0  # blocks that the prompts of _reading will still allocate
        self._step = 0
        self._running = 0
        self._free = limits.num_blocks - 1  # without the null block

    @property
    def num_waiting(self) -> int:
        """Requests that no step has begun."""
        return len(self.inbox) + len(self._waiting)

    def plan(self, now_s: float) -> tuple[CountedStep | None, Shape]:
        """Read the requests that have arrived, and return the next step and its size."""
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
        if rows and not (self._waiting or self._reading or step in self._ending):
            # The same rows as in the previous step, one position further.
            self._step = step + 1
            self._sum = self._sum + rows
            same = CountedStep(shape=shape, first=(), ended=(), freed=0, prompt_tokens=0)
            return same, shape
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
        """Give the tokens that decoding rows leave to prefill.

        Append the rows whose prompts are done to `first`. Return the shape of the whole step, and
        the number of tokens of the prompts that begin.
        """
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
        """End the oldest step."""
        samples = plan.shape.samples
        tokens = plan.shape.tokens
        if not (plan.first or plan.ended):
            return Settled(
                rows=samples,
                continued=samples,
                cached={},
                ended=[],
                tokens=tokens,
                free_blocks=self._free,
                prompt_tokens=plan.prompt_tokens,
            )
        self._free += plan.freed
        self._running -= len(plan.ended)
        for row in plan.first:
            clients.first_s[row.rid] = now_s
        for row in plan.ended:
            clients.last_s[row.rid] = now_s
            clients.tokens[row.rid] = row.last + 1 - row.prompt
        return Settled(
            rows=samples,
            continued=samples - len(plan.first),
            cached={row.rid: 0 for row in plan.first},
            ended=[row.rid for row in plan.ended],
            tokens=tokens,
            free_blocks=self._free,
            prompt_tokens=plan.prompt_tokens,
        )
