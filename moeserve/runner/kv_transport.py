"""Move KV blocks between the device and the store of a connector.

`KVTransport` is the runner's half of a connector (engine/connector.py). A plan says which blocks to
save and to load. Loading may overlap with the forward pass: the blocks of each layer are needed
only when the layer is computed.
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

BLOCKS_PER_COPY = 64  # blocks that are moved together, so that their buffer is small
HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: for all CUDA contexts


class Loading(Protocol):
    """The loads of one plan. The thread that launches steps calls all methods but `lost`."""

    def before_layer(self, layer: int) -> None:
        """Wait until work that is launched from now on will find the layer's blocks loaded.

        Must return in bounded time, even if blocks do not arrive. `lost` then reports them. If this
        method does not return, only the missing heartbeat ends the engine.
        """

    def finish(self) -> None:
        """Do the same for all layers, in bounded time, too.

        Called after a forward pass was launched, or before a graph is launched.
        """

    def lost(self) -> bool:
        """Return whether some block could not be loaded. Called once the step is done."""


class KVTransport(Protocol):
    """Moves blocks as plans say.

    If a plan runs again, its blocks are loaded again, but not saved again.
    """

    def register(self, pools: Mapping[int, PoolCache]) -> None:
        """Register the memory of the device's blocks, by pool number. Called once."""

    def save(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks from the device, before the plan overwrites them."""

    def load(self, moves: Sequence[BlockMove]) -> Loading:
        """Start to copy blocks to the device."""


class LayersAsLoaded(Sequence[LayerCache]):
    """The caches of layers. Access to a layer waits until its blocks are loaded."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        before_layer: Callable[[int], None],
        first_layer: int = 0,
    ) -> None:
        self._layers = layers
        self._before_layer = before_layer
        self._first_layer = first_layer  # the number of layers[0]

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
            return LayersAsLoaded(
                self._layers[index], self._before_layer, self._first_layer + start
            )
        self._before_layer(self._first_layer + range(len(self))[index])
        return self._layers[index]

    def __iter__(self) -> Iterator[LayerCache]:
        return (self[i] for i in range(len(self)))


class HostTransport:
    """The KVTransport of the host store, in the memory of this process.

    On CPUs, a layer's blocks are copied right before the layer is computed, so that the blocks stay
    in the CPU cache. To other devices, all blocks are copied at once, in stream order.

    num_entries: the number of host blocks of each pool.
    """

    def __init__(
        self, num_entries: Mapping[int, int], device: torch.device, upload: Upload
    ) -> None:
        self._num_entries = num_entries
        self._device = device
        self._upload = upload
        self._pools: dict[int, _HostPool] = {}

    def register(self, pools: Mapping[int, PoolCache]) -> None:
        """Allocate the host blocks. Raises ConfigError if they cannot be page-locked for a GPU."""
        for number, pool in pools.items():
            shape = (self._num_entries.get(number, 0), sum(t.shape[1] for t in pool.tensors))
            if self._device.type == "cuda":
                entries = page_locked(shape, torch.uint8)
            else:
                entries = lazy_zeros(shape, torch.uint8, self._device)
            self._pools[number] = _HostPool(pool, entries, self._upload)

    def save(self, moves: Sequence[BlockMove]) -> None:
        for number, pool in self._pools.items():  # asynchronous, in stream order
            pool.save([move for move in moves if move.pool_index == number])

    def load(self, moves: Sequence[BlockMove]) -> "HostLoading":
        moves_of_pool = [
            (pool, [move for move in moves if move.pool_index == number])
            for number, pool in self._pools.items()
        ]
        if self._device.type == "cpu":
            return HostLoading(
                [(pool, pool_moves) for pool, pool_moves in moves_of_pool if pool_moves]
            )
        for pool, pool_moves in moves_of_pool:
            pool.load(pool_moves)
        return HostLoading([])


class HostLoading:
    """The blocks of a plan that are still to be copied from the host, by pool."""

    def __init__(self, moves: Sequence[tuple["_HostPool", Sequence[BlockMove]]]) -> None:
        self._moves = moves
        # The numbers of each pool's tensors that are not loaded yet.
        self._remaining = [set(range(len(pool.cache.tensors))) for pool, _ in moves]

    def before_layer(self, layer: int) -> None:
        for (pool, moves), remaining in zip(self._moves, self._remaining, strict=True):
            for number in pool.cache.tensors_of.get(layer, ()):
                if number in remaining:
                    remaining.remove(number)
                    pool.load_tensor(number, moves)

    def finish(self) -> None:
        """Copy the blocks of the remaining layers, such as those of a draft model."""
        for (pool, moves), remaining in zip(self._moves, self._remaining, strict=True):
            while remaining:
                pool.load_tensor(remaining.pop(), moves)

    def lost(self) -> bool:
        return False


class _HostPool:
    """The host blocks of one pool, uint8 [entries, bytes per block].

    A block is the concatenation of its bytes in each tensor of the pool.
    """

    def __init__(self, cache: PoolCache, entries: Tensor, upload: Upload) -> None:
        self.cache = cache
        self._entries = entries
        self._upload = upload
        self._widths = [tensor.shape[1] for tensor in cache.tensors]
        self._ends = np.cumsum(self._widths).tolist()

    def save(self, moves: Sequence[BlockMove]) -> None:
        for batch in _batches(moves):
            blocks, packed, columns = self._packing_buffer(batch)
            for tensor, column in zip(self.cache.tensors, columns, strict=True):
                column.copy_(tensor.index_select(0, blocks))
            for packed_block, move in zip(packed, batch, strict=True):
                self._entries[move.connector_entry].copy_(packed_block, non_blocking=True)

    def load(self, moves: Sequence[BlockMove]) -> None:
        for batch in _batches(moves):
            blocks, packed, columns = self._packing_buffer(batch)
            for packed_block, move in zip(packed, batch, strict=True):
                packed_block.copy_(self._entries[move.connector_entry], non_blocking=True)
            for tensor, column in zip(self.cache.tensors, columns, strict=True):
                tensor.index_copy_(0, blocks, column)

    def load_tensor(self, number: int, moves: Sequence[BlockMove]) -> None:
        """Copy the bytes of one tensor of the blocks. For CPUs."""
        end = self._ends[number]
        column = self._entries[:, end - self._widths[number] : end]
        for batch in _batches(moves):
            blocks = torch.tensor([move.block for move in batch])
            entries = torch.tensor([move.connector_entry for move in batch])
            self.cache.tensors[number].index_copy_(0, blocks, column.index_select(0, entries))

    def _packing_buffer(
        self, moves: Sequence[BlockMove]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the block numbers, a buffer for these blocks, and the columns of the buffer that
        belong to each tensor. All are on the device.
        """
        (blocks,) = self._upload(np.array([move.block for move in moves], dtype=np.int64))
        packed = self.cache.tensors[0].new_empty((len(moves), self._entries.shape[1]))
        return blocks, packed, torch.split(packed, self._widths, 1)


def _batches(moves: Sequence[BlockMove]) -> Iterator[Sequence[BlockMove]]:
    return (moves[i : i + BLOCKS_PER_COPY] for i in range(0, len(moves), BLOCKS_PER_COPY))


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in page-locked host memory. Raises ConfigError if it cannot be locked.

    The memory is registered with CUDA rather than allocated by torch, because torch rounds up to
    powers of two: 64 GiB for 40.
    """
    memory = lazy_zeros(shape, dtype, torch.device("cpu"))
    if not memory.nbytes:
        return memory
    runtime: Any = torch.cuda.cudart
    address = memory.data_ptr()
    error = int(runtime().cudaHostRegister(address, memory.nbytes, HOST_REGISTER_PORTABLE))
    if error:
        raise ConfigError(
            f"{memory.nbytes >> 20:,} MiB of host memory cannot be locked for the GPU "
            f"(CUDA error {error}); lower cache.host_store_bytes, or raise the limit on "
            "locked memory (ulimit -l)"
        )
    return memory
