"""Dual-batch overlap (DBO): overlap the communication of one micro-batch with the computation of
another.

This module decides when a step runs as two micro-batches, splits its inputs, and runs the two in
turns.

With `--dbo on`, every step with at least two tokens is split. With `auto`, measurements decide. Two
micro-batches hide the time in which the model waits for other ranks, but add hand-offs and smaller
matrix products. Which number is faster cannot be known beforehand, so the policy measures both, by
phase and step size: the time per token with one micro-batch, the part of that time which was spent
waiting, and the time per token with two micro-batches.

From time to time the policy tries the other number, if it could be faster. These trials have a
budget: they lose at most 1 % of the total time, plus one trial. The waiting time of a step that was
replayed as a graph is unknown, so the policy then compares only the times of whole steps.
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
from moeserve.moe.streams import share_stream
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import GroupInputs, StepInputs
from moeserve.runner.job_thread import JobThread

T = TypeVar("T")

MIN_SAMPLES = 3  # samples of the current number of micro-batches before the other is tried
TRIAL_PERIOD = 8  # steps of the group from the begin of one trial to that of the next
TRIAL_STEPS = 3  # steps per trial
MAX_LOSS_SHARE = 0.01  # share of the total time that trials may lose
# Fewest tokens of a step that is tried as two micro-batches without knowing its waiting time. The
# halves of a smaller step would each read all weights that the whole step reads.
MIN_UNMEASURED_TOKENS = 32
# Share of a step's time that two micro-batches must save to be used. They are tried if the waiting
# time has at least this share.
MIN_GAIN = 0.03
# The last samples. The policy uses their median, because a step in which any rank records a graph
# takes many times longer.
_Samples = partial(deque[float], maxlen=7)


@dataclass(slots=True)
class _Bucket:
    """The times of similar steps, in microseconds per token."""

    one_us: deque[float] = field(default_factory=_Samples)  # with one micro-batch
    exposed_us: deque[float] = field(default_factory=_Samples)  # the waiting time of these
    two_us: deque[float] = field(default_factory=_Samples)  # with two micro-batches
    # Whether a step has run as two micro-batches before. The time of the first such step is not
    # used, because threads and caches are cold.
    has_run_two: bool = False

    @property
    def two_are_faster(self) -> bool:
        """Whether two micro-batches save enough of a step's time."""
        return bool(self.one_us and self.two_us) and median(self.two_us) < (1 - MIN_GAIN) * median(
            self.one_us
        )

    @property
    def is_worth_a_trial(self) -> bool:
        """Whether the other number of micro-batches could be faster.

        Two micro-batches can save at most the waiting time.
        """
        if self.two_are_faster:
            return len(self.two_us) >= MIN_SAMPLES
        return len(self.one_us) >= MIN_SAMPLES and median(self.exposed_us) > MIN_GAIN * median(
            self.one_us
        )


class OverlapPolicy:
    """One engine's votes for two micro-batches.

    A step has two micro-batches only if all engines agree, so all must try them at the same time.
    Therefore trials are scheduled by counting the steps of the group. `ubatches_ok` is called once
    per step, `note` with every result, and `restart` when the group is formed.

    `ubatches_ok` and `note` may be called by different threads, because `median` copies the samples
    atomically.
    """

    def __init__(self, mode: Literal["auto", "on", "off"]) -> None:
        self._mode = mode
        self._buckets: dict[tuple[bool, int], _Bucket] = {}
        self._num_steps = 0
        self._total_us = 0.0
        self._lost_us = 0.0  # by trials
        self._trials: dict[int, int] = {}  # number of micro-batches to try, by step
        self._is_alone = False  # whether the group has one rank, so that there is no communication

    def restart(self, num_ranks: int) -> None:
        """Restart the count of steps. Measurements are kept."""
        self._num_steps = 0
        self._is_alone = num_ranks == 1
        self._trials.clear()

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        """Return whether this engine agrees to two micro-batches for its next step. Without tokens
        (None) it does, unless the mode is "off".
        """
        is_trial = self._num_steps % TRIAL_PERIOD >= TRIAL_PERIOD - TRIAL_STEPS
        self._num_steps += 1
        if self._mode != "auto" or plan is None or not len(plan.slots_R):
            return self._mode != "off"
        bucket = self._buckets.get(_bucket_key(plan))
        if bucket is None:
            return False
        if (
            is_trial
            and bucket.is_worth_a_trial
            and self._lost_us <= MAX_LOSS_SHARE * self._total_us
        ):
            self._trials[plan.step] = 1 if bucket.two_are_faster else 2
            return not bucket.two_are_faster
        return bucket.two_are_faster

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from the times of a step. Steps without tokens on this engine are ignored."""
        if self._mode != "auto" or plan.decision is None or not len(plan.slots_R):
            return
        ubatches = plan.decision.ubatches
        bucket = self._buckets.setdefault(_bucket_key(plan), _Bucket())
        # The step took as long as on the engine with most tokens.
        num_tokens = max(sum(plan.decision.most_tokens), plan.num_tokens)
        self._total_us += result.device_us
        if self._trials.pop(plan.step, 0) == ubatches:
            usual_us = bucket.one_us if ubatches == 2 else bucket.two_us
            self._lost_us += max(0.0, result.device_us - median(usual_us) * num_tokens)
        if ubatches == 1:
            bucket.one_us.append(result.device_us / num_tokens)
            # Transfers without a measured time were replayed. They may have taken the whole step.
            is_unmeasured = (
                not result.comm_us and not self._is_alone and num_tokens >= MIN_UNMEASURED_TOKENS
            )
            bucket.exposed_us.append(
                (result.device_us if is_unmeasured else result.exposed_comm_us) / num_tokens
            )
        elif bucket.has_run_two:
            bucket.two_us.append(result.device_us / num_tokens)
        bucket.has_run_two |= ubatches == 2


def _bucket_key(plan: StepPlan) -> tuple[bool, int]:
    """Return a key for steps with similar times per token: whether all rows decode, and the number
    of tokens in steps of a factor of 1.4.
    """
    return int(plan.counts_R.max()) == 1, round(2 * math.log2(plan.num_tokens))


def split(step: StepInputs, split_at: int) -> tuple[StepInputs, StepInputs]:
    """Return the inputs of the first `split_at` tokens and of the others. A row across the split is
    in both. `logits_indices_N` is empty in both.

    rows of 2 and 4 tokens from positions 0 and 7, split 3 -> rows of 2 and 1 from 0 and 7; a row of
    3 from 8
    """
    offsets = step.offsets_R1
    assert 0 <= split_at <= offsets[-1], (split_at, offsets)
    num_before = int(np.searchsorted(offsets, split_at))  # rows that begin before the split
    # The row of the first token after the split.
    first_after = int(np.searchsorted(offsets, split_at, side="right")) - 1
    starts_after = step.starts_R[first_after:].copy()
    if len(starts_after):
        starts_after[0] += split_at - offsets[first_after]
    starts_R, offsets_R1 = step.rows_on_device
    # Tokens of each of these rows before the split.
    begun_R = (split_at - offsets_R1[first_after:-1]).clamp(min=0)
    first = _part(
        step,
        tokens=slice(0, split_at),
        rows=slice(0, num_before),
        offsets_R1=np.minimum(offsets[: num_before + 1], split_at),
        starts_R=step.starts_R[:num_before],
        on_device=(starts_R[:num_before], offsets_R1[: num_before + 1].clamp(max=split_at)),
    )
    second = _part(
        step,
        tokens=slice(split_at, None),
        rows=slice(first_after, None),
        offsets_R1=np.maximum(offsets[first_after:] - split_at, 0),
        starts_R=starts_after,
        on_device=(
            starts_R[first_after:] + begun_R,
            (offsets_R1[first_after:] - split_at).clamp(min=0),
        ),
    )
    if step.live is None:
        return first, second
    return (
        replace(first, live=step.live.clamp(max=split_at)),
        replace(second, live=(step.live - split_at).clamp(min=0)),
    )


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
            slot_mapping_T=group.slot_mapping_T[tokens],
            blocks_RN=group.blocks_RN[rows],
            block_size=group.block_size,
            window=group.window,
            chunk=group.chunk,
            diffusion_block=group.diffusion_block,
        )
        for group in step.groups
    )
    ids_T = step.ids_T[tokens]
    positions = step.positions.part(tokens)
    embeds = step.embeds and step.embeds.part(tokens)
    earlier_ids_TN = None if step.earlier_ids_TN is None else step.earlier_ids_TN[tokens]
    return StepInputs(
        ids_T=ids_T,
        positions=positions,
        groups=groups,
        logits_indices_N=step.logits_indices_N[:0],
        offsets_R1=offsets_R1,
        starts_R=starts_R,
        rows_on_device=on_device,
        embeds=embeds,
        earlier_ids_TN=earlier_ids_TN,
    )


def run_in_turns(
    ubatches: Sequence[UBatch], works: Sequence[Callable[[UBatch], T]], thread: JobThread
) -> tuple[T, T]:
    """Run two micro-batches, the second one in `thread`. Return their results.

    They run in turns, never at the same time. So they can share everything except scratch memory
    and communication channels.
    """
    first, second = ubatches
    ping_pong = PingPong(2)
    first.couple(ping_pong, second)
    second.couple(ping_pong, first)
    results: dict[int, Any] = {}
    num_threads = torch.get_num_threads()
    is_inference = torch.is_inference_mode_enabled()
    on_this_stream = share_stream()

    def run(ubatch: UBatch) -> None:
        results[ubatch.index] = ubatch.run_in_turns(lambda: works[ubatch.index](ubatch))

    def run_second() -> None:
        # Torch keeps these settings per thread, so copy those of the thread that runs the first.
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        with torch.inference_mode(is_inference), on_this_stream():
            run(second)

    second_is_done = threading.Event()
    thread.do(run_second)
    # A separate job, so that the thread has released the step's tensors by then.
    thread.do(second_is_done.set)
    run(first)
    second_is_done.wait()
    if ping_pong.error is None:
        return results[0], results[1]
    try:
        raise ping_pong.error
    finally:
        ping_pong.error = None  # breaks the cycle error -> traceback -> this frame -> error
