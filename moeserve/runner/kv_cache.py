"""The KV blocks on the device.

All KV groups of a pool allocate block ids from it, and a block belongs to one group at a time.
Therefore layers of different groups can share memory, called a cache slot: the i-th layers of all
groups share a cache slot, if their caches have the same tensors. So there are as many cache slots
as the largest group has layers.

    rules (full, window 64, full, window 64): groups {0, 2} and {1, 3}
    layers 0 and 1 share a cache slot, layers 2 and 3 another

Layers of a draft model share none with the model's layers, because a draft model may write to
blocks that its request has returned (runner/speculation/model_proposer.py).
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.blocks.mixer import CacheTensor
from moeserve.engine.blocks import KVGroup
from moeserve.models.spec import ModelSpec
from moeserve.ops.inputs import LayerCache, entry_width
from moeserve.runner.tables import lazy_zeros

# The tensors of a layer's cache, whether it is a draft model's layer, and its index among such
# layers of its group with the same tensors.
CacheSlot = tuple[tuple[CacheTensor, ...], bool, int]


def cache_slots(
    groups: Sequence[KVGroup], spec: ModelSpec, tp_size: int = 1
) -> dict[int, CacheSlot]:
    """Return the cache slot of each layer. groups: of one pool."""
    slots = {}
    parts = spec.cache_parts
    for group in groups:
        num_layers: Counter[tuple[tuple[CacheTensor, ...], bool]] = Counter()  # of each kind so far
        for part in group.layers:
            layer, is_state = parts[part]
            # Layers beyond the sharded ones are those of a draft model, which every rank has whole.
            num_ranks = tp_size if layer < len(spec.sharded_layers) else 1
            mixer = spec.cached_layers[layer].mixer
            cache = mixer.tiled_state(num_ranks) if is_state else mixer.cache(num_ranks)
            kind = cache, layer >= spec.num_layers
            slots[layer] = *kind, num_layers[kind]
            num_layers[kind] += 1
    return slots


def block_shape(
    tensor: CacheTensor, group: KVGroup, dtype: torch.dtype
) -> tuple[tuple[int, int, int], torch.dtype]:
    """Return the shape and the dtype of one block of a cache tensor."""
    if not group.has_states:
        rows = -(-group.block_size // tensor.every)
        return (rows, tensor.heads, entry_width(tensor.width, dtype)), dtype
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
    """Return the bytes of one block of a pool over all cache slots, on one of tp_size ranks; 0 if
    no group uses the pool.
    """
    pool_groups = [group for group in groups if group.pool_index == pool]
    if not pool_groups:
        return 0
    shapes = [
        block_shape(tensor, pool_groups[0], dtype)
        for cache, _, _ in set(cache_slots(pool_groups, spec, tp_size).values())
        for tensor in cache
    ]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


class KVCache:
    """The KV blocks on the device, initialized to zeros.

    `layers[i]` is the cache of layer i, and `draft_layers[i]` the cache of layer i of the draft
    model. Block 0 of each pool is the null block, whose content is never used.

    num_states: the number of blocks with states of recurrent layers.
    tp_size: the number of ranks that share the heads.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        spec: ModelSpec,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        tp_size: int = 1,
        *,
        num_states: int = 0,
    ) -> None:
        sizes = num_blocks, num_states  # by pool
        self.pools = {
            pool: PoolCache(
                [g for g in groups if g.pool_index == pool],
                spec,
                sizes[pool],
                dtype,
                device,
                tp_size,
            )
            for pool in sorted({group.pool_index for group in groups})
        }
        # A layer's state, if it has one in addition to its cache, is in the second pool.
        caches = tuple(
            tuple(tensor for pool in self.pools.values() for tensor in pool.layers.get(layer, ()))
            for layer in range(len(spec.cached_layers))
        )
        self.layers = caches[: spec.num_layers]
        self.draft_layers = caches[spec.num_layers :]

    def clear_null_block(self) -> None:
        """Set the null blocks to zero, after dummy steps have written to them."""
        for pool in self.pools.values():
            for tensor in pool.tensors:
                tensor[0].zero_()


class PoolCache:
    """The blocks of one pool."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        spec: ModelSpec,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        tp_size: int = 1,
    ) -> None:
        self.layers: dict[int, LayerCache] = {}  # the cache of each layer of these groups
        # The memory of all caches as bytes, to move blocks: uint8 [num_blocks, bytes per block].
        self.tensors: list[Tensor] = []
        self.tensors_of: dict[int, tuple[int, ...]] = {}  # indices into `tensors`, by layer
        allocated: dict[CacheSlot, tuple[LayerCache, tuple[int, ...]]] = {}
        for layer, slot in cache_slots(groups, spec, tp_size).items():
            if slot not in allocated:
                cache = tuple(
                    lazy_zeros((num_blocks, *shape), kind, device)
                    for shape, kind in (block_shape(t, groups[0], dtype) for t in slot[0])
                )
                first = len(self.tensors)
                self.tensors += [t.view(num_blocks, -1).view(torch.uint8) for t in cache]
                allocated[slot] = cache, tuple(range(first, len(self.tensors)))
            self.layers[layer], self.tensors_of[layer] = allocated[slot]
