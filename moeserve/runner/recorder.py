"""Recorders of a step's work: CUDA graphs, and a stand-in for machines without CUDA.

A recording's inputs and results keep their places in memory: fill the inputs, replay, and use the
results before the next replay of any recording, all on one stream.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Pause = Callable[[Callable[[], None]], None]  # does something in every replay without recording it
Work = Callable[[Pause], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Recording:
    """`replay` does the recorded work once more and renews `results`."""

    results: Sequence[Tensor]
    replay: Callable[[], None]


class Recorder:
    """Records work once, to be replayed. This one runs the work again at each replay, and copies
    its results to fixed tensors, so that code for graphs can be tested without CUDA."""

    def record(self, work: Work) -> Recording:
        """Record the work. It may be run once for warmth, so its inputs must be harmless; results
        are valid after the first replay. Functions that the work passes to its `Pause` run between
        two graphs."""
        results: list[Tensor] = []

        def replay() -> None:
            """Run the work again."""
            fresh = work(_now)
            if not results:
                results.extend(result.clone() for result in fresh)
            for result, one in zip(results, fresh, strict=True):
                result.copy_(one)

        return Recording(results, replay)


class CudaRecorder(Recorder):
    """CUDA graphs that share one pool of memory, recorded on a stream of their own and replayed on
    the current one.

    warm: does the work once before it records it, which compiles kernels and loads libraries: that
    must not happen while recording. Not for work that other ranks take part in: its kernels must
    have run before.
    """

    def __init__(self, device: torch.device, *, warm: bool = True) -> None:
        self._warm = warm
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # torch gives up a pool with its last graph, and fails if one more is recorded into it: this
        # one stays.
        self._anchor = self.record(lambda pause: (torch.zeros(1, device=device),))

    def record(self, work: Work) -> Recording:
        """Captures the work in graphs, one more for each pause."""
        if self._warm:
            work(_now)
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            recording = self._capture(work)
        here.wait_stream(self._stream)
        return recording

    def _capture(self, work: Work) -> Recording:
        pieces: list[Callable[[], None]] = []
        graph = self._begin()

        def pause(aside: Callable[[], None]) -> None:
            """End one graph, keeps `aside` for the replay, and begins another graph."""
            nonlocal graph
            graph.capture_end()
            pieces.extend((graph.replay, aside))
            graph = self._begin()

        try:
            results = work(pause)
        except BaseException:
            with contextlib.suppress(
                RuntimeError
            ):  # the stream must not stay in capture, broken as it may be
                graph.capture_end()
            raise
        graph.capture_end()
        recorded = *pieces, graph.replay
        # calls know the step, which knows `pause`: graphs must be gone once nobody replays them
        pieces.clear()

        def replay() -> None:
            """Replays the graphs and the calls between them, in order."""
            for piece in recorded:
                piece()

        return Recording(results, replay)

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Threads that prepare experts or fetch results may use the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph


def _now(aside: Callable[[], None]) -> None:
    aside()
