"""The device's KV blocks and the host's block store.

KV groups of one pool draw block ids from it, and a block belongs to one group at a time. So layers
of different groups share memory: the i-th layers of all groups with the same tensors in their
caches have one place, and there are as many places as the largest of these groups has such layers.

    rules (full, window 64, full, window 64): groups {0, 2} and {1, 3}; layers 0 and 1 share a place, 2 and 3 another
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.blocks.mixer import CacheTensor
from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import BlockMove
from moeserve.errors import ConfigError
from moeserve.models.spec import ModelSpec
from moeserve.ops.inputs import LayerCache, entry_width
from moeserve.runner.tables import Upload, host_upload, lazy_zeros

AT_ONCE = 64  # blocks that are moved together: their buffer is no larger than a step's work space
PORTABLE = 1  # of cudaHostRegister: for all contexts

Place = tuple[
    tuple[CacheTensor, ...], int
]  # the tensors of a layer's cache, and the layer's number among those alike


def places_of(groups: Sequence[KVGroup], spec: ModelSpec, tp_size: int = 1) -> dict[int, Place]:
    """Returns the place of each layer's cache."""
    places = {}
    for group in groups:
        alike: Counter[tuple[CacheTensor, ...]] = Counter()
        for layer in group.layers:
            cache = spec.cached_layers[layer].mixer.cache(
                tp_size if layer < len(spec.shared_layers) else 1
            )
            places[layer] = cache, alike[cache]
            alike[cache] += 1
    return places


def block_shape(
    tensor: CacheTensor, group: KVGroup, dtype: torch.dtype
) -> tuple[tuple[int, int, int], torch.dtype]:
    """Returns the shape of a block of the tensor, and its type."""
    if not group.has_states:
        return (group.block_size, tensor.heads, entry_width(tensor.width, dtype)), dtype
    assert group.rule.tile is not None
    rows = group.block_size // group.rule.tile if tensor.per_tile else group.block_size
    return (rows, tensor.heads, tensor.width), torch.float32


def block_bytes(
    groups: Sequence[KVGroup],
    spec: ModelSpec,
    dtype: torch.dtype,
    tp_size: int = 1,
    *,
    pool: int = 0,
) -> int:
    """Returns the bytes of one block of a pool over all places on one of tp_size ranks; 0 if no
    group has such.
    """
    mine = [group for group in groups if group.pool == pool]
    if not mine:
        return 0
    shapes = [
        block_shape(tensor, mine[0], dtype)
        for cache, _ in set(places_of(mine, spec, tp_size).values())
        for tensor in cache
    ]
    return sum(math.prod(shape) * kind.itemsize for shape, kind in shapes)


class KVCache:
    """The KV blocks on the device and the block stores on the host; `layers[i]` is the cache of
    layer i, and `draft_layers[i]` that of the drafter's layer i.

    Everything starts as zeros; block 0 of a pool is the null block, whose content is never used.
    num_entries: blocks that the host store can hold. num_states, num_state_entries: the same of
    recurrent layers' states. tp_size: ranks that share the heads. upload: to the device.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        spec: ModelSpec,
        num_blocks: int,
        num_entries: int,
        dtype: torch.dtype,
        device: torch.device,
        tp_size: int = 1,
        upload: Upload | None = None,
        *,
        num_states: int = 0,
        num_state_entries: int = 0,
    ) -> None:
        sizes = (num_blocks, num_entries), (num_states, num_state_entries)
        self._pools = {
            pool: PoolCache(
                [g for g in groups if g.pool == pool],
                spec,
                *sizes[pool],
                dtype,
                device,
                tp_size,
                upload,
            )
            for pool in sorted({group.pool for group in groups})
        }
        layers = {
            layer: cache for pool in self._pools.values() for layer, cache in pool.layers.items()
        }
        caches = tuple(layers[layer] for layer in range(len(layers)))
        self.layers = caches[: spec.num_layers]
        self.draft_layers = caches[spec.num_layers :]

    def clear_null_block(self) -> None:
        """Zeroes the null blocks, where dummy steps write."""
        for pool in self._pools.values():
            pool.clear_null_block()

    def move(self, stores: Sequence[BlockMove], loads: Sequence[BlockMove]) -> None:
        """Copies blocks to the stores, then stored blocks back. Asynchronous, in the device's
        order.
        """
        for number, pool in self._pools.items():
            pool.move(
                [move for move in stores if move.pool == number],
                [m for m in loads if m.pool == number],
            )


class PoolCache:
    """The blocks of one pool and its block store; `layers[i]` is layer i's cache if it is in one of
    these groups.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        spec: ModelSpec,
        num_blocks: int,
        num_entries: int,
        dtype: torch.dtype,
        device: torch.device,
        tp_size: int = 1,
        upload: Upload | None = None,
    ) -> None:
        self._upload = upload or host_upload

        def allocate(cache: Sequence[CacheTensor]) -> LayerCache:
            """Returns zeros for all blocks of one place."""
            shapes = [block_shape(tensor, groups[0], dtype) for tensor in cache]
            return tuple(lazy_zeros((num_blocks, *shape), kind, device) for shape, kind in shapes)

        by_layer = places_of(groups, spec, tp_size)
        places = {place: allocate(place[0]) for place in dict.fromkeys(by_layer.values())}
        self.layers = {layer: places[place] for layer, place in by_layer.items()}
        # Tensors of all places as bytes, [num_blocks, bytes of a block]: blocks are moved whatever
        # is in them.
        self._bytes = [
            tensor.view(num_blocks, -1).view(torch.uint8)
            for cache in places.values()
            for tensor in cache
        ]
        store = num_entries, sum(tensor.shape[1] for tensor in self._bytes)
        self._store = (
            page_locked(store, torch.uint8)
            if device.type == "cuda"
            else lazy_zeros(store, torch.uint8, device)
        )

    def clear_null_block(self) -> None:
        """Zeroes the null block."""
        for tensor in self._bytes:
            tensor[0].zero_()

    def move(self, stores: Sequence[BlockMove], loads: Sequence[BlockMove]) -> None:
        """Copies blocks to the store, then stored blocks back; see `KVCache.move`."""
        for batch in _batches(stores):
            blocks, packed, parts = self._packed(batch)
            for tensor, part in zip(self._bytes, parts, strict=True):
                part.copy_(tensor.index_select(0, blocks))
            for packed_block, move in zip(packed, batch, strict=True):
                self._store[move.host_block].copy_(packed_block, non_blocking=True)
        for batch in _batches(loads):
            blocks, packed, parts = self._packed(batch)
            for packed_block, move in zip(packed, batch, strict=True):
                packed_block.copy_(self._store[move.host_block], non_blocking=True)
            for tensor, part in zip(self._bytes, parts, strict=True):
                tensor.index_copy_(0, blocks, part)

    def _packed(self, moves: Sequence[BlockMove]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Returns the blocks' numbers on the device, a buffer there for as many, and each tensor's
        part of it.
        """
        (blocks,) = self._upload(np.array([move.block for move in moves], dtype=np.int64))
        packed = self._bytes[0].new_empty((len(moves), self._store.shape[1]))
        return blocks, packed, torch.split(packed, [tensor.shape[1] for tensor in self._bytes], 1)


def _batches(moves: Sequence[BlockMove]) -> Iterator[Sequence[BlockMove]]:
    return (moves[i : i + AT_ONCE] for i in range(0, len(moves), AT_ONCE))


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros in page-locked host memory. Raises ConfigError if it cannot be locked.

    Registered, since torch's own allocator rounds page-locked memory up to powers of two: 64 GiB
    for 40.
    """
    memory = lazy_zeros(shape, dtype, torch.device("cpu"))
    runtime: Any = torch.cuda.cudart
    if memory.nbytes and int(
        code := runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
    ):
        raise ConfigError(
            f"{memory.nbytes >> 20:,} MiB of host memory cannot be locked for the GPU (CUDA error {int(code)}); lower "
            "cache.host_store_bytes, or raise the limit on locked memory (ulimit -l)"
        )
    return memory
