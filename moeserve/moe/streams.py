"""Streams for communication beside computation; on CUDA a stream of its own, tied to the computing
one by events.

All micro-batches of a process compute on one stream, in the order of their turns, and all its
transfers run on another, in the order of `launch`. The host only launches: a transfer begins behind
what was computed before, and what is computed after `join` begins behind the transfer.

Memory. torch gives a freed block to the next work on the stream that allocated it. So a tensor that
a transfer still reads must not be freed: a launch keeps its `work`, and with it all that the
closure names, until `join`. A tensor that a transfer has made may be freed while it is computed on:
only the next transfer can be given its memory, and that begins behind the computation.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")
HIGH = (
    -1
)  # priority: a transfer's few blocks come before the many of a product that waits for room as well


class InFlightTransfer:
    """A transfer in the device's time; `work` is kept until `join`.

    A transfer on another library's stream is entered around the call that makes the current stream
    wait for it: the end of that wait is taken for the transfer's own.
    """

    __slots__ = ("awaited", "begun", "ended", "is_joined", "work")

    def __init__(self, work: object = None) -> None:
        self.work = work
        self.is_joined = False
        event: Any = torch.cuda.Event
        self.begun, self.awaited, self.ended = (event(enable_timing=True) for _ in range(3))

    def join(self) -> None:
        """Make the current stream wait for the transfer."""
        self.awaited.record()
        torch.cuda.current_stream().wait_event(self.ended)
        self.work = None
        self.is_joined = True

    def __enter__(self) -> None:
        self.awaited.record()

    def __exit__(self, *_: object) -> None:
        self.ended.record()
        self.is_joined = True

    @property
    def times_us(self) -> tuple[int, int]:
        """The transfer's duration, and the part of it in which computation stood waiting; for a
        device that has passed `join`."""
        took_ms = self.begun.elapsed_time(self.ended)
        stood_ms = self.awaited.elapsed_time(self.ended)
        return int(took_ms * 1000), int(max(0.0, min(took_ms, stood_ms)) * 1000)


class CommStream:
    """Runs work in the order of the calls, each after all that the calling thread's current stream
    was given before.

    This one runs it at once on the current stream: for CPUs, and for transfers that computation
    would have to wait for anyway.
    """

    def launch(self, work: Callable[[], T]) -> Callable[[], T]:
        """Run `work`, and returns a `join`: it makes the current stream wait for the work, and
        returns its value. The work must name all tensors that it uses and did not make: they live
        until `join`."""
        value = work()
        return lambda: value

    def watch(self) -> AbstractContextManager[None]:
        """Time a transfer that begins here without `launch`; to be entered as an
        `InFlightTransfer` is.
        """
        return nullcontext()

    def take_transfers(self) -> list[InFlightTransfer]:
        """Return what was joined since the last call, in the order of launching; to be called
        after each step.
        """
        return []


class CudaStream(CommStream):
    """A stream of its own on a device. Transfers that a recorded graph replays are not among
    `take_transfers`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=HIGH)  # type: ignore[no-untyped-call]
        self._transfers: list[InFlightTransfer] = []

    def launch(self, work: Callable[[], T]) -> Callable[[], T]:
        transfer = self._begin(work)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(transfer.begun)
            try:
                value = work()
            finally:  # of work that fails a part may run
                transfer.ended.record()

        def join() -> T:
            """Wait once; a second call only returns the value."""
            if not transfer.is_joined:
                transfer.join()
            return value

        return join

    def watch(self) -> AbstractContextManager[None]:
        return self._begin()

    def _begin(self, work: object = None) -> InFlightTransfer:
        transfer = InFlightTransfer(work)
        if not torch.cuda.is_current_stream_capturing():
            self._transfers.append(transfer)
        transfer.begun.record()
        return transfer

    def take_transfers(self) -> list[InFlightTransfer]:
        joined = [transfer for transfer in self._transfers if transfer.is_joined]
        # Nobody joins the transfers of a failed step; they keep what they use until they are over.
        self._transfers = [
            transfer
            for transfer in self._transfers
            if not (transfer.is_joined or transfer.ended.query())
        ]
        return joined


def comm_stream(device: torch.device | str) -> CommStream:
    """Return the device's only stream for transfers: two could wait for each other crosswise, if
    ranks used them in different order."""
    device = torch.device(device)
    if device.type != "cuda":
        return CommStream()
    return _cuda_stream(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_stream(index: int) -> CudaStream:
    return CudaStream(torch.device("cuda", index))


def here() -> Callable[[], AbstractContextManager[object]]:
    """Return a context in which another thread launches on the calling thread's stream: torch's
    current device and stream are per thread."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)
