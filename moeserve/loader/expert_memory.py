"""A bounded part of a model's experts in memory, all of them in the file of its packed weights.

A rank has a cache of its own (csrc/pool/expert_cache.hpp). Bits are those of experts that all are
in memory: where an expert lies decides none.
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
LEAST_TOKENS = 2  # whose experts fit at least: one computes while the other's are read


class ExpertMemory:
    """The cache of the experts that `keep` gets while a model is packed; `open` it when that is
    done.

    num_bytes: of experts in memory, `expert_memory`. top_k: experts of a token. native: what
    kernels see.
    """

    def __init__(self, packed: PackedCache, num_bytes: int, top_k: int) -> None:
        self._packed = packed
        self._num_bytes = num_bytes
        self._top_k = top_k
        self._num_experts = 0
        self.native: Any = None

    def keep(self, bytes_eB: Tensor) -> Any:
        """A `ToDisk`. Raises ConfigError where the file cannot be written, or memory holds too few
        experts.
        """
        offset = self._packed.to_disk(bytes_eB)
        if self.native is None:
            assert self._packed.file is not None
            self.native = _native.ExpertCache(self._packed.file.fileno(), str(self._packed.path))
        layer = self.native.add(offset, *bytes_eB.shape)
        least = LEAST_TOKENS * self._top_k * self.native.slot_bytes
        if self._num_bytes < least:
            self._packed.close()
            raise ConfigError(
                f"expert_memory={self._num_bytes:,} is too small for {LEAST_TOKENS} tokens with "
                f"{self._top_k} experts "
                f"each, of {self.native.slot_bytes:,} bytes: ask for at least {least:,}"
            )
        self._num_experts += len(bytes_eB)
        return layer

    def open(self, layers: Sequence[MoELayer]) -> None:
        """Takes the memory. layers: that were packed, in order. Raises ConfigError if other kernels
        than those for CPUs compute their experts."""
        if self.native is None:
            raise ConfigError(
                "expert_memory needs the native kernels, and others compute this model's experts"
            )
        self.native.open(self._num_bytes)
        for layer, behind in pairwise(layers):
            if isinstance(layer, FusedMoELayer) and isinstance(behind, FusedMoELayer):
                layer.expect(behind)
        slots = self.native.num_slots
        size = self.native.num_slots * self.native.slot_bytes
        log.info(
            "%d of %d experts fit into memory (%.2f GiB)", slots, self._num_experts, size / 2**30
        )
