"""CUDA graphs: forward passes of fixed shapes, recorded once and replayed for steps that fit.

A graph in mode FULL is the whole forward pass, for a fixed number of requests that each have the
same number of tokens (one, and drafts). In mode PIECEWISE, graphs are for a fixed number of tokens,
and attention runs eagerly between them.

Steps are padded to the next recorded size. Padding is not sent to experts and is not written to the
KV blocks of requests, and the bits of the results do not depend on it.
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
# The most tokens of a recorded step. A larger step takes longer than the host needs to launch it,
# so a graph would not help.
MAX_RECORDED_TOKENS = 512
Forward = Callable[[StepInputs, StepDecision | None, int], Tensor]


class Mode(enum.Enum):
    """The extent of a recording: the whole forward pass, or all of it except attention."""

    PIECEWISE = "piecewise"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The shape of a recording."""

    mode: Mode
    num_tokens: int
    num_reqs: int | None  # None in mode PIECEWISE: any number
    # With two micro-batches of half the tokens each: the tokens per micro-batch for which all ranks
    # make room. 0: one micro-batch.
    padded_ubatch_tokens: int = 0

    @property
    def split_at(self) -> int:
        """The number of tokens in the first of two micro-batches."""
        return -(-self.num_tokens // 2)


def sizes_up_to(max_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens that are recorded, with growing gaps, up to `max_tokens`.

    20 -> 1, 2, 4, 8, 16, 20
    """
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, max_tokens, 16))
    return *(size for size in sizes if size < max_tokens), max_tokens


def sizes_of(graphs: str, limits: Limits) -> dict[Mode, tuple[int, ...]]:
    """Return the sizes of each mode that the setting `graphs` allows."""
    max_tokens = {Mode.FULL: limits.max_num_seqs, Mode.PIECEWISE: limits.max_num_batched_tokens}
    return {
        mode: sizes_up_to(min(limit, MAX_RECORDED_TOKENS))
        for mode, limit in max_tokens.items()
        if graphs in ("auto", mode.value)
    }


def common_sizes(graphs: str, limits: Limits) -> dict[Mode, tuple[int, ...]]:
    """Return the sizes of each mode for ranks that share experts. The modes use the same sizes, as
    far as they go.
    """
    all_sizes = sizes_up_to(min(limits.max_num_batched_tokens, MAX_RECORDED_TOKENS))
    return {
        mode: tuple(size for size in all_sizes if size <= sizes[-1])
        for mode, sizes in sizes_of(graphs, limits).items()
    }


@dataclass(eq=False, repr=False)
class GraphManager:
    """Records forward passes, and replays them for steps with few tokens."""

    forward: Forward  # computes hidden states, and adds the tokens of experts to `ubatches`
    fixed_inputs: "FixedInputs"  # the input buffers
    recorder: Recorder
    ubatches: Sequence[UBatch]
    sizes: Mapping[Mode, Sequence[int]]  # numbers of tokens that may be recorded, ascending
    num_drafts: int = field(default=0, kw_only=True)  # the most that a request verifies

    def __post_init__(self) -> None:
        self._recordings: dict[Descriptor, Recording] = {}
        self._current_step: StepInputs
        self._attention_plans: dict[PlanRows, Any] = {}  # attention metadata of the current step
        # Buffers of attention between graphs: of queries and of outputs. By heads, width of queries
        # and width of the output.
        self._attention_buffers: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def shape(self, plan: StepPlan) -> Descriptor | None:
        """Return the shape in which to replay a step; None: run it without graphs."""
        return self.dispatch(plan.num_tokens, plan.uniform_len)

    def dispatch(self, num_tokens: int, uniform_len: int | None) -> Descriptor | None:
        """Return the smallest shape that holds a step.

        uniform_len: tokens of each request (one, and drafts); None if requests differ.
        """
        if uniform_len is not None and uniform_len <= 1 + self.num_drafts:
            for size in self.sizes.get(Mode.FULL, ()):
                if num_tokens <= size * uniform_len <= self.sizes[Mode.FULL][-1]:
                    return Descriptor(Mode.FULL, size * uniform_len, size)
        for size in self.sizes.get(Mode.PIECEWISE, ()):
            if size >= num_tokens:
                return Descriptor(Mode.PIECEWISE, size, None)
        return None

    def inputs(self, descriptor: Descriptor, plan: StepPlan, host: HostRows) -> StepInputs:
        """Fill the input buffers with a step, padded to the shape."""
        return self.fixed_inputs.fill(plan, host, descriptor.num_tokens, descriptor.num_reqs)

    def run(
        self, descriptor: Descriptor, step: StepInputs, decision: StepDecision | None
    ) -> Tensor:
        """Replay a step, after recording its shape if the shape is new.

        Return the hidden states, which are valid until the next run.
        """
        self._current_step = step
        recording = self._recordings.get(descriptor) or self._record(descriptor, decision)
        recording.replay()
        self._attention_plans.clear()  # because their workspace is large
        hidden_TD, *expert_tokens = recording.results
        # strict=False, because a recording of one micro-batch has the counts of one.
        for ubatch, tokens_LE in zip(self.ubatches, expert_tokens, strict=False):
            for tokens_E in tokens_LE:
                ubatch.record_layer_load(tokens_E)
        return hidden_TD

    def capture(self) -> None:
        """Record the common sizes: the powers of two and the largest.

        The largest size comes first, because the others can use its memory.
        """
        began_at_s = time.perf_counter()
        for mode, sizes in self.sizes.items():
            for size in reversed(sizes):
                if size == sizes[-1] or not size & (size - 1):
                    descriptor = Descriptor(mode, size, size if mode is Mode.FULL else None)
                    self._current_step = self.fixed_inputs.largest(
                        descriptor.num_tokens, descriptor.num_reqs
                    )
                    self._record(descriptor, None)
        took_s = time.perf_counter() - began_at_s
        logger.info(
            "recorded %d graphs in %.1f s; other sizes are recorded when first used",
            len(self._recordings),
            took_s,
        )

    def _record(self, descriptor: Descriptor, decision: StepDecision | None) -> Recording:
        step = self.fixed_inputs.largest(descriptor.num_tokens, descriptor.num_reqs)
        is_piecewise = descriptor.mode is Mode.PIECEWISE

        def work(pause: Pause) -> Sequence[Tensor]:
            inputs = step
            if is_piecewise:
                inputs = replace(step, graph_break=partial(self._break_graph, pause))
            hidden_TD = self.forward(inputs, decision, descriptor.split_at)
            loads = [ubatch.take_load() for ubatch in self.ubatches]
            return hidden_TD, *(load for load in loads if isinstance(load, Tensor))

        recording = self._recordings[descriptor] = self.recorder.record(work)
        self._attention_plans.clear()
        return recording

    def _break_graph(
        self, pause: Pause, q_THd: Tensor, make_plan: PlanRows, attend: Attend, width: int
    ) -> Tensor:
        """Run attention between two graphs.

        All layers and sizes share one buffer for queries and one for outputs. If each graph kept
        its own tensors until its replay, all of them would need memory.
        """
        shape = *q_THd.shape[1:], width
        if shape not in self._attention_buffers:
            max_tokens = self.sizes[Mode.PIECEWISE][-1]
            self._attention_buffers[shape] = (
                q_THd.new_empty((max_tokens, *shape[:2])),
                q_THd.new_empty((max_tokens, width)),
            )
        q, out = (buffer[: len(q_THd)] for buffer in self._attention_buffers[shape])
        q.copy_(q_THd)

        def run_attention() -> None:
            if make_plan not in self._attention_plans:  # planned once per step, for all layers
                self._attention_plans[make_plan] = make_plan(self._current_step)
            attend(q, self._attention_plans[make_plan], out)

        pause(run_attention)
        return out


@dataclass(eq=False, repr=False)
class GroupGraphs(GraphManager):
    """Records and replays steps of ranks that compute together, with tensor parallelism or sharded
    experts.

    The ranks of an engine have the same plans, so they record and replay the same shapes in the
    same steps. Among engines that share experts, some may replay a step while others run it
    without graphs. But all must make room for the same number of tokens, because the layout of
    exchanged rows depends on it: the largest number on any engine, rounded up to a recorded size.

    A recording contains addresses of the group's buffers, connections and experts. It is dropped
    when these change.

    With sharded experts, the `sizes` of FULL must be among those of PIECEWISE (`common_sizes`).
    """

    peers: "Peers"
    shards_experts: bool = True

    _topology = (-1, -1)  # `Peers.topology` that the recordings are for
    _max_recordable = 0  # the most tokens of a recorded step

    def shape(self, plan: StepPlan) -> Descriptor | None:
        peers = self.peers
        decision = plan.decision
        if self._topology != peers.topology:
            self.forget()
            self._topology = peers.topology
            self._max_recordable = peers.max_recordable_tokens
            return None  # run one step without graphs: kernels must have run before a recording
        if peers.mixed or not self._max_recordable:
            return None
        if not self.shards_experts:
            return self.dispatch(plan.num_tokens, plan.uniform_len)
        if decision is None:
            return None
        padded_tokens = self.round_up(max(decision.most_tokens))
        if padded_tokens > self._max_recordable:
            return None
        uniform_len = 1 if plan.uniform_len == 1 else None
        if decision.ubatches == 1:
            shape = self.dispatch(decision.most_tokens[0], uniform_len)
            return shape if shape and shape.num_tokens == padded_tokens else None
        max_tokens = self.sizes.get(Mode.FULL, (0,))[-1]
        # Two micro-batches are recorded in mode FULL only, because a transfer would otherwise be in
        # flight between two graphs.
        if uniform_len is None or plan.num_tokens > max_tokens:
            return None
        # Pad to the size of the engine with most tokens. That costs no time, because the step takes
        # as long as on that engine, and there are fewer shapes.
        size = self.round_up(min(2 * max(decision.most_tokens), max_tokens))
        return Descriptor(Mode.FULL, size, size, padded_tokens)

    def forget(self) -> None:
        """Drop all recordings. May be called from any thread: a step that is being launched keeps
        its recording.
        """
        self._recordings.clear()

    def round_up(self, tokens: int) -> int:
        """Return the number of tokens for which all ranks make room: the next recorded size.

        7 -> 8; beyond the largest size, `tokens`
        """
        return next((size for size in max(self.sizes.values(), key=len) if size >= tokens), tokens)
