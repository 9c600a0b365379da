"""The device's KV blocks.

KV groups of one pool draw block ids from it, and a block belongs to one group at a time. So layers
of different groups share memory: the i-th layers of all groups with the same tensors in their
caches have one cache slot, and there are as many of them as the largest of these groups has such
layers.

    rules (full, window 64, full, window 64): groups {0, 2} and {1, 3}
    layers 0 and 1 share a cache slot, layers 2 and 3 another
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

# The tensors of a layer's cache, and the layer's number among those of its group that are alike.
CacheSlot = tuple[tuple[CacheTensor, ...], int]


def cache_slots(
    groups: Sequence[KVGroup], spec: ModelSpec, tp_size: int = 1
) -> dict[int, CacheSlot]:
    """Return the cache slot of each layer."""
    slots = {}
    for group in groups:
        alike: Counter[tuple[CacheTensor, ...]] = Counter()
        for layer in group.layers:
            cache = spec.cached_layers[layer].mixer.cache(
                tp_size if layer < len(spec.shared_layers) else 1
            )
            slots[layer] = cache, alike[cache]
            alike[cache] += 1
    return slots


def block_shape(
    tensor: CacheTensor, group: KVGroup, dtype: torch.dtype
) -> tuple[tuple[int, int, int], torch.dtype]:
    """Return the shape of a block of the tensor, and its type."""
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
    """Return the bytes of one block of a pool over all cache slots on one of tp_size ranks; 0 if
    no group takes blocks from it.
    """
    mine = [group for group in groups if group.pool == pool]
    if not mine:
        return 0
    shapes = [
        block_shape(tensor, mine[0], dtype)
        for cache, _ in set(cache_slots(mine, spec, tp_size).values())
        for tensor in cache
    ]
    return sum(math.prod(shape) * kind.itemsize for shape, kind in shapes)


class KVCache:
    """The KV blocks on the device; `layers[i]` is the cache of layer i, and `draft_layers[i]` that
    of the drafter's layer i.

    Everything starts as zeros; block 0 of a pool is the null block, whose content is never used.
    num_states: blocks of recurrent layers' states. tp_size: ranks that share the heads.
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
        sizes = num_blocks, num_states
        self.pools = {
            pool: PoolCache(
                [g for g in groups if g.pool == pool], spec, sizes[pool], dtype, device, tp_size
            )
            for pool in sorted({group.pool for group in groups})
        }
        layers = {
            layer: cache for pool in self.pools.values() for layer, cache in pool.layers.items()
        }
        caches = tuple(layers[layer] for layer in range(len(layers)))
        self.layers = caches[: spec.num_layers]
        self.draft_layers = caches[spec.num_layers :]

    def clear_null_block(self) -> None:
        """Zero the null blocks, where dummy steps write."""
        for pool in self.pools.values():
            for tensor in pool.tensors:
                tensor[0].zero_()


class PoolCache:
    """The blocks of one pool.

    Attributes: `layers[i]`, the cache of layer i if it is in one of these groups; `tensors`, the
    memory of all of them as bytes, uint8 [num_blocks, bytes of a block], since blocks are moved
    whatever is in them; `tensors_of[i]`, the numbers of layer i's tensors among these.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        spec: ModelSpec,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        tp_size: int = 1,
    ) -> None:
        self.layers: dict[int, LayerCache] = {}
        self.tensors: list[Tensor] = []
        self.tensors_of: dict[int, tuple[int, ...]] = {}
        made: dict[CacheSlot, tuple[LayerCache, tuple[int, ...]]] = {}
        for layer, slot in cache_slots(groups, spec, tp_size).items():
            if slot not in made:
                cache = tuple(
                    lazy_zeros((num_blocks, *shape), kind, device)
                    for shape, kind in (block_shape(t, groups[0], dtype) for t in slot[0])
                )
                first = len(self.tensors)
                self.tensors += [t.view(num_blocks, -1).view(torch.uint8) for t in cache]
                made[slot] = cache, tuple(range(first, len(self.tensors)))
            self.layers[layer], self.tensors_of[layer] = made[slot]
