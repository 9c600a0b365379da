"""Request tables: one int32 arena on the device, written by staged diffs.

    tokens  [slots, width]      prompt and answer of the request in each slot; the sampler appends here
    blocks  [slots, max_blocks] per KV group: its block table

The host never reads the arena, so the step after this one may be planned before this one's tokens are known. The host
stages (offset, value) pairs, and `apply` sends all of a step's pairs in one copy and one scatter.

Only an `Upload` knows whether a copy is needed. On CPU host memory is device memory, so arrays are wrapped as they are.
On CUDA all arrays of a call travel in one copy from a ring of pinned buffers; an entry of the ring is written again
only after its last copy has finished.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import I32, BlockDiff
from moeserve.errors import ConfigError

I64 = NDArray[np.int64]
_INT32_MAX = 2**31 - 1
_ALIGN = 16  # bytes: every section starts where any dtype may


class Upload(Protocol):
    """Moves arrays to the device."""

    def __call__(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        """Returns the arrays as contiguous tensors on the device; the caller must not write to them afterwards."""
        ...


class HostUpload:
    """Wraps arrays as CPU tensors, without a copy unless an array has gaps."""

    def __call__(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        """Returns tensors that share the arrays' memory where they have no gaps."""
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
        """Returns tensors on the device; the copy runs on the current stream."""
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


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros; on the host they take memory only where they are touched (`torch.zeros` writes every page)."""
    count = math.prod(shape)
    if device.type != "cpu" or count == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)


def scatter(arena: Tensor, upload: Upload, offsets_N: I64, values_N: I32) -> None:
    """Sets arena[offsets] = values with one copy to the device; offsets are unique."""
    offsets, values = upload(offsets_N, values_N)
    arena.index_put_((offsets,), values)


Scatter = Callable[[Tensor, Upload, I64, I32], None]


class Tables:
    """Tables of `slots` requests with at most `max_len` tokens each.

    Attributes: `arena` int32 [everything]; `blocks` one int32 view [slots, max_blocks] per KV group; `width`, the
    tokens per slot (max_len + 1: a step may be in flight past the last token that will ever be used).
    """

    def __init__(
        self,
        slots: int,
        max_len: int,
        groups: Sequence[KVGroup],
        device: torch.device,
        upload: Upload,
        scatter: Scatter = scatter,
    ) -> None:
        self.slots = slots
        self.width = max_len + 1
        self._upload = upload
        self._scatter = scatter
        self._max_blocks = [-(-self.width // group.block_size) for group in groups]
        starts = np.cumsum([0, slots * self.width, *(slots * n for n in self._max_blocks)])
        if starts[-1] > _INT32_MAX:
            raise ConfigError(
                f"max_num_seqs={slots} times max_model_len={max_len} needs request tables of {starts[-1]:,} entries; "
                f"at most {_INT32_MAX:,} fit. Lower one of the two."
            )
        self.arena = lazy_zeros((int(starts[-1]),), torch.int32, device)
        self._block_starts = [int(start) for start in starts[1:-1]]
        self.blocks = tuple(
            self.arena[start : start + slots * n].view(slots, n)
            for start, n in zip(self._block_starts, self._max_blocks, strict=True)
        )
        # How many leading entries of a block-table row may be non-zero: what a new request must clear.
        self._dirty = [np.zeros(slots, dtype=np.int64) for _ in groups]
        self._offsets: list[I64] = []
        self._values: list[I32] = []
        self._may_repeat = False

    @property
    def tokens(self) -> Tensor:
        """The known tokens of each slot's request: an int32 view [slots, width]."""
        return self.arena[: self.slots * self.width].view(self.slots, self.width)

    def token_offsets(self, slots: NDArray[np.integer], positions: NDArray[np.integer]) -> I64:
        """Returns where in the arena the token at each (slot, position) lies."""
        return slots.astype(np.int64) * self.width + positions

    def add(self, slot: int, tokens: I32) -> None:
        """Stages a new request in `slot`: its tokens, and a block table of zeros."""
        assert 0 <= slot < self.slots, (slot, self.slots)
        assert len(tokens) <= self.width, (len(tokens), self.width)
        self._stage_run(slot * self.width, tokens)
        for start, row, dirty in zip(self._block_starts, self._max_blocks, self._dirty, strict=True):
            if dirty[slot]:
                self._stage_run(start + slot * row, np.zeros(dirty[slot], dtype=np.int32))
                dirty[slot] = 0
        self._may_repeat = True

    def update(self, group: int, diff: BlockDiff) -> None:
        """Stages new block-table entries of one KV group."""
        if not len(diff.slots_N):
            return
        row = self._max_blocks[group]
        assert int(diff.indices_N.max()) < row, (int(diff.indices_N.max()), row)
        self._offsets.append(diff.slots_N.astype(np.int64) * row + (diff.indices_N + self._block_starts[group]))
        self._values.append(diff.blocks_N)
        np.maximum.at(self._dirty[group], diff.slots_N, diff.indices_N + 1)

    def apply(self) -> None:
        """Writes everything staged since the last call to the device; later writes to the same entry win."""
        if not self._offsets:
            return
        offsets_N = np.concatenate(self._offsets)
        values_N = np.concatenate(self._values).astype(np.int32, copy=False)
        if self._may_repeat:
            offsets_N, values_N = _last_writes(offsets_N, values_N)
        self._offsets, self._values, self._may_repeat = [], [], False
        self._scatter(self.arena, self._upload, offsets_N, values_N)

    def append(self, offsets_S: Tensor, tokens_S: Tensor) -> None:
        """Writes sampled tokens (int32) at arena offsets from `token_offsets`: the next step reads them there."""
        self.arena.index_put_((offsets_S,), tokens_S)

    def _stage_run(self, start: int, values: I32) -> None:
        self._offsets.append(np.arange(start, start + len(values), dtype=np.int64))
        self._values.append(values)


def _last_writes(offsets_N: I64, values_N: I32) -> tuple[I64, I32]:
    """Drops all but the last value for each offset: a scatter has no order.

    offsets [5, 6, 5], values [1, 2, 3] -> [5, 6], [3, 2]
    """
    kept_offsets, first_from_the_end = np.unique(offsets_N[::-1], return_index=True)
    return kept_offsets, values_N[::-1][first_from_the_end]
