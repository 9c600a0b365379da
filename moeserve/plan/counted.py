"""A fast simulated engine that computes the totals of each step without running a scheduler.

The scheduler is the specification: tests compare every number with the steps that it plans. The
cost of a step does not grow with the number of decoding rows, because these are only counted:

- A decoding row has one token in each step, from its first to a last step that is known in advance.
- A decoding row allocates a KV block whenever its position is a multiple of the block size.

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
from moeserve.plan.roofline import NO_WORK, Shape, Windows


class StepOutcome(NamedTuple):
    """The outcome of a step on one engine."""

    num_sampled: int  # rows that sampled a token
    # Rows that also sampled in the previous step and were not reported to `Clients` one by one.
    num_continued: int
    cached: dict[int, int]  # requests that got their first token -> prompt tokens from the cache
    ended_rids: list[int]  # requests that finished
    num_tokens: int
    num_free_blocks: int
    prompt_tokens: int  # of the prompts that began
    num_preempted: int = 0
    cached_tokens: int = 0


class Uncountable(Exception):
    """Raised if a request would be preempted, which cannot be counted."""


@dataclass(slots=True)
class _Request:
    """A request. It has one row in each step."""

    rid: int
    num_prompt: int  # prompt tokens
    # Positions that its steps compute in total: all tokens but the last generated one
    num_positions: int
    num_planned: int = 0  # positions of prompt tokens that the steps planned so far compute


class CountedStep(NamedTuple):
    """A planned step."""

    shape: Shape
    with_first_token: Sequence[_Request]  # requests whose first token it samples
    ended: Sequence[_Request]  # requests whose last token it samples, ordered by rid
    num_freed_blocks: int  # KV blocks of the requests that end
    prompt_tokens: int  # of the prompts that begin


def is_countable(limits: Limits, groups: Sequence[KVGroup], windows: Windows, longest: int) -> bool:
    """Return whether `CountedEngine` can simulate these engines.

    It supports full attention only, and neither prefix caching, speculative decoding nor a limit on
    the time of a step. Every running row must fit into every step, and requests of `longest` tokens
    must fit into the KV cache.
    """
    return (
        windows == (None,)
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
        self._waiting: deque[_Request] = deque()
        self._prefilling: list[_Request] = []  # rows that have begun to prefill, oldest first
        self._ending: dict[int, list[_Request]] = {}  # decoding rows by their last step
        # Numbers of decoding rows by (position - step) % block size. A row's entry never changes,
        # because both grow by 1. In step s, the rows of entry -s % block size are at a position
        # that is a multiple of the block size, and need a block.
        self._num_at_offset = [0] * limits.block_size
        self._num_decoding = 0  # decoding rows
        self._context_sum = 0  # sum of their context lengths in the next step
        self._promised_blocks = 0  # that the prompts of _prefilling will still allocate
        self._step = 0  # number of steps so far
        self._num_running = 0  # rows that prefill or decode
        self._num_free_blocks = limits.num_blocks - 1  # without the null block

    @property
    def num_waiting(self) -> int:
        """Requests that no step has begun."""
        return len(self.inbox) + len(self._waiting)

    def plan(self, now_s: float) -> tuple[CountedStep | None, Shape]:
        """Read the requests that have arrived, and return the next step and its size."""
        while self.inbox and self.inbox[0][0] <= now_s:
            submit = self.inbox.popleft()[1]
            num_positions = submit.num_prompt + submit.sampling.max_tokens - 1
            self._waiting.append(_Request(submit.rid, submit.num_prompt, num_positions))
        num_decoding = self._num_decoding
        context_sum = float(self._context_sum)
        step = self._step
        block_size = self._block_size
        if num_needing_block := self._num_at_offset[-step % block_size]:
            self._allocate(num_needing_block)
        # The decoding rows. Each has one token, so it has as many pairs as reads.
        shape = Shape(
            num_tokens=num_decoding,
            num_rows=num_decoding,
            num_samples=num_decoding,
            num_reads=(context_sum,),
            num_pairs=(context_sum,),
        )
        prompt_tokens = 0
        if num_decoding and not (self._waiting or self._prefilling or step in self._ending):
            # The same rows as in the previous step, one position further.
            self._step = step + 1
            self._context_sum = self._context_sum + num_decoding
            same_rows = CountedStep(
                shape=shape, with_first_token=(), ended=(), num_freed_blocks=0, prompt_tokens=0
            )
            return same_rows, shape
        ended_decoding = self._ending.pop(step, [])
        ended = ended_decoding
        with_first_token: list[_Request] = []
        if self._prefilling or self._waiting:
            shape, prompt_tokens = self._plan_prefill(with_first_token)
            # A request for a single token ends with its prompt.
            ended_prompts = [
                row for row in with_first_token if row.num_planned == row.num_positions
            ]
            ended = sorted([*ended_decoding, *ended_prompts], key=lambda row: row.rid)
        if not shape.num_rows:
            return None, NO_WORK
        self._step += 1
        for row in ended_decoding:
            self._num_decoding -= 1
            self._context_sum -= row.num_positions
            self._num_at_offset[(row.num_positions - 1 - step) % block_size] -= 1
        self._context_sum += self._num_decoding
        for row in with_first_token:
            if row.num_prompt < row.num_positions:  # it decodes from the next step on
                self._num_decoding += 1
                self._context_sum += row.num_prompt + 1
                self._num_at_offset[(row.num_prompt - step - 1) % block_size] += 1
                last_step = step + row.num_positions - row.num_prompt
                self._ending.setdefault(last_step, []).append(row)
        num_freed_blocks = 0
        if ended:
            num_freed_blocks = sum([self._count_blocks(row.num_positions) for row in ended])
        planned = CountedStep(
            shape=shape,
            with_first_token=with_first_token,
            ended=ended,
            num_freed_blocks=num_freed_blocks,
            prompt_tokens=prompt_tokens,
        )
        return planned, shape

    def _plan_prefill(self, with_first_token: list[_Request]) -> tuple[Shape, int]:
        """Plan the prefill with the tokens that decoding rows leave.

        Append the rows whose prompts are done to `with_first_token`. Return the shape of the whole
        step, and the number of tokens of the prompts that begin.
        """
        counts = [min(row.num_prompt - row.num_planned, self._chunk) for row in self._prefilling]
        # As in `fit_to_budget`, rows with a single token (decoding, or at the end of a prompt) come
        # first, and the others share what is left.
        num_left = self._limits.max_num_batched_tokens - self._num_decoding - counts.count(1)
        granted: list[tuple[_Request, int]] = []  # rows, and their tokens in this step
        for row, count in zip(self._prefilling, counts, strict=True):
            if count > 1:
                count = min(count, num_left)
                num_left -= count
            self._grant(row, count, granted)
        prompt_tokens = 0
        while num_left > 0 and self._waiting and self._num_running < self._limits.max_num_seqs:
            row = self._waiting[0]
            num_needed = self._count_blocks(row.num_prompt)
            num_available = (
                self._num_free_blocks - self._promised_blocks - self._limits.watermark_blocks
            )
            if self._num_running and num_needed > num_available:
                break
            self._waiting.popleft()
            self._num_running += 1
            self._promised_blocks += num_needed
            prompt_tokens += row.num_prompt
            count = min(row.num_prompt, num_left, self._chunk)
            num_left -= count
            self._prefilling.append(row)
            self._grant(row, count, granted)
        with_first_token += (row for row, _ in granted if row.num_planned == row.num_prompt)
        self._prefilling = [row for row in self._prefilling if row.num_planned < row.num_prompt]
        num_decoding = self._num_decoding
        num_tokens = num_decoding + sum(count for _, count in granted)
        # A chunk's tokens are the last ones of those planned, and each reads all up to itself: on
        # average as many as the middle one.
        num_pairs = self._context_sum + sum(
            count * (row.num_planned - (count - 1) / 2) for row, count in granted
        )
        num_reads = float(self._context_sum + sum(row.num_planned for row, _ in granted))
        shape = Shape(
            num_tokens=num_tokens,
            num_rows=num_decoding + len(granted),
            num_samples=num_decoding + len(with_first_token),
            num_reads=(num_reads,),
            num_pairs=(float(num_pairs),),
        )
        return shape, prompt_tokens

    def _grant(self, row: _Request, count: int, granted: list[tuple[_Request, int]]) -> None:
        """Plan `count` prompt tokens of a row, and allocate their KV blocks."""
        if count:
            num_planned = row.num_planned + count
            num_blocks = self._count_blocks(num_planned) - self._count_blocks(row.num_planned)
            self._allocate(num_blocks)
            self._promised_blocks -= num_blocks
            row.num_planned = num_planned
            granted.append((row, count))

    def _allocate(self, num_blocks: int) -> None:
        self._num_free_blocks -= num_blocks
        if self._num_free_blocks < 0:
            raise Uncountable

    def _count_blocks(self, num_positions: int) -> int:
        return -(-num_positions // self._block_size)

    def settle(self, plan: CountedStep, clients: Clients, now_s: float) -> StepOutcome:
        """End the oldest step, and record first and last tokens in `clients`."""
        num_samples = plan.shape.num_samples
        num_tokens = plan.shape.num_tokens
        if not (plan.with_first_token or plan.ended):
            return StepOutcome(
                num_sampled=num_samples,
                num_continued=num_samples,
                cached={},
                ended_rids=[],
                num_tokens=num_tokens,
                num_free_blocks=self._num_free_blocks,
                prompt_tokens=plan.prompt_tokens,
            )
        self._num_free_blocks += plan.num_freed_blocks
        self._num_running -= len(plan.ended)
        for row in plan.with_first_token:
            clients.first_s[row.rid] = now_s
        for row in plan.ended:
            clients.last_s[row.rid] = now_s
            clients.num_tokens[row.rid] = row.num_positions + 1 - row.num_prompt
        return StepOutcome(
            num_sampled=num_samples,
            num_continued=num_samples - len(plan.with_first_token),
            cached={row.rid: 0 for row in plan.with_first_token},
            ended_rids=[row.rid for row in plan.ended],
            num_tokens=num_tokens,
            num_free_blocks=self._num_free_blocks,
            prompt_tokens=plan.prompt_tokens,
        )
