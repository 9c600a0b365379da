"""Where communication runs beside computation: on CUDA in a stream of its own that events tie to the lanes' one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


class Launched(Generic[T]):
    """Work that may still be running on the device; `value` holds its tensors, which are not to be read before."""

    __slots__ = ("_ended", "value")

    def __init__(self, value: T, ended: torch.cuda.Event | None = None) -> None:
        self.value = value
        self._ended = ended

    def join(self) -> T:
        """What comes next on the current stream runs after the work."""
        if self._ended is not None:
            torch.cuda.current_stream().wait_event(self._ended)
        return self.value


class CommStream(Protocol):
    """Runs work in the order of the calls, each after all that the calling thread's current stream was given before."""

    def launch(self, work: Callable[[], T]) -> Launched[T]: ...


class Inline:
    """CPU: done at once."""

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        return Launched(work())


class CudaStream:
    """A stream of its own on a device. What `work` allocates belongs to this stream: it must outlive its readers, or be
    told of them by `record_stream`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        begun, ended = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        begun.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(begun)
            value = work()
            ended.record()
        return Launched(value, ended)


def comm_stream(device: torch.device | str) -> CommStream:
    device = torch.device(device)
    return CudaStream(device) if device.type == "cuda" else Inline()
