"""Runs a step through the model in one micro-batch, or in two (dual-batch overlap, see dbo.py)."""

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
ALONE = StepDecision(step=0)


@dataclass(frozen=True, slots=True)
class Meter:
    """The measurements of one step's micro-batches. comm_us, exposed_us: by the host's clock.
    transfers: those that the device measures. load_LE: rows per MoE layer and logical expert, [0,
    0] if none; a tensor if on the device."""

    comm_us: int
    exposed_us: int
    load_LE: Load
    events: tuple[TraceEvent, ...]
    transfers: Sequence[InFlightTransfer] = ()

    def times_us(self) -> tuple[int, int]:
        """Return (communication, the part of it that was not hidden) in microseconds, once the
        step is finished.
        """
        comm_us = self.comm_us
        exposed_us = self.exposed_us
        for took_us, stood_us in (transfer.times_us for transfer in self.transfers):
            comm_us = comm_us + took_us
            exposed_us = exposed_us + stood_us
        return comm_us, exposed_us


class UBatchRunner:
    """Runs steps in `ubatches`, of which a step uses the first or all. Not thread-safe.

    tp_size: ranks that share the engine's rows, each of which sends its part to the experts.
    `take_transfers`: returns what was joined since the last call, on a device that times its
    transfers. `round_up`: maps the tokens of the rank with most to the number that all ranks make
    room for; the same function on all ranks.
    """

    def __init__(self, num_ubatches: int = 1, tp_size: int = 1) -> None:
        assert 1 <= num_ubatches <= 2, num_ubatches
        self.ubatches = tuple(UBatch(index) for index in range(num_ubatches))
        self.round_up: Callable[[int], int] = lambda tokens: tokens
        self.take_transfers: Callable[[], Sequence[InFlightTransfer]] = tuple
        self._tp_size = tp_size
        self._second: JobThread | None = (
            None  # runs the second micro-batch, from the first step that has one
        )

    def forward(
        self,
        model: Decoder,
        step: StepInputs,
        split_at: int,
        decision: StepDecision | None,
        kv: Sequence[LayerCache],
    ) -> Tensor:
        """Return the hidden states [T, D] of all tokens, in order. With two micro-batches agreed,
        the first one has `split_at` of the tokens.

        An error in a micro-batch ends both and is raised here, the first one if there are several;
        the next step may follow.
        """
        decision = decision or ALONE
        if decision.ubatches == 1:
            return self._run(decision, [lambda ubatch: model.forward(step, kv, ubatch)])[0]

        def work(part: StepInputs, ubatch: UBatch) -> Tensor | None:
            """Compute one half. A half without tokens still takes part in what other ranks do."""
            if len(part.ids_T):
                return model.forward(part, kv, ubatch)
            model.serve(ubatch)
            return None

        works = [partial(work, part) for part in split(step, split_at)]
        parts = [hidden for hidden in self._run(decision, works) if hidden is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def serve(self, model: Decoder, decision: StepDecision) -> None:
        """Take part in a step in which this rank has no tokens."""
        self._run(decision, [model.serve] * decision.ubatches)

    def take_meter(self) -> Meter:
        """Return what was measured since the last call; to be called after each step."""
        load_LE, *others = (ubatch.take_load() for ubatch in self.ubatches)
        for other_LE in others:
            if len(other_LE):
                load_LE = load_LE + other_LE if len(load_LE) else other_LE
        meters = [ubatch.meter for ubatch in self.ubatches]
        comm_ns, exposed_ns = (
            sum(times) for times in zip(*((m.comm_ns, m.exposed_ns) for m in meters), strict=True)
        )
        meter = Meter(
            comm_us=comm_ns // 1000,
            exposed_us=min(comm_ns, exposed_ns)
            // 1000,  # polling takes time even when all rows have arrived
            load_LE=load_LE,
            events=tuple(event for meter in meters for event in meter.events or ()),
            transfers=self.take_transfers(),
        )
        for ubatch_meter in meters:
            ubatch_meter.reset(trace=False)
        return meter

    def close(self) -> None:
        """End the second micro-batch's thread and waits for it."""
        if self._second is not None:
            self._second.stop()
            self._second = None

    def _run(self, decision: StepDecision, works: Sequence[Callable[[UBatch], T]]) -> Sequence[T]:
        """Return the result of each micro-batch's work."""
        # The same number of rounds in both micro-batches: with fewer, one would run ahead of the
        # other, layer by layer.
        most_tokens = -(-self.round_up(max(decision.most_tokens)) // self._tp_size)
        self.take_transfers()  # of a step that failed
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
    ubatch.meter.resume()
    result = work(ubatch)
    ubatch.meter.work("output", -1)
    return result
