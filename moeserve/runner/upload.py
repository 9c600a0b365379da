"""Uploads one step's host arrays to the device; only this module knows whether a copy is needed.

On CPU host memory is device memory, so arrays are wrapped as they are. On CUDA all arrays of a call travel in one
copy from a ring of pinned buffers; an entry of the ring is written again only after its last copy has finished.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 16  # bytes: every section starts where any dtype may


class Upload(Protocol):
    """Moves arrays to the device."""

    def __call__(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        """Returns the arrays as contiguous tensors on the device; the caller must not write to them afterwards."""
        ...


class HostUpload:
    """Wraps arrays as CPU tensors, without a copy unless an array has gaps."""

    def __call__(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)


class RingUpload:
    """Copies all arrays of a call in one piece, from a ring of host buffers.

    depth: more than the calls whose copies may be unfinished at once. With `pinned` the copies are asynchronous and
    each entry waits for its own last copy before it is written again; without, they are not (tests on CPU).
    """

    def __init__(self, device: torch.device, depth: int, *, pinned: bool) -> None:
        self.device = device
        self.pinned = pinned
        self._buffers = [self._new_buffer(1 << 16) for _ in range(depth)]
        self._copied: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def __call__(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        entry, self._next = self._next, (self._next + 1) % len(self._buffers)
        *starts, size = accumulate((-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays), initial=0)
        host = self._writable(entry, size)
        view = host.numpy()
        for array, start in zip(arrays, starts, strict=True):
            view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device = torch.empty(size, dtype=torch.uint8, device=self.device)
        on_device.copy_(host[:size], non_blocking=self.pinned)
        event = self._copied[entry]
        if event is not None:
            event.record()
        return tuple(_section(on_device, start, a) for a, start in zip(arrays, starts, strict=True))

    def _writable(self, entry: int, size: int) -> Tensor:
        event = self._copied[entry]
        if event is not None:
            event.synchronize()
        elif self.pinned:
            self._copied[entry] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if len(self._buffers[entry]) < size:
            self._buffers[entry] = self._new_buffer(2 * size)
        return self._buffers[entry]

    def _new_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)


def _section(packed: Tensor, start: int, like: NDArray[Any]) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, dtype=like.dtype)).dtype
    return packed[start : start + like.nbytes].view(dtype).view(like.shape)
