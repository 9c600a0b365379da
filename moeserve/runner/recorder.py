"""Record work and replay it: as CUDA graphs, or by a stand-in for machines without CUDA.

The inputs and results of a recording have fixed addresses. To use it, fill the inputs, replay, and
use the results before the next replay of any recording, all on one stream.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# pause(function): ends a graph, lets every replay call the function, and begins another graph.
Pause = Callable[[Callable[[], None]], None]
Work = Callable[[Pause], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded work. `replay` does it again and overwrites `results`."""

    results: Sequence[Tensor]
    replay: Callable[[], None]


class Recorder:
    """A recorder without graphs, so that code for graphs can be tested without CUDA.

    It runs the work again at each replay, and copies the results to fixed tensors.
    """

    def record(self, work: Work) -> Recording:
        """Record work. Results are valid after the first replay.

        The work may be run once to warm up, so it must not have harmful side effects.
        """
        results: list[Tensor] = []

        def replay() -> None:
            new_results = work(_call_now)
            if not results:
                results.extend(result.clone() for result in new_results)
            for result, new_result in zip(results, new_results, strict=True):
                result.copy_(new_result)

        return Recording(results, replay)


class CudaRecorder(Recorder):
    """Records CUDA graphs, which share one memory pool. They are recorded on a separate stream, and
    replayed on the current one.

    warm: whether to run the work once before recording it. That run compiles kernels and loads
        libraries, which must not happen during a recording. Work of several ranks cannot be run
        alone, so its kernels must have run before.
    """

    def __init__(self, device: torch.device, *, warm: bool = True) -> None:
        self._warm = warm
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # torch frees a pool with its last graph, and then fails to record into the pool again. This
        # graph keeps the pool alive.
        self._anchor = self.record(lambda pause: (torch.zeros(1, device=device),))

    def record(self, work: Work) -> Recording:
        """Capture the work as graphs: one, and one more for each pause."""
        if self._warm:
            work(_call_now)
        current_stream = torch.cuda.current_stream()
        self._stream.wait_stream(current_stream)
        with torch.cuda.stream(self._stream):
            recording = self._capture(work)
        current_stream.wait_stream(self._stream)
        return recording

    def _capture(self, work: Work) -> Recording:
        pieces: list[Callable[[], None]] = []
        graph = self._begin()

        def pause(function: Callable[[], None]) -> None:
            nonlocal graph
            graph.capture_end()
            pieces.extend((graph.replay, function))
            graph = self._begin()

        try:
            results = work(pause)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture may have failed already
                graph.capture_end()
            raise
        graph.capture_end()
        recorded = *pieces, graph.replay
        # Break the cycle pieces -> function -> step -> `pause` -> pieces, so that the graphs are
        # freed with their Recording.
        pieces.clear()

        def replay() -> None:
            for piece in recorded:
                piece()

        return Recording(results, replay)

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during the capture, to prepare experts or to fetch
        # results.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph


def _call_now(function: Callable[[], None]) -> None:
    """A `Pause` that calls the function at once."""
    function()
