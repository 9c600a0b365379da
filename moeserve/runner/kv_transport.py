"""Moves KV blocks between the device and where a connector keeps them.

`KVTransport` is the runner's half of a connector (engine/connector.py). A plan says which blocks to
save and to load. Loading may overlap with computing: layer by layer, each before it is computed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from moeserve.engine.plan import BlockMove
from moeserve.errors import ConfigError
from moeserve.ops.inputs import LayerCache
from moeserve.runner.kv_cache import PoolCache
from moeserve.runner.tables import Upload, lazy_zeros

AT_ONCE = 64  # blocks that are moved together: their buffer is no larger than a step's work space
PORTABLE = 1  # of cudaHostRegister: for all contexts


class Loading(Protocol):
    """The loads of one plan. The thread that launches steps calls all methods but `lost`."""

    def before_layer(self, layer: int) -> None:
        """Return when work that is launched from now on finds the layer's blocks loaded."""

    def finish(self) -> None:
        """The same for all layers. Called when the forward pass is launched, or before a graph."""

    def lost(self) -> bool:
        """Return whether some block is not what it should be. Called once the step is done."""


class KVTransport(Protocol):
    """Moves blocks as plans say. A plan that runs again is loaded again, and not saved again."""

    def register(self, pools: Mapping[int, PoolCache]) -> None:
        """Learn where the device's blocks are. Called once."""

    def save(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks that the plan may overwrite."""

    def load(self, moves: Sequence[BlockMove]) -> Loading:
        """Begin to copy blocks to the device."""


class LayersAsLoaded(Sequence[LayerCache]):
    """The caches of layers, which gives out each when its blocks are loaded."""

    def __init__(
        self, layers: Sequence[LayerCache], before_layer: Callable[[int], None], first: int = 0
    ) -> None:
        self._layers = layers
        self._before_layer = before_layer
        self._first = first  # number of layers[0]

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> LayerCache: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerCache]: ...

    def __getitem__(self, index: int | slice) -> LayerCache | Sequence[LayerCache]:
        if isinstance(index, slice):
            start, _, step = index.indices(len(self))
            assert step == 1, index
            return LayersAsLoaded(self._layers[index], self._before_layer, self._first + start)
        self._before_layer(self._first + range(len(self))[index])
        return self._layers[index]

    def __iter__(self) -> Iterator[LayerCache]:
        return (self[i] for i in range(len(self)))


class HostTransport:
    """The KVTransport of the host store: `num_entries[pool]` blocks in this process's memory.

    On CPUs a layer's blocks are copied right before the layer is computed, when they stay in the
    processor's cache. To other devices all are copied at once, in the device's order.
    """

    def __init__(
        self, num_entries: Mapping[int, int], device: torch.device, upload: Upload
    ) -> None:
        self._num_entries = num_entries
        self._device = device
        self._upload = upload
        self._pools: dict[int, _HostPool] = {}

    def register(self, pools: Mapping[int, PoolCache]) -> None:
        """Allocate the host blocks. Raise ConfigError if they cannot be locked for the device."""
        for number, pool in pools.items():
            shape = (self._num_entries.get(number, 0), sum(t.shape[1] for t in pool.tensors))
            if self._device.type == "cuda":
                entries = page_locked(shape, torch.uint8)
            else:
                entries = lazy_zeros(shape, torch.uint8, self._device)
            self._pools[number] = _HostPool(pool, entries, self._upload)

    def save(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks to the host. Asynchronous, in the device's order."""
        for number, pool in self._pools.items():
            pool.save([move for move in moves if move.pool == number])

    def load(self, moves: Sequence[BlockMove]) -> "HostLoading":
        """Begin to copy blocks from the host."""
        of_pool = {
            number: [move for move in moves if move.pool == number] for number in self._pools
        }
        if self._device.type == "cpu":
            return HostLoading([(self._pools[n], some) for n, some in of_pool.items() if some])
        for number, some in of_pool.items():
            self._pools[number].load(some)
        return HostLoading([])


class HostLoading:
    """Copies from the host that are not made yet: moves of some pools."""

    def __init__(self, moves: Sequence[tuple["_HostPool", Sequence[BlockMove]]]) -> None:
        self._moves = moves
        self._left = [set(range(len(pool.cache.tensors))) for pool, _ in moves]  # tensors

    def before_layer(self, layer: int) -> None:
        """Copy the layer's blocks."""
        for (pool, moves), left in zip(self._moves, self._left, strict=True):
            for tensor in pool.cache.tensors_of.get(layer, ()):
                if tensor in left:
                    left.remove(tensor)
                    pool.load_tensor(tensor, moves)

    def finish(self) -> None:
        """Copy what no layer has asked for, such as the blocks of a drafter's layers."""
        for (pool, moves), left in zip(self._moves, self._left, strict=True):
            while left:
                pool.load_tensor(left.pop(), moves)

    def lost(self) -> bool:
        """Return False: memory loses nothing."""
        return False


class _HostPool:
    """The host blocks of one pool, uint8 [entries, bytes of a block]: a block's part of each of the
    pool's tensors, one after the other.
    """

    def __init__(self, cache: PoolCache, entries: Tensor, upload: Upload) -> None:
        self.cache = cache
        self._entries = entries
        self._upload = upload
        self._widths = [tensor.shape[1] for tensor in cache.tensors]
        self._ends = np.cumsum(self._widths).tolist()

    def save(self, moves: Sequence[BlockMove]) -> None:
        for batch in _batches(moves):
            blocks, packed, parts = self._packed(batch)
            for tensor, part in zip(self.cache.tensors, parts, strict=True):
                part.copy_(tensor.index_select(0, blocks))
            for packed_block, move in zip(packed, batch, strict=True):
                self._entries[move.host_block].copy_(packed_block, non_blocking=True)

    def load(self, moves: Sequence[BlockMove]) -> None:
        for batch in _batches(moves):
            blocks, packed, parts = self._packed(batch)
            for packed_block, move in zip(packed, batch, strict=True):
                packed_block.copy_(self._entries[move.host_block], non_blocking=True)
            for tensor, part in zip(self.cache.tensors, parts, strict=True):
                tensor.index_copy_(0, blocks, part)

    def load_tensor(self, number: int, moves: Sequence[BlockMove]) -> None:
        """Copy one tensor's part of the blocks, on a CPU."""
        end = self._ends[number]
        part = self._entries[:, end - self._widths[number] : end]
        for batch in _batches(moves):
            blocks = torch.tensor([move.block for move in batch])
            entries = torch.tensor([move.host_block for move in batch])
            self.cache.tensors[number].index_copy_(0, blocks, part.index_select(0, entries))

    def _packed(self, moves: Sequence[BlockMove]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the blocks' numbers on the device, a buffer there for as many, and each tensor's
        part of it.
        """
        (blocks,) = self._upload(np.array([move.block for move in moves], dtype=np.int64))
        packed = self.cache.tensors[0].new_empty((len(moves), self._entries.shape[1]))
        return blocks, packed, torch.split(packed, self._widths, 1)


def _batches(moves: Sequence[BlockMove]) -> Iterator[Sequence[BlockMove]]:
    return (moves[i : i + AT_ONCE] for i in range(0, len(moves), AT_ONCE))


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in page-locked host memory. Raise ConfigError if it cannot be locked.

    Registered, since torch's own allocator rounds page-locked memory up to powers of two: 64 GiB
    for 40.
    """
    memory = lazy_zeros(shape, dtype, torch.device("cpu"))
    runtime: Any = torch.cuda.cudart
    if memory.nbytes and int(
        code := runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
    ):
        raise ConfigError(
            f"{memory.nbytes >> 20:,} MiB of host memory cannot be locked for the GPU "
            f"(CUDA error {int(code)}); lower cache.host_store_bytes, or raise the limit on "
            "locked memory (ulimit -l)"
        )
    return memory
