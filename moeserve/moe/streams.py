"""Where communication runs beside computation: on CUDA in a stream of its own that events tie to the micro-batches'
one.

All micro-batches of a process compute on one stream, in the order of the ping-pong turn, and all its transfers run on
another, in the
order of `launch`. The host only launches: a transfer begins behind what was computed before, and what is computed after
`join` begins behind the transfer.

Memory. torch gives a freed block to whatever comes next on the stream that it was allocated on, so two things must
hold. What was computed and is still being read by a transfer must not be freed: a launch keeps its `work`, and with it
all that the closure names, until `join`. What a transfer has made and is still being computed on may be freed: the
next transfer, which alone can be given its memory, begins behind the computation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
HIGH = -1  # a transfer's few blocks come before the many of a product that waits for room as well


class InFlightTransfer:
    """A transfer in the device's time. `work` is kept until it is joined.

    Of a transfer that runs on somebody else's stream, enter it around whatever makes the current stream wait for it:
    the end of the wait is taken for the transfer's own.
    """

    __slots__ = ("awaited", "begun", "ended", "is_joined", "work")

    def __init__(self, work: object = None) -> None:
        self.work = work
        self.is_joined = False
        event: Any = torch.cuda.Event
        self.begun, self.awaited, self.ended = (event(enable_timing=True) for _ in range(3))

    def join(self) -> None:
        """What comes next on the current stream runs after the transfer."""
        self.awaited.record()
        torch.cuda.current_stream().wait_event(self.ended)
        self.work, self.is_joined = None, True

    def __enter__(self) -> None:
        self.awaited.record()

    def __exit__(self, *_: object) -> None:
        self.ended.record()
        self.is_joined = True

    @property
    def is_over(self) -> bool:
        return bool(self.ended.query())

    @property
    def times_us(self) -> tuple[int, int]:
        """(from what was computed before it to its end, the part of it that computation stood waiting), once the
        device has passed `join`."""
        took_ms = self.begun.elapsed_time(self.ended)
        stood_ms = self.awaited.elapsed_time(self.ended)
        return int(took_ms * 1000), int(max(0.0, min(took_ms, stood_ms)) * 1000)


class Launched(Generic[T]):
    """Work that may still be running on the device; `value` holds its tensors, which are not to be read before."""

    __slots__ = ("_transfer", "value")

    def __init__(self, value: T, transfer: InFlightTransfer | None = None) -> None:
        self.value = value
        self._transfer = transfer

    def join(self) -> T:
        """What comes next on the current stream runs after the work. The first call counts."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.join()
        return self.value


class CommStream(Protocol):
    """Runs work in the order of the calls, each after all that the calling thread's current stream was given before."""

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        """The work must name all tensors that it uses and did not make, so that they live until `join`."""
        ...

    def watch(self) -> AbstractContextManager[None]:
        """The transfer of a transfer that begins here and now without `launch`, only to be timed."""
        ...

    def take_transfers(self) -> list[InFlightTransfer]:
        """What was joined since the last call, in the order of launching; to be called after each step."""
        ...


class Inline:
    """Completed at once on the current stream: for CPUs, and for what computation would have to wait for anyway."""

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        return Launched(work())

    def watch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def take_transfers(self) -> list[InFlightTransfer]:
        return []


class CudaStream:
    """A stream of its own on a device. What a recorded graph replays is not among its transfers."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=HIGH)  # type: ignore[no-untyped-call]
        self._transfers: list[InFlightTransfer] = []

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        transfer = self._begin(work)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(transfer.begun)
            try:
                value = work()
            finally:  # of work that fails a part may run
                transfer.ended.record()
        return Launched(value, transfer)

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
        # Those of a step that failed are joined by nobody: they keep what they use until they are over.
        self._transfers = [transfer for transfer in self._transfers if not transfer.is_joined and not transfer.is_over]
        return joined


def comm_stream(device: torch.device | str) -> CommStream:
    """The device's one, for whoever communicates: two streams of transfers could wait for each other crosswise, when
    ranks get to them in different order."""
    device = torch.device(device)
    if device.type != "cuda":
        return Inline()
    return _cuda_stream(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_stream(index: int) -> CudaStream:
    return CudaStream(torch.device("cuda", index))


def here() -> Callable[[], AbstractContextManager[object]]:
    """What another thread enters to launch where the calling one does: the current device and its current stream are
    torch's per thread."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)
