"""Graphs: forward passes of fixed shapes, recorded once and replayed for steps that fit.

FULL fixes the number of requests, each with one token and as many drafts; PIECEWISE fixes the
number of tokens and leaves attention eager. Steps are padded up to the next recorded size; padding
reaches no expert and no request's KV block, and no bit depends on it.
"""

import enum
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moeserve.config import Limits
from moeserve.engine.plan import StepDecision, StepPlan
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import Attend, PlanRows, StepInputs
from moeserve.runner.recorder import Pause, Recorder, Recording
from moeserve.runner.tables import HostRows

if TYPE_CHECKING:
    from moeserve.runner.peers import Peers
    from moeserve.runner.triton_inputs import FixedInputs

logger = logging.getLogger(__name__)
# of a recorded step; larger ones keep the device busy for longer than the host needs to launch them
MOST_TOKENS = 512
Forward = Callable[[StepInputs, StepDecision | None, int], Tensor]


class Mode(enum.Enum):
    """The extent of a recording: the whole forward pass, or all of the pass but attention."""

    PIECEWISE = "piecewise"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The shape of a recording. num_reqs: None where the mode leaves the number of requests free.
    room: with two micro-batches, of half the tokens each, those that all ranks make room for in
    either; 0 with one."""

    mode: Mode
    num_tokens: int
    num_reqs: int | None
    room: int = 0

    @property
    def split_at(self) -> int:
        """The tokens of the first of two micro-batches."""
        return -(-self.num_tokens // 2)


def sizes_to(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens that are recorded: the steps between them grow, and the last is
    `most`.

    20 -> 1, 2, 4, 8, 16, 20
    """
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, most, 16))
    return *(size for size in steps if size < most), most


def sizes_of(asked: str, limits: Limits) -> dict[Mode, tuple[int, ...]]:
    """Return the sizes of each mode that `graphs: asked` permits."""
    most = {Mode.FULL: limits.max_num_seqs, Mode.PIECEWISE: limits.max_num_batched_tokens}
    return {
        mode: sizes_to(min(n, MOST_TOKENS))
        for mode, n in most.items()
        if asked in ("auto", mode.value)
    }


def common_sizes(asked: str, limits: Limits) -> dict[Mode, tuple[int, ...]]:
    """Return the same where ranks serve together: all modes' sizes are among those of one."""
    each = sizes_to(min(limits.max_num_batched_tokens, MOST_TOKENS))
    return {
        mode: tuple(size for size in each if size <= sizes[-1])
        for mode, sizes in sizes_of(asked, limits).items()
    }


@dataclass(eq=False, repr=False)
class GraphManager:
    """Records forward passes and replays them for steps of few tokens.

    forward: computes hidden states; it notes the experts' load in `ubatches`. fixed: the buffers of
    the inputs. sizes: numbers of tokens of each mode that may be used, ascending. num_drafts: the
    most that a request verifies.
    """

    forward: Forward
    fixed: "FixedInputs"
    recorder: Recorder
    ubatches: Sequence[UBatch]
    sizes: Mapping[Mode, Sequence[int]]
    num_drafts: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self._recordings: dict[Descriptor, Recording] = {}
        self._now: StepInputs  # the step that is being run
        self._plans: dict[PlanRows, Any] = {}  # its attention metadata
        self._between: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def shape(self, plan: StepPlan) -> Descriptor | None:
        """Return the recording's shape that a step is to be replayed in, or None if the step runs
        as it is.
        """
        return self.dispatch(plan.num_tokens, plan.uniform_len)

    def dispatch(self, num_tokens: int, uniform_len: int | None) -> Descriptor | None:
        """Return the smallest shape that holds a step. uniform_len: the tokens of every request,
        None if they differ: 1, or 1 and the same number of drafts."""
        if uniform_len is not None and uniform_len <= 1 + self.num_drafts:
            for size in self.sizes.get(Mode.FULL, ()):
                if num_tokens <= size * uniform_len <= self.sizes[Mode.FULL][-1]:
                    return Descriptor(Mode.FULL, size * uniform_len, size)
        for size in self.sizes.get(Mode.PIECEWISE, ()):
            if size >= num_tokens:
                return Descriptor(Mode.PIECEWISE, size, None)
        return None

    def inputs(self, descriptor: Descriptor, plan: StepPlan, host: HostRows) -> StepInputs:
        """Fill the recordings' buffers with the inputs of a step, padded to the shape."""
        return self.fixed.fill(plan, host, descriptor.num_tokens, descriptor.num_reqs)

    def run(
        self, descriptor: Descriptor, step: StepInputs, decision: StepDecision | None
    ) -> Tensor:
        """Return the step's hidden states, to be used before the next run. Records the shape when
        it is new.
        """
        self._now = step
        recording = self._recordings.get(descriptor) or self._record(descriptor, decision)
        recording.replay()
        self._plans.clear()  # their work space is large
        hidden_TD, *loads = recording.results
        for ubatch, load_LE in zip(self.ubatches, loads, strict=False):
            for load_E in load_LE:
                ubatch.note_load(load_E)
        return hidden_TD

    def capture(self) -> None:
        """Record the common sizes: powers of two and the largest. Largest first: the smaller ones
        use its memory.
        """
        began_s = time.perf_counter()
        for mode, sizes in self.sizes.items():
            for size in reversed(sizes):
                if size == sizes[-1] or not size & (size - 1):
                    descriptor = Descriptor(mode, size, size if mode is Mode.FULL else None)
                    self._now = self.fixed.largest(descriptor.num_tokens, descriptor.num_reqs)
                    self._record(descriptor, None)
        number = len(self._recordings)
        took_s = time.perf_counter() - began_s
        logger.info(
            "recorded %d graphs in %.1f s; other sizes follow when they are met", number, took_s
        )

    def _record(self, descriptor: Descriptor, decision: StepDecision | None) -> Recording:
        step = self.fixed.largest(descriptor.num_tokens, descriptor.num_reqs)
        pieces = descriptor.mode is Mode.PIECEWISE

        def work(pause: Pause) -> Sequence[Tensor]:
            """Compute the step that is recorded, and returns the tensors that a replay rewrites."""
            inputs = replace(step, cut=partial(self._cut, pause)) if pieces else step
            hidden_TD = self.forward(inputs, decision, descriptor.split_at)
            loads = [ubatch.take_load() for ubatch in self.ubatches]
            return hidden_TD, *(load for load in loads if isinstance(load, Tensor))

        recording = self._recordings[descriptor] = self.recorder.record(work)
        self._plans.clear()
        return recording

    def _cut(
        self, pause: Pause, q_THd: Tensor, plan: PlanRows, attend: Attend, width: int
    ) -> Tensor:
        """Attention between two graphs. Both know the same two buffers, whatever the layer and the
        size: were each graph's queries to last until its replay, they would all need memory of
        their own."""
        shape = *q_THd.shape[1:], width
        if shape not in self._between:
            most = self.sizes[Mode.PIECEWISE][-1]
            self._between[shape] = (
                q_THd.new_empty((most, *shape[:2])),
                q_THd.new_empty((most, width)),
            )
        q, out = (buffer[: len(q_THd)] for buffer in self._between[shape])
        q.copy_(q_THd)

        def aside() -> None:
            """Plan attention once per step, and attends."""
            if plan not in self._plans:
                self._plans[plan] = plan(self._now)
            attend(q, self._plans[plan], out)

        pause(aside)
        return out


@dataclass(eq=False, repr=False)
class GroupGraphs(GraphManager):
    """Records and replays steps of ranks that compute together: under tensor parallelism, where
    experts are sharded, or both.

    The ranks of an engine have the same plans, so they record and replay the same shapes in the
    same steps. Where engines share experts, some may replay a step and others run it as it is, but
    all must make room for the same number of tokens, since the layout of exchanged rows depends on
    it: the number of the engine with most, rounded up to a recorded size. Recordings refer to the
    group's buffers and connections and the physical experts' addresses, and are dropped when those
    change.

    sizes: where experts are sharded, of PIECEWISE and FULL, the latter's among the former's.
    """

    group: "Peers"
    shards_experts: bool = True

    _place = (-1, -1)
    _recordable = 0  # tokens

    def shape(self, plan: StepPlan) -> Descriptor | None:
        """Return the shape that a step is to be replayed in, or None if the step runs as it is."""
        group = self.group
        decision = plan.decision
        if self._place != group.place:
            self.forget()
            self._place = group.place
            self._recordable = group.recordable
            return None  # once, for warmth: recording a step does not run it
        if group.mixed or not self._recordable:
            return None
        if not self.shards_experts:
            return self.dispatch(plan.num_tokens, plan.uniform_len)
        if (
            decision is None
            or (room := self.round_up(max(decision.most_tokens))) > self._recordable
        ):
            return None
        uniform_len = 1 if plan.uniform_len == 1 else None
        if decision.ubatches == 1:
            shape = self.dispatch(decision.most_tokens[0], uniform_len)
            return shape if shape and shape.num_tokens == room else None
        most = self.sizes.get(Mode.FULL, (0,))[-1]
        if uniform_len is None or plan.num_tokens > most:  # between pieces rows would be under way
            return None
        # The size that the engine with most tokens needs: the step takes as long as that one, and
        # shapes stay few.
        size = self.round_up(min(2 * max(decision.most_tokens), most))
        return Descriptor(Mode.FULL, size, size, room)

    def forget(self) -> None:
        """Drop all recordings, from any thread; a step that is being replayed keeps its own until
        that is launched.
        """
        self._recordings.clear()

    def round_up(self, tokens: int) -> int:
        """Return the number of tokens that all ranks make room for: 7 -> 8; beyond the largest
        size, `tokens`.
        """
        return next((size for size in max(self.sizes.values(), key=len) if size >= tokens), tokens)
