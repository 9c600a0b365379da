"""Run a step through the model as one micro-batch, or as two (dual-batch overlap, see dbo.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from moeserve.engine.plan import StepDecision
from moeserve.messages import TraceEvent
from moeserve.models.decoder import Decoder
from moeserve.moe.streams import InFlightTransfer
from moeserve.moe.ubatch import Load, UBatch
from moeserve.ops.inputs import LayerCache, StepInputs
from moeserve.runner.dbo import run_in_turns, split
from moeserve.runner.job_thread import JobThread

T = TypeVar("T")
ONE_UBATCH = StepDecision(step=0)


@dataclass(frozen=True, slots=True)
class Meter:
    """The measurements of one step's micro-batches."""

    comm_us: int  # communication, on the host's clock
    exposed_us: int  # the part of it during which the model waited
    # Tokens per MoE layer and logical expert, [0, 0] without MoE layers. A tensor if the device
    # counted them.
    expert_tokens_LE: Load
    events: tuple[TraceEvent, ...]
    transfers: Sequence[InFlightTransfer] = ()  # measured by the device

    def times_us(self) -> tuple[int, int]:
        """Return (communication, exposed communication) in microseconds. The step must have
        finished.
        """
        comm_us = self.comm_us
        exposed_us = self.exposed_us
        for transfer_us, waited_us in (transfer.times_us for transfer in self.transfers):
            comm_us = comm_us + transfer_us
            exposed_us = exposed_us + waited_us
        return comm_us, exposed_us


class UBatchRunner:
    """Runs steps in `ubatches`. A step uses the first one, or all. Not thread-safe.

    tp_size: tensor-parallel ranks. Each of them sends its share of the tokens to the experts.
    """

    def __init__(self, num_ubatches: int = 1, tp_size: int = 1) -> None:
        assert 1 <= num_ubatches <= 2, num_ubatches
        self.ubatches = tuple(UBatch(index) for index in range(num_ubatches))
        # Maps the largest number of tokens on any rank to the number for which all ranks make room.
        # It must be the same function on all ranks.
        self.round_up: Callable[[int], int] = lambda tokens: tokens
        # Returns the transfers since the last call, on a device that measures them.
        self.take_transfers: Callable[[], Sequence[InFlightTransfer]] = tuple
        self._tp_size = tp_size
        self._second: JobThread | None = None  # runs the second micro-batch; started when needed

    def forward(
        self,
        model: Decoder,
        step: StepInputs,
        split_at: int,
        decision: StepDecision | None,
        kv: Sequence[LayerCache],
    ) -> Tensor:
        """Return the hidden states [T, D] of all tokens, in order.

        If there are two micro-batches, the first one has the first `split_at` tokens. An error in
        one micro-batch ends both, and the first error is raised. After that, the next step may run.
        """
        decision = decision or ONE_UBATCH
        if decision.ubatches == 1:
            return self._run(decision, [lambda ubatch: model.forward(step, kv, ubatch)])[0]

        def work(half: StepInputs, ubatch: UBatch) -> Tensor | None:
            if len(half.ids_T):
                return model.forward(half, kv, ubatch)
            model.serve(ubatch)  # without tokens, the experts still compute for other ranks
            return None

        works = [partial(work, half) for half in split(step, split_at)]
        hidden = [hidden_TD for hidden_TD in self._run(decision, works) if hidden_TD is not None]
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)

    def serve(self, model: Decoder, decision: StepDecision) -> None:
        """Run a step in which this rank has no tokens: its experts compute for other ranks."""
        self._run(decision, [model.serve] * decision.ubatches)

    def take_meter(self) -> Meter:
        """Return the measurements since the last call. To be called after each step."""
        tokens_LE, *others = (ubatch.take_load() for ubatch in self.ubatches)
        for other_LE in others:
            if len(other_LE):
                tokens_LE = tokens_LE + other_LE if len(tokens_LE) else other_LE
        meters = [ubatch.meter for ubatch in self.ubatches]
        comm_ns, exposed_ns = (
            sum(times) for times in zip(*((m.comm_ns, m.exposed_ns) for m in meters), strict=True)
        )
        meter = Meter(
            comm_us=comm_ns // 1000,
            # Polling takes time even if all rows have arrived, so the sum may be larger.
            exposed_us=min(comm_ns, exposed_ns) // 1000,
            expert_tokens_LE=tokens_LE,
            events=tuple(event for meter in meters for event in meter.events or ()),
            transfers=self.take_transfers(),
        )
        for ubatch_meter in meters:
            ubatch_meter.reset(trace=False)
        return meter

    def close(self) -> None:
        """End the thread of the second micro-batch, and wait for it."""
        if self._second is not None:
            self._second.stop()
            self._second = None

    def _run(self, decision: StepDecision, works: Sequence[Callable[[UBatch], T]]) -> Sequence[T]:
        """Return the result of each micro-batch's work."""
        # Both micro-batches use the larger number, so that they have the same number of rounds.
        # Otherwise one would run ahead of the other in each layer.
        most_tokens = -(-self.round_up(max(decision.most_tokens)) // self._tp_size)
        self.take_transfers()  # drop those of a failed step
        for ubatch in self.ubatches:
            ubatch.most_tokens = most_tokens
            ubatch.take_load()
            ubatch.meter.reset(decision.trace)
        if len(works) == 1:
            return [_timed(works[0], self.ubatches[0])]
        if self._second is None:
            self._second = JobThread("micro-batch 1")
        return run_in_turns(self.ubatches, [partial(_timed, work) for work in works], self._second)


def _timed(work: Callable[[UBatch], T], ubatch: UBatch) -> T:
    ubatch.meter.begin_work()
    result = work(ubatch)
    ubatch.meter.record_work("output", -1)
    return result
