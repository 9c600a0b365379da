"""Dual-batch overlap: when a step runs in two micro-batches, how its tokens are split, and how the
two take turns.

With `--dbo on` a step is split whenever there is something to split, with `auto` where measurements
say it pays. Two micro-batches hide time in which the model waits for rows, and cost hand-offs and
smaller products. Neither can be known beforehand, so both ways are measured: per phase and size of
step, the time per token with one micro-batch, the part of it that was spent waiting, and the time
per token with two. The other way is tried now and then, where it could win at all, within a budget:
trials never lose more than a hundredth of all time, and one trial. A step that a graph replays does
not say how long it waited: there the times of whole steps decide alone.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from moeserve.engine.plan import I32, StepPlan, StepResult
from moeserve.moe.ping_pong import PingPong
from moeserve.moe.streams import here
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import GroupInputs, StepInputs
from moeserve.runner.job_thread import JobThread

T = TypeVar("T")

WARM = 3  # samples of the present way before the other one is tried
PERIOD = 8  # steps of the group from one occasion for a trial to the next
TRIAL = 3  # steps of a trial
BUDGET = 0.01  # of all time, that trials may lose
# tokens of a step that is tried blindly: both halves of a smaller one read all the weights that it
# reads
LEAST = 32
# of a step's time: two micro-batches must save that much to be used, and waiting last as long to be
# tried
WORTH = 0.03
# Recent samples, whose median counts: a step that records a graph, here or on another rank, takes
# many times as long.
_Samples = partial(deque[float], maxlen=7)


@dataclass(slots=True)
class _Bucket:
    """Microseconds per token."""

    one: deque[float] = field(default_factory=_Samples)
    exposed: deque[float] = field(default_factory=_Samples)
    two: deque[float] = field(default_factory=_Samples)
    # the first step in two micro-batches meets cold threads and caches, and does not count
    warm: bool = False

    @property
    def two_pay(self) -> bool:
        """Whether two micro-batches save enough of a step's time."""
        return bool(self.one and self.two) and median(self.two) < (1 - WORTH) * median(self.one)

    @property
    def worth_a_trial(self) -> bool:
        """Whether the other way could win: it cannot save more than all waiting."""
        if self.two_pay:
            return len(self.two) >= WARM
        return len(self.one) >= WARM and median(self.exposed) > WORTH * median(self.one)


class OverlapPolicy:
    """One engine's decisions. `ubatches_ok` and `note` may be called by two threads: `median`
    copies in one go.

    Two micro-batches need the consent of all engines, so all must try at the same time: occasions
    for a trial are counted in steps of the group. `ubatches_ok` is called once per such step,
    `note` with every result, and `restart` when the group is formed anew.
    """

    def __init__(self, mode: Literal["auto", "on", "off"]) -> None:
        self._mode = mode
        self._buckets: dict[tuple[bool, int], _Bucket] = {}
        self._step = 0
        self._total_us = 0.0
        self._lost_us = 0.0  # by trials
        self._trials: dict[int, int] = {}  # step -> micro-batches that it was to try
        self._alone = False

    def restart(self, num_ranks: int) -> None:
        """Count the group's steps from zero again; measurements stay. With one rank nothing
        travels.
        """
        self._step = 0
        self._alone = num_ranks == 1
        self._trials.clear()

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        """Return whether this engine agrees to two micro-batches for its next step; with no tokens
        (None) it does.
        """
        occasion = self._step % PERIOD >= PERIOD - TRIAL
        self._step += 1
        if self._mode != "auto" or plan is None or not len(plan.slots_R):
            return self._mode != "off"
        bucket = self._buckets.get(_key(plan))
        if bucket is None:
            return False
        if occasion and bucket.worth_a_trial and self._lost_us <= BUDGET * self._total_us:
            self._trials[plan.step] = 1 if bucket.two_pay else 2
            return not bucket.two_pay
        return bucket.two_pay

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from a step that this engine had tokens in; others are ignored."""
        if self._mode != "auto" or plan.decision is None or not len(plan.slots_R):
            return
        ubatches = plan.decision.ubatches
        bucket = self._buckets.setdefault(_key(plan), _Bucket())
        # The step took as long as the engine with most tokens.
        tokens = max(sum(plan.decision.most_tokens), plan.num_tokens)
        self._total_us += result.device_us
        if self._trials.pop(plan.step, 0) == ubatches:
            usual = bucket.one if ubatches == 2 else bucket.two
            self._lost_us += max(0.0, result.device_us - median(usual) * tokens)
        if ubatches == 1:
            bucket.one.append(result.device_us / tokens)
            # Transfers that nobody timed were replayed, and may have been all that the step did.
            blind = not result.comm_us and not self._alone and tokens >= LEAST
            bucket.exposed.append((result.device_us if blind else result.exposed_comm_us) / tokens)
        elif bucket.warm:
            bucket.two.append(result.device_us / tokens)
        bucket.warm |= ubatches == 2


def _key(plan: StepPlan) -> tuple[bool, int]:
    """Return a key of steps that cost about the same per token: decode or not, and tokens by
    factors of 1.4.
    """
    return int(plan.counts_R.max()) == 1, round(2 * math.log2(plan.num_tokens))


def split(step: StepInputs, split_at: int) -> tuple[StepInputs, StepInputs]:
    """Return the inputs of the first `split_at` tokens and of the others. A row across the split
    is in both parts; `sample_N` is empty in both.

    rows of 2 and 4 tokens from positions 0 and 7, split 3 -> rows of 2 and 1 from 0 and 7; a row of
    3 from 8
    """
    offsets = step.offsets_R1
    assert 0 <= split_at <= offsets[-1], (split_at, offsets)
    ends = int(np.searchsorted(offsets, split_at))  # rows that begin before the split
    begins = (
        int(np.searchsorted(offsets, split_at, side="right")) - 1
    )  # the row of the first token after it
    starts = step.starts_R[begins:].copy()
    if len(starts):
        starts[0] += split_at - offsets[begins]
    starts_R, offsets_R1 = step.rows_on_device
    begun_R = (split_at - offsets_R1[begins:-1]).clamp(
        min=0
    )  # tokens of a row that the first part has
    first = starts_R[:ends], offsets_R1[: ends + 1].clamp(max=split_at)
    later = starts_R[begins:] + begun_R, (offsets_R1[begins:] - split_at).clamp(min=0)
    bounds = np.minimum(offsets[: ends + 1], split_at)
    later_bounds = np.maximum(offsets[begins:] - split_at, 0)
    parts = (
        _part(step, slice(0, split_at), slice(0, ends), bounds, step.starts_R[:ends], first),
        _part(step, slice(split_at, None), slice(begins, None), later_bounds, starts, later),
    )
    if step.live is None:
        return parts
    lives = step.live.clamp(max=split_at), (step.live - split_at).clamp(min=0)
    return replace(parts[0], live=lives[0]), replace(parts[1], live=lives[1])


def _part(
    step: StepInputs,
    tokens: slice,
    rows: slice,
    offsets_R1: I32,
    starts_R: I32,
    on_device: tuple[Tensor, Tensor],
) -> StepInputs:
    groups = tuple(
        GroupInputs(
            group.slot_mapping_T[tokens],
            group.blocks_RN[rows],
            group.block_size,
            group.window,
            group.chunk,
        )
        for group in step.groups
    )
    ids_T = step.ids_T[tokens]
    positions = step.positions.part(tokens)
    embeds = step.embeds and step.embeds.part(tokens)
    return StepInputs(
        ids_T=ids_T,
        positions=positions,
        groups=groups,
        sample_N=step.sample_N[:0],
        offsets_R1=offsets_R1,
        starts_R=starts_R,
        rows_on_device=on_device,
        embeds=embeds,
    )


def run_in_turns(
    ubatches: Sequence[UBatch], works: Sequence[Callable[[UBatch], T]], thread: JobThread
) -> tuple[T, T]:
    """Return the results of two micro-batches, the second of which runs in `thread`. They take
    turns, so they share everything but their scratch memory and their channel."""
    first, second = ubatches
    ping_pong = PingPong(2)
    first.couple(ping_pong, second)
    second.couple(ping_pong, first)
    results: dict[int, Any] = {}
    threads = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()
    place = here()

    def run(ubatch: UBatch) -> None:
        """Run one micro-batch in its turns; an error ends both."""
        results[ubatch.index] = ubatch.run_in_turns(lambda: works[ubatch.index](ubatch))

    def run_second() -> None:
        """Run the second one with the torch settings of the first one's thread: they are all per
        thread.
        """
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with torch.inference_mode(inference), place():
            run(second)

    over = threading.Event()
    thread.do(run_second)
    thread.do(over.set)  # a job of its own: the thread keeps none of the step's tensors then
    run(first)
    over.wait()
    if ping_pong.error is None:
        return results[0], results[1]
    try:
        raise ping_pong.error
    finally:
        ping_pong.error = None  # the traceback holds this frame, the frame would hold the traceback
