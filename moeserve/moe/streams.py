"""Run communication beside computation, on a CUDA stream of its own.

All micro-batches of a process compute on one stream, in the order of their turns. All transfers run
on a second stream, in the order of `launch`. Events connect the two: a transfer starts after the
computation that was launched before it, and computation that is launched after `join` starts after
the transfer. The host never waits.

Memory: torch reuses a freed block for the next work on the stream that allocated it.
- A tensor that a transfer still reads must not be freed. So a launch keeps its `work`, and all
  tensors that the closure refers to, until `join`.
- A tensor that a transfer made may be freed while computation still reads it. Only the next
  transfer can get its memory, and that starts after the computation.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# The stream's priority (lower runs first): a transfer has few blocks, and they should not wait
# behind the many blocks of a matrix product.
HIGH = -1


class InFlightTransfer:
    """The CUDA events that time one transfer.

    For a transfer on another library's stream, use this as a context manager around the call that
    makes the current stream wait for it. The end of that wait counts as the end of the transfer.
    """

    __slots__ = ("begin_event", "end_event", "is_joined", "wait_begin_event", "work")

    def __init__(self, work: object = None) -> None:
        self.work = work  # keeps its tensors alive until `join`
        self.is_joined = False
        new_event: Any = torch.cuda.Event
        self.begin_event = new_event(enable_timing=True)
        self.wait_begin_event = new_event(enable_timing=True)
        self.end_event = new_event(enable_timing=True)

    def join(self) -> None:
        """Make the current stream wait for the transfer."""
        self.wait_begin_event.record()
        torch.cuda.current_stream().wait_event(self.end_event)
        self.work = None
        self.is_joined = True

    def __enter__(self) -> None:
        self.wait_begin_event.record()

    def __exit__(self, *_: object) -> None:
        self.end_event.record()
        self.is_joined = True

    @property
    def times_us(self) -> tuple[int, int]:
        """The duration of the transfer, and how long computation waited for it.

        Valid once the device has passed `join`.
        """
        took_ms = self.begin_event.elapsed_time(self.end_event)
        waited_ms = self.wait_begin_event.elapsed_time(self.end_event)
        return int(took_ms * 1000), int(max(0.0, min(took_ms, waited_ms)) * 1000)


class CommStream:
    """Runs transfers in the order of `launch`, each after all earlier work of the calling thread's
    current stream.

    This base class runs them immediately on the current stream: for CPUs, and for transfers for
    which computation would have to wait anyway.
    """

    def launch(self, work: Callable[[], T]) -> Callable[[], T]:
        """Launch `work`, and return its `join`.

        `join` makes the current stream wait for the work, and returns the work's value. The closure
        must refer to all tensors that it reads: this keeps them alive until `join`.
        """
        value = work()
        return lambda: value

    def watch(self) -> AbstractContextManager[None]:
        """Start to time a transfer that begins now, on another library's stream.

        Enter the result around the wait for the transfer, as described at `InFlightTransfer`.
        """
        return nullcontext()

    def take_transfers(self) -> list[InFlightTransfer]:
        """Return the transfers that were joined since the last call, in the order of launching.

        Call this after each step.
        """
        return []


class CudaStream(CommStream):
    """A separate stream on a CUDA device.

    `take_transfers` omits the transfers in recorded graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=HIGH)  # type: ignore[no-untyped-call]
        self._transfers: list[InFlightTransfer] = []

    def launch(self, work: Callable[[], T]) -> Callable[[], T]:
        transfer = self._begin(work)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(transfer.begin_event)
            try:
                value = work()
            finally:  # if `work` raises, a part of it may have been launched
                transfer.end_event.record()

        def join() -> T:
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
        transfer.begin_event.record()
        return transfer

    def take_transfers(self) -> list[InFlightTransfer]:
        joined = [transfer for transfer in self._transfers if transfer.is_joined]
        # The transfers of a failed step are never joined. Keep their tensors until they have ended.
        self._transfers = [
            transfer
            for transfer in self._transfers
            if not (transfer.is_joined or transfer.end_event.query())
        ]
        return joined


def comm_stream(device: torch.device | str) -> CommStream:
    """Return the stream for transfers of a device.

    There is one per device, because ranks that used two in different orders could deadlock.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return CommStream()
    return _cuda_stream(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_stream(index: int) -> CudaStream:
    return CudaStream(torch.device("cuda", index))


def share_stream() -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes a context manager, in which another thread uses the CUDA stream
    of the thread that called `share_stream`.

    torch's current device and stream are per thread.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)
