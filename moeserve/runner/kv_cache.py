"""The device's KV blocks and the host's block store.

All KV groups draw block ids from one pool, and a block belongs to one group at a time. So layers of different groups
share memory: the tensors at position i serve the i-th layer of every group, and there are as many positions as the
largest group has layers.

    windows (None, 64, None, 64): groups {0, 2} and {1, 3}; layers 0 and 1 share tensors, layers 2 and 3 share others
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import BlockMove
from moeserve.errors import ConfigError
from moeserve.loader.spec import ModelSpec, local_kv_heads
from moeserve.ops.inputs import LayerKV, entry_width
from moeserve.runner.tables import HostUpload, Upload, lazy_zeros

AT_ONCE = 64  # blocks that are moved together: their buffer is no larger than a step's work space
PORTABLE = 1  # of cudaHostRegister: for all contexts


def num_positions(groups: Sequence[KVGroup]) -> int:
    """Returns the layers of the largest group, which is how many layers' tensors are allocated."""
    return max(len(group.layers) for group in groups)


def block_bytes(groups: Sequence[KVGroup], spec: ModelSpec, dtype: torch.dtype, tp_size: int = 1) -> int:
    """Returns the bytes of one KV block over all positions on one of tp_size ranks."""
    per_token = 2 * local_kv_heads(spec, tp_size) * entry_width(spec.head_dim, dtype) * dtype.itemsize
    return num_positions(groups) * groups[0].block_size * per_token


class KVCache:
    """The KV blocks on the device and the block store on the host; `layers[i]` is layer i's cache.

    Everything starts as zeros; block 0 is the null block, whose content is never used. num_entries: blocks that the
    host store can hold. tp_size: ranks that share the heads. upload: to the device.
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
        self._upload = upload or HostUpload()
        block = (groups[0].block_size, local_kv_heads(spec, tp_size), entry_width(spec.head_dim, dtype))
        self._positions = [
            LayerKV(
                lazy_zeros((num_blocks, *block), dtype, device),
                lazy_zeros((num_blocks, *block), dtype, device),
            )
            for _ in range(num_positions(groups))
        ]
        by_layer = {layer: i for group in groups for i, layer in enumerate(group.layers)}
        self.layers = tuple(self._positions[by_layer[layer]] for layer in range(len(by_layer)))
        store = num_entries, len(self._positions), 2, *block
        self._store = page_locked(store, dtype) if device.type == "cuda" else lazy_zeros(store, dtype, device)

    def clear_null_block(self) -> None:
        """Zeroes the null block, where dummy steps write."""
        for kv in self._positions:
            kv.k[0].zero_()
            kv.v[0].zero_()

    def move(self, stores: Sequence[BlockMove], loads: Sequence[BlockMove]) -> None:
        """Copies blocks to the store, then stored blocks back. Asynchronous, in the device's order."""
        for batch in _batches(stores):
            blocks, packed = self._packed(batch)
            for i, kv in enumerate(self._positions):
                packed[:, i, 0], packed[:, i, 1] = kv.k.index_select(0, blocks), kv.v.index_select(0, blocks)
            for packed_block, move in zip(packed, batch, strict=True):
                self._store[move.host_block].copy_(packed_block, non_blocking=True)
        for batch in _batches(loads):
            blocks, packed = self._packed(batch)
            for packed_block, move in zip(packed, batch, strict=True):
                packed_block.copy_(self._store[move.host_block], non_blocking=True)
            for i, kv in enumerate(self._positions):
                kv.k.index_copy_(0, blocks, packed[:, i, 0])
                kv.v.index_copy_(0, blocks, packed[:, i, 1])

    def _packed(self, moves: Sequence[BlockMove]) -> tuple[Tensor, Tensor]:
        """Returns the blocks' numbers on the device, and a buffer there for as many blocks."""
        (blocks,) = self._upload(np.array([move.block for move in moves], dtype=np.int64))
        return blocks, self._positions[0].k.new_empty((len(moves), *self._store.shape[1:]))


def _batches(moves: Sequence[BlockMove]) -> Iterator[Sequence[BlockMove]]:
    return (moves[i : i + AT_ONCE] for i in range(0, len(moves), AT_ONCE))


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros in page-locked host memory. Raises ConfigError if it cannot be locked.

    Registered, since torch's own allocator rounds page-locked memory up to powers of two: 64 GiB for 40.
    """
    memory = lazy_zeros(shape, dtype, torch.device("cpu"))
    runtime: Any = torch.cuda.cudart
    if memory.nbytes and int(code := runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)):
        raise ConfigError(
            f"{memory.nbytes >> 20:,} MiB of host memory cannot be locked for the GPU (CUDA error {int(code)}); lower "
            "cache.host_store_bytes, or raise the limit on locked memory (ulimit -l)"
        )
    return memory
