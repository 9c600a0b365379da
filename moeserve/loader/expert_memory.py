"""The setting `expert_memory`: a bounded cache of experts in memory, all experts on disk.

The experts are in the file of packed weights (loader/packed_cache.py). Each rank has its own cache
(csrc/pool/expert_cache.hpp). The cache does not change results: they are bitwise equal to those
with all experts in memory.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from moeserve.errors import ConfigError
from moeserve.loader.packed_cache import PackedCache
from moeserve.moe.layer import FusedMoELayer, MoELayer
from moeserve.ops.native import native

log = logging.getLogger(__name__)
_native: Any = native()
# The cache must hold the experts of this many tokens: those of one compute while those of the other
# are read.
MIN_TOKENS = 2


class ExpertMemory:
    """The expert cache of a rank.

    `register` gets each layer's experts while the model is packed; `open` then allocates memory.
    """

    def __init__(self, packed: PackedCache, num_bytes: int, top_k: int) -> None:
        """num_bytes: the setting `expert_memory`. top_k: experts per token."""
        self._packed = packed
        self._num_bytes = num_bytes
        self._top_k = top_k
        self._num_experts = 0
        self.native: Any = None  # the ExpertCache that kernels use

    def register(self, bytes_eB: Tensor) -> Any:
        """Register the packed experts of a layer, and return their handle (a `WriteExperts`).

        bytes_eB: the layer's e experts, of B bytes each.

        Raises ConfigError if the file cannot be written, or `num_bytes` is too small.
        """
        offset = self._packed.write_experts(bytes_eB)
        if self.native is None:
            assert self._packed.file is not None
            self.native = _native.ExpertCache(self._packed.file.fileno(), str(self._packed.path))
        layer = self.native.add(offset, *bytes_eB.shape)
        min_bytes = MIN_TOKENS * self._top_k * self.native.slot_bytes
        if self._num_bytes < min_bytes:
            self._packed.close()
            raise ConfigError(
                f"expert_memory={self._num_bytes:,} is too small for {MIN_TOKENS} tokens with "
                f"{self._top_k} experts each, of {self.native.slot_bytes:,} bytes; set it to at "
                f"least {min_bytes:,}"
            )
        self._num_experts += len(bytes_eB)
        return layer

    def open(self, layers: Sequence[MoELayer]) -> None:
        """Allocate the memory. layers: the packed layers, in order.

        Raises ConfigError unless the native CPU kernels compute the experts.
        """
        if self.native is None:
            raise ConfigError(
                "expert_memory needs the native kernels, but others compute this model's experts; "
                "remove expert_memory, or set kernels: native"
            )
        self.native.open(self._num_bytes)
        for layer, next_layer in pairwise(layers):
            if isinstance(layer, FusedMoELayer) and isinstance(next_layer, FusedMoELayer):
                layer.predict_experts_of(next_layer)
        num_slots = self.native.num_slots
        log.info(
            "%d of %d experts fit into memory (%.2f GiB)",
            num_slots,
            self._num_experts,
            num_slots * self.native.slot_bytes / 2**30,
        )
