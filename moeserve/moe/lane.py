"""A lane is one part of the batch on its way through the model: its scratch, its communication, its loads.

With a single lane nothing overlaps but the work given as `meanwhile`. Dual-batch overlap is two lanes that pass a
baton inside `overlap`; only the MoE layer calls it, so model code stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from moeserve.moe.all2all.base import Pending

T = TypeVar("T")


class Scratch:
    """Named buffers that live as long as their lane and grow to the largest size asked for."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A buffer of `shape` with like's dtype and device; it holds whatever was there before."""
        count = int(np.prod(shape))
        key = (name, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[key] = torch.zeros(count, dtype=like.dtype, device=like.device)
        return buffer[:count].view(shape)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Lane:
    """The only lane of a step. `index` is its place among the step's lanes."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.scratch = Scratch()
        self._loads: list[NDArray[np.int64]] = []

    def overlap(self, start: Callable[[], Pending[T]], meanwhile: Callable[[], None] | None = None) -> T:
        """Start a communication, run what needs no result of it, and wait for it."""
        pending = start()
        if meanwhile is not None:
            meanwhile()
        return pending.wait()

    def note_load(self, counts_E: NDArray[np.int64]) -> None:
        """Record how many rows each expert of one layer received; padding is not among them."""
        self._loads.append(counts_E)

    def take_load(self) -> tuple[NDArray[np.int64], float]:
        """(rows per layer and expert [layers, E], mean over layers of the fullest expert's rows over the average's)
        since the last call; an empty array and 0.0 when nothing was routed."""
        loads, self._loads = self._loads, []
        if not loads:
            return np.zeros((0, 0), np.int64), 0.0
        table = np.stack(loads)
        means = table.mean(1)
        peaks = table.max(1)[means > 0] / means[means > 0]
        return table, float(peaks.mean()) if len(peaks) else 0.0
