"""How a step of a given shape is run: eagerly, or by replaying a recorded forward pass of a fixed shape.

FULL fixes the number of requests, each with one token; PIECEWISE fixes the number of tokens and leaves attention eager;
NONE runs the model's code. Steps are padded up to the next recorded size; padding reaches no expert and no request's KV
block, and no bit depends on it.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from moeserve.config import Limits
from moeserve.engine.plan import StepPlan
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import Attend, PlanRows, StepInputs
from moeserve.runner.recorder import Pause, Recorder, Recording

if TYPE_CHECKING:
    from moeserve.runner.triton_inputs import FixedInputs

logger = logging.getLogger(__name__)
MOST_TOKENS = 512  # of a recorded step; larger ones keep the device busy for longer than the host needs to launch them
Forward = Callable[[StepInputs], Tensor]


class Mode(enum.Enum):
    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The shape that a step runs in. num_reqs and uniform_len are None where the mode leaves them free."""

    mode: Mode
    num_tokens: int
    num_reqs: int | None
    uniform_len: int | None


def eager_shape(plan: StepPlan) -> Descriptor:
    """The shape of a step that is run as it is."""
    return Descriptor(Mode.NONE, plan.num_tokens, len(plan.slots_R), plan.uniform_len)


class Graphs(Protocol):
    def shape(self, plan: StepPlan) -> Descriptor:
        """The shape that a step with rows runs in."""
        ...

    def dispatch(self, num_reqs: int, num_tokens: int, uniform_len: int | None) -> Descriptor:
        """The shape for a step. uniform_len: the tokens of every request, None if they differ."""
        ...

    def inputs(self, descriptor: Descriptor, plan: StepPlan, prepare: Callable[[], StepInputs]) -> StepInputs:
        """The step's inputs in the dispatched shape; prepare: makes them in their own."""
        ...

    def run(self, descriptor: Descriptor, forward: Forward, step: StepInputs) -> Tensor:
        """Hidden states of the step, computed in the dispatched shape; to be used before the next run."""
        ...


class EagerGraphs:
    """Runs every step as it is."""

    def shape(self, plan: StepPlan) -> Descriptor:
        return self.dispatch(len(plan.slots_R), plan.num_tokens, plan.uniform_len)

    def dispatch(self, num_reqs: int, num_tokens: int, uniform_len: int | None) -> Descriptor:
        return Descriptor(Mode.NONE, num_tokens, num_reqs, uniform_len)

    def inputs(self, descriptor: Descriptor, plan: StepPlan, prepare: Callable[[], StepInputs]) -> StepInputs:
        return prepare()

    def run(self, descriptor: Descriptor, forward: Forward, step: StepInputs) -> Tensor:
        assert descriptor.mode is Mode.NONE, descriptor
        return forward(step)


def sizes_to(most: int) -> tuple[int, ...]:
    """Numbers of tokens that are recorded: the steps between them grow, the last is `most`.

    20 -> 1, 2, 4, 8, 16, 20
    """
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, most, 16))
    return *(size for size in steps if size < most), most


def obstacle(asked: str, travels: bool, graph_safe: bool) -> str | None:
    """What is in the way of graphs, or None. travels: rows leave this rank. graph_safe: of the model."""
    if asked == "off":
        return "graphs: off"
    if travels:
        return "rows travel between ranks, by transports that cannot be recorded"
    return None if graph_safe else "not all kernels that serve can be recorded"


def sizes_of(asked: str, limits: Limits) -> dict[Mode, tuple[int, ...]]:
    """What to record when `graphs: asked` is set: the sizes of each mode."""
    most = {Mode.FULL: limits.max_num_seqs, Mode.PIECEWISE: limits.max_num_batched_tokens}
    return {mode: sizes_to(min(n, MOST_TOKENS)) for mode, n in most.items() if asked in ("auto", mode.value)}


def common_sizes(asked: str, limits: Limits) -> dict[Mode, tuple[int, ...]]:
    """The same where ranks serve together: all modes' sizes are among those of one."""
    each = sizes_to(min(limits.max_num_batched_tokens, MOST_TOKENS))
    most = {Mode.FULL: limits.max_num_seqs, Mode.PIECEWISE: limits.max_num_batched_tokens}
    return {
        mode: tuple(size for size in each if size <= n) for mode, n in most.items() if asked in ("auto", mode.value)
    }


class GraphManager:
    """Replays recorded passes for steps of few tokens, and runs the others as they are.

    sizes: of each mode that may be used, ascending. micro-batch: the one that `forward` notes its experts' load in.
    """

    def __init__(
        self, fixed: FixedInputs, recorder: Recorder, ubatch: UBatch, sizes: Mapping[Mode, Sequence[int]]
    ) -> None:
        self._fixed, self._recorder, self._ubatch = fixed, recorder, ubatch
        self._sizes = sizes
        self._recordings: dict[Descriptor, Recording] = {}
        self._now: StepInputs  # the step that is being run
        self._plans: dict[PlanRows, Any] = {}  # its attention
        self._between: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def shape(self, plan: StepPlan) -> Descriptor:
        return self.dispatch(len(plan.slots_R), plan.num_tokens, plan.uniform_len)

    def drop(self) -> None:
        """Forgets all recordings: what they know of memory is no longer so."""
        self._recordings.clear()

    def dispatch(self, num_reqs: int, num_tokens: int, uniform_len: int | None) -> Descriptor:
        if uniform_len == 1 and (size := self._size(Mode.FULL, num_tokens)) is not None:
            return _descriptor(Mode.FULL, size)
        if (size := self._size(Mode.PIECEWISE, num_tokens)) is not None:
            return _descriptor(Mode.PIECEWISE, size)
        return Descriptor(Mode.NONE, num_tokens, num_reqs, uniform_len)

    def inputs(self, descriptor: Descriptor, plan: StepPlan, prepare: Callable[[], StepInputs]) -> StepInputs:
        if descriptor.mode is Mode.NONE:
            return prepare()
        return self._fixed.fill(plan, descriptor.num_tokens, descriptor.num_reqs)

    def run(self, descriptor: Descriptor, forward: Forward, step: StepInputs) -> Tensor:
        if descriptor.mode is Mode.NONE:
            return forward(step)
        self._now = step
        recording = self._recordings.get(descriptor) or self._record(descriptor, forward)
        recording.replay()
        self._plans.clear()  # their work space is large
        hidden_TD, *loads = recording.results
        for load_LE in loads:
            for load_E in load_LE:
                self._ubatch.note_load(load_E)
        return hidden_TD

    def capture(self, forward: Forward) -> None:
        """Records the common sizes: powers of two and the largest. Largest first: the smaller ones use its memory."""
        began_s = time.perf_counter()
        for mode, sizes in self._sizes.items():
            for size in reversed(sizes):
                if size == sizes[-1] or not size & (size - 1):
                    descriptor = _descriptor(mode, size)
                    self._now = self._fixed.largest(descriptor.num_tokens, descriptor.num_reqs)
                    self._record(descriptor, forward)
        number, took_s = len(self._recordings), time.perf_counter() - began_s
        logger.info("recorded %d graphs in %.1f s; other sizes follow when they are met", number, took_s)

    def _size(self, mode: Mode, tokens: int) -> int | None:
        return next((size for size in self._sizes.get(mode, ()) if size >= tokens), None)

    def _record(self, descriptor: Descriptor, forward: Forward) -> Recording:
        step = self._fixed.largest(descriptor.num_tokens, descriptor.num_reqs)
        pieces = descriptor.mode is Mode.PIECEWISE

        def work(pause: Pause) -> Sequence[Tensor]:
            hidden_TD = forward(replace(step, cut=partial(self._cut, pause)) if pieces else step)
            load = self._ubatch.take_load()
            return (hidden_TD, load) if isinstance(load, Tensor) else (hidden_TD,)

        recording = self._recordings[descriptor] = self._recorder.record(work)
        self._plans.clear()
        return recording

    def _cut(self, pause: Pause, q_THd: Tensor, plan: PlanRows, attend: Attend) -> Tensor:
        """Attention between two graphs. Both know the same two buffers, whatever the layer and the size: were each
        graph's queries to last until its replay, they would all need memory of their own."""
        shape = q_THd.shape[1:]
        if shape not in self._between:
            most = self._sizes[Mode.PIECEWISE][-1]
            self._between[shape] = q_THd.new_empty((most, *shape)), q_THd.new_empty((most, shape.numel()))
        q, out = (buffer[: len(q_THd)] for buffer in self._between[shape])
        q.copy_(q_THd)

        def aside() -> None:
            if plan not in self._plans:
                self._plans[plan] = plan(self._now)
            attend(q, self._plans[plan], out)

        pause(aside)
        return out


def _descriptor(mode: Mode, size: int) -> Descriptor:
    return Descriptor(mode, size, size, 1) if mode is Mode.FULL else Descriptor(mode, size, None, None)
