"""Runs a step through the model in one micro-batch, or in two (dual-batch overlap).

Two micro-batches are two halves of the step's tokens. The second one runs in a thread of its own that lives as long as
the runner; they take turns (`PingPong`), so they share everything but their scratch memory and their channel.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from moeserve.engine.plan import I32, Agreed
from moeserve.messages import TraceEvent
from moeserve.models.decoder import Decoder
from moeserve.moe.ping_pong import PingPong
from moeserve.moe.streams import InFlightTransfer, here
from moeserve.moe.ubatch import Load, UBatch
from moeserve.ops.inputs import GroupInputs, LayerKV, StepInputs

T = TypeVar("T")
ALONE = Agreed(step=0)


@dataclass(frozen=True, slots=True)
class Meter:
    """The measurements of one step's micro-batches. comm_us, exposed_us: by the host's clock. transfers: those that
    the device measures. load_LE: rows per MoE layer and logical expert, [0, 0] if none; a tensor if on the device."""

    comm_us: int
    exposed_us: int
    load_LE: Load
    events: tuple[TraceEvent, ...]
    transfers: Sequence[InFlightTransfer] = ()

    def times_us(self) -> tuple[int, int]:
        """Returns (communication, the part of it that was not hidden) in microseconds, once the step is finished."""
        comm_us, exposed_us = self.comm_us, self.exposed_us
        for took_us, stood_us in (transfer.times_us for transfer in self.transfers):
            comm_us, exposed_us = comm_us + took_us, exposed_us + stood_us
        return comm_us, exposed_us


class UBatchRunner:
    """Runs steps in `ubatches`, of which a step uses the first or all. Not thread-safe.

    tp_size: ranks that share the engine's rows, each of which sends its part to the experts. `take_transfers`: returns
    what was joined since the last call, on a device that times its transfers. `round_up`: maps the tokens of the rank
    with most to the number that all ranks make room for; the same function on all ranks.
    """

    def __init__(self, num_ubatches: int = 1, tp_size: int = 1) -> None:
        assert 1 <= num_ubatches <= 2, num_ubatches
        self.ubatches = tuple(UBatch(index) for index in range(num_ubatches))
        self.round_up: Callable[[int], int] = lambda tokens: tokens
        self.take_transfers: Callable[[], Sequence[InFlightTransfer]] = tuple
        self._tp_size = tp_size
        self._second = _UBatchThread()

    def forward(
        self, model: Decoder, step: StepInputs, split_at: int, agreed: Agreed | None, kv: Sequence[LayerKV]
    ) -> Tensor:
        """Returns the hidden states [T, D] of all tokens, in order. With two micro-batches agreed, the first one has
        `split_at` of the tokens.

        An error in a micro-batch ends both and is raised here, the first one if there are several; the next step may
        follow.
        """
        agreed = agreed or ALONE
        if agreed.ubatches == 1:
            return self._run(agreed, [lambda ubatch: model.forward(step, kv, ubatch)])[0]
        works = [_work(model, part, kv) for part in split(step, split_at)]
        parts = [hidden for hidden in self._run(agreed, works) if hidden is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def serve(self, model: Decoder, agreed: Agreed) -> None:
        """Takes part in a step in which this rank has no tokens."""
        self._run(agreed, [model.serve] * agreed.ubatches)

    def take_meter(self) -> Meter:
        """Returns what was measured since the last call; to be called after each step."""
        load_LE, *others = (ubatch.take_load() for ubatch in self.ubatches)
        for other_LE in others:
            if len(other_LE):
                load_LE = load_LE + other_LE if len(load_LE) else other_LE
        meters = [ubatch.meter for ubatch in self.ubatches]
        comm_ns, exposed_ns = (sum(times) for times in zip(*((m.comm_ns, m.exposed_ns) for m in meters), strict=True))
        meter = Meter(
            comm_us=comm_ns // 1000,
            exposed_us=min(comm_ns, exposed_ns) // 1000,  # polling takes time even when all rows have arrived
            load_LE=load_LE,
            events=tuple(event for meter in meters for event in meter.events or ()),
            transfers=self.take_transfers(),
        )
        for ubatch_meter in meters:
            ubatch_meter.reset(trace=False)
        return meter

    def close(self) -> None:
        """Ends the second micro-batch's thread and waits for it."""
        self._second.stop()

    def _run(self, agreed: Agreed, works: Sequence[Callable[[UBatch], T]]) -> list[T]:
        """Returns the result of each micro-batch's work."""
        # The same number of rounds in both micro-batches: with fewer, one would run ahead of the other, layer by layer.
        most_tokens = self.round_up(-(-max(agreed.most_tokens) // self._tp_size))
        self.take_transfers()  # of a step that failed
        for ubatch in self.ubatches:
            ubatch.most_tokens = most_tokens
            ubatch.take_load()
            ubatch.meter.reset(agreed.trace)
        if len(works) == 1:
            return [_timed(works[0], self.ubatches[0])]
        return self._in_turns(works)

    def _in_turns(self, works: Sequence[Callable[[UBatch], T]]) -> list[T]:
        first, second = self.ubatches
        ping_pong = PingPong(2)
        first.couple(ping_pong, second)
        second.couple(ping_pong, first)
        results: dict[int, Any] = {}

        def run(ubatch: UBatch) -> None:
            """Runs one micro-batch in its turns; an error ends both."""
            results[ubatch.index] = ubatch.run_in_turns(lambda: _timed(works[ubatch.index], ubatch))

        self._second.start(_like_here(lambda: run(second)))
        run(first)
        self._second.join()
        if ping_pong.error is None:
            return [results[0], results[1]]
        try:
            raise ping_pong.error
        finally:
            ping_pong.error = None  # the traceback holds this frame, the frame would hold the traceback


def split(step: StepInputs, split_at: int) -> tuple[StepInputs, StepInputs]:
    """Returns the inputs of the first `split_at` tokens and of the others. A row across the split is in both parts;
    `sample_S` is empty in both.

    rows of 2 and 4 tokens from positions 0 and 7, split 3 -> rows of 2 and 1 from 0 and 7; a row of 3 from 8
    """
    offsets = step.offsets_R1
    assert 0 <= split_at <= offsets[-1], (split_at, offsets)
    ends = int(np.searchsorted(offsets, split_at))  # rows that begin before the split
    begins = int(np.searchsorted(offsets, split_at, side="right")) - 1  # the row of the first token after it
    starts = step.starts_R[begins:].copy()
    if len(starts):
        starts[0] += split_at - offsets[begins]
    starts_R, offsets_R1 = step.rows_on_device
    begun_R = (split_at - offsets_R1[begins:-1]).clamp(min=0)  # tokens of a row that the first part has
    first = starts_R[:ends], offsets_R1[: ends + 1].clamp(max=split_at)
    later = starts_R[begins:] + begun_R, (offsets_R1[begins:] - split_at).clamp(min=0)
    bounds, later_bounds = np.minimum(offsets[: ends + 1], split_at), np.maximum(offsets[begins:] - split_at, 0)
    return (
        _part(step, slice(0, split_at), slice(0, ends), bounds, step.starts_R[:ends], first),
        _part(step, slice(split_at, None), slice(begins, None), later_bounds, starts, later),
    )


def _part(
    step: StepInputs, tokens: slice, rows: slice, offsets_R1: I32, starts_R: I32, on_device: tuple[Tensor, Tensor]
) -> StepInputs:
    groups = tuple(
        GroupInputs(group.slot_mapping_T[tokens], group.blocks_RN[rows], group.block_size, group.window)
        for group in step.groups
    )
    ids_T, positions_T = step.ids_T[tokens], step.positions_T[tokens]
    return StepInputs(ids_T, positions_T, groups, step.sample_S[:0], offsets_R1, starts_R, on_device)


def _work(model: Decoder, part: StepInputs, kv: Sequence[LayerKV]) -> Callable[[UBatch], Tensor | None]:
    """Returns the work of one half. A half without tokens still takes part in what other ranks do."""

    def _run(ubatch: UBatch) -> Tensor | None:
        if len(part.ids_T):
            return model.forward(part, kv, ubatch)
        model.serve(ubatch)
        return None

    return _run


def _timed(work: Callable[[UBatch], T], ubatch: UBatch) -> T:
    ubatch.meter.resume()
    result = work(ubatch)
    ubatch.meter.work("output", -1)
    return result


def _like_here(job: Callable[[], None]) -> Callable[[], None]:
    """Returns the job wrapped for another thread, with this thread's torch settings, which are all per thread."""
    threads, inference, place = torch.get_num_threads(), torch.is_inference_mode_enabled(), here()

    def _run() -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with torch.inference_mode(inference), place():
            job()

    return _run


class _UBatchThread:
    """Runs one job at a time, in a thread that starts with the first job and ends with `stop`."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, job: Callable[[], None]) -> None:
        """The job must not raise."""
        if self._thread is None:
            args = self._jobs, self._done
            self._thread = threading.Thread(target=_run_jobs, args=args, name="micro-batch 1", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def join(self) -> None:
        """Returns when the job is done."""
        self._done.get()

    def stop(self) -> None:
        """Ends the thread, if it was started."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


def _run_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None], done: queue.SimpleQueue[None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # a waiting thread must not keep a step's tensors alive
        done.put(None)
