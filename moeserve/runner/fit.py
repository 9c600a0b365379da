"""The setting `fit`: settings with which a model fits into memory, if it does not fit without them.

Settings that the user has given are never changed. The others are chosen in this order:

1. A shorter context, of MIN_CONTEXT tokens at least. `limits.resolve` does this.
2. Keys and values in int8.
3. bf16 weights in 12 bits (`lossless_compression`), if all of them then fit into memory.
4. Experts on disk (`expert_memory`), with as many in memory as fit, in 12 bits if that is possible.

A choice that does not help is not made. For example keys and values stay unrounded if experts have
to be on disk anyway. What fits is decided by the same functions that later limit the KV cache, with
the sizes of weights that the checkpoint's headers give.

The first rank of a machine that starts decides for all, and for those that are restarted later, so
that all compute the same bits.
"""

import fcntl
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from moeserve.config import Config, KVCacheDtype, Lossless
from moeserve.errors import DoesNotFit
from moeserve.loader.expert_memory import MIN_TOKENS
from moeserve.ops.native_layer import HUGE
from moeserve.runner.limits import MemoryFacts, check_weights_fit, kv_budget, mib
from moeserve.runner.weight_sizes import WeightSizes, bytes_in_memory, loading_bytes

MIN_CONTEXT = 4096  # tokens
INT8_KV = "int8 keys and values"
EXPERTS_ON_DISK = "experts on disk"
IN_12_BITS = "weights in 12 bits"
# Memory of libraries and threads that a process takes while it loads and keeps.
LOADED_BYTES = 64 << 20
# Padding to pages of an expert's memory, and its scales, which the size does not count.
SLOT_BYTES = 16 << 10
_FILE = "fit.json"
_SIZE_ERROR = 64  # the sizes from headers are right to one part in so many
_OFF = "--fit off refuses such a start"


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen settings, and what they cost, for people."""

    kv_cache_dtype: KVCacheDtype = "float"
    expert_memory: int | None = None
    lossless_compression: Lossless = "off"
    notes: tuple[str, ...] = ()

    def apply(self, config: Config) -> Config:
        """Return the config with these settings, unless it has others."""
        given = config.model
        cache = config.cache
        return replace(
            config,
            model=replace(
                given,
                fit="off",
                expert_memory=given.expert_memory or self.expert_memory,
                lossless_compression=(
                    self.lossless_compression
                    if given.lossless_compression == "auto"
                    else given.lossless_compression
                ),
            ),
            cache=replace(
                cache,
                kv_cache_dtype=(
                    self.kv_cache_dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype
                ),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """What may be chosen, and what may not."""

    obstacles: Mapping[str, str]  # why choices cannot be made
    compression: Lossless  # the value of lossless_compression
    sizes_in_12_bits: WeightSizes


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a rank needs, and what it may use."""

    config: Config  # with the user's settings
    max_position: int  # tokens of the model's context
    memory: MemoryFacts
    sizes: WeightSizes
    other_weights: int  # bytes of the draft model's weights
    workspace: int  # bytes of a step
    experts_per_token: int
    # The longest context with these settings in a budget for KV blocks. Raises DoesNotFit.
    longest: Callable[[Config, int], int]
    find_alternatives: Callable[[], Alternatives]  # called if the model does not fit without

    def choose(self) -> Choices:
        """Return the first choices in order with which the model fits. Raises DoesNotFit."""
        without = Choices()
        if self._fits(without):
            return without
        for choices in self._candidates():
            if self._fits(choices):
                return msgspec.structs.replace(choices, notes=self._notes(choices))
        raise self._refusal()

    @cached_property
    def _alternatives(self) -> Alternatives:
        return self.find_alternatives()

    def _candidates(self) -> list[Choices]:
        """Return the possible choices in order. One with experts on disk has its expert_memory."""
        obstacles = self._alternatives.obstacles
        dtypes: list[KVCacheDtype] = ["float"] if INT8_KV in obstacles else ["float", "int8"]
        compressions: list[Lossless] = ["off"]
        if IN_12_BITS not in obstacles:
            compressions.append(self._alternatives.compression)
        in_memory = [
            Choices(kv_cache_dtype=dtype, lossless_compression=compression)
            for compression in compressions
            for dtype in dtypes
        ]
        if EXPERTS_ON_DISK in obstacles:
            return in_memory
        # Experts on disk are compressed if they can be: fewer bytes are read, more fit into memory.
        return in_memory + [
            self._with_experts_on_disk(choices) for choices in in_memory[-len(dtypes) :]
        ]

    def _with_experts_on_disk(self, choices: Choices) -> Choices:
        """Return the choices with as many experts in memory as fit beside the least KV cache."""
        sizes = self._sizes(choices)
        utilization = self.config.cache.memory_utilization
        kv = self._least_budget(choices) + self.workspace + LOADED_BYTES
        memory = self.memory
        others = self._bytes_in_memory(choices) - sizes.experts
        left = min(
            int(utilization * memory.limit) - memory.used - others - kv,
            memory.free - others - int(kv / utilization) - 1,
        )
        in_mib = max(0, left - sizes.experts // _SIZE_ERROR - HUGE) >> 20
        return msgspec.structs.replace(choices, expert_memory=max(1, in_mib << 20))

    def _fits(self, choices: Choices) -> bool:
        sizes = self._sizes(choices)
        if choices.expert_memory is not None:
            slot = sizes.expert + sizes.expert // _SIZE_ERROR + SLOT_BYTES
            if choices.expert_memory < MIN_TOKENS * self.experts_per_token * slot:
                return False
        in_memory = self._bytes_in_memory(choices)
        loading = loading_bytes(sizes, self._expert_memory(choices))
        if in_memory + loading > self.memory.free:
            return False
        return self._longest(choices, self._budget(choices)) >= self._least_context

    @property
    def _least_context(self) -> int:
        """The context that must fit.

        If the user gave a size of the KV cache, it is one block, because the context is what fits
        into that size.
        """
        if self.config.model.max_model_len is not None:
            return self.config.model.max_model_len
        if self.config.cache.kv_cache_bytes is not None:
            return min(self.config.cache.block_size, self.max_position)
        return min(MIN_CONTEXT, self.max_position)

    def _sizes(self, choices: Choices) -> WeightSizes:
        compressed = choices.lossless_compression != "off"
        return self._alternatives.sizes_in_12_bits if compressed else self.sizes

    def _expert_memory(self, choices: Choices) -> int | None:
        return self.config.model.expert_memory or choices.expert_memory

    def _bytes_in_memory(self, choices: Choices) -> int:
        sizes = self._sizes(choices)
        return bytes_in_memory(sizes, self._expert_memory(choices)) + self.other_weights

    def _budget(self, choices: Choices) -> int:
        """Return the bytes for KV blocks once the weights are loaded."""
        loaded = self._bytes_in_memory(choices)
        memory = self.memory
        after = replace(memory, used=memory.used + loaded, free=max(0, memory.free - loaded))
        workspace = self.workspace + LOADED_BYTES
        return kv_budget(after, self.config.cache.memory_utilization, workspace)

    def _longest(self, choices: Choices, budget: int) -> int:
        try:
            return self.longest(choices.apply(self.config), budget)
        except DoesNotFit:
            return 0

    def _least_budget(self, choices: Choices) -> int:
        """Return the least budget, to a MiB, in which the least context fits.

        At most the device's memory, even if that is too little.
        """
        low = 0
        high = max(1, self.memory.limit >> 20)
        while low < high:
            middle = (low + high) // 2
            if self._longest(choices, middle << 20) >= self._least_context:
                high = middle
            else:
                low = middle + 1
        return low << 20

    def _notes(self, choices: Choices) -> tuple[str, ...]:
        """Return a line for each choice: why it was made, and what it costs."""
        notes = []
        without = Choices()
        weights = self._bytes_in_memory(without)
        cause = (
            f"weights take {mib(weights)}, a step {mib(self.workspace)}, and keys and values of "
            f"{self._least_context} tokens {mib(self._least_budget(without))}, but "
            f"{mib(self.memory.free)} of memory are free; {_OFF}"
        )
        if choices.kv_cache_dtype == "int8":
            notes.append(
                "kv_cache_dtype: int8 was chosen. It costs accuracy: keys and values are rounded, "
                f"so answers may differ from unrounded ones ({cause})"
            )
        if choices.expert_memory is not None:
            share = choices.expert_memory / max(1, self._sizes(choices).experts)
            notes.append(
                f"expert_memory: {mib(choices.expert_memory)} was chosen. It costs speed: "
                f"{100 * (1 - min(1.0, share)):.0f} % of the experts' bytes stay on disk, and "
                "decoding waits for those that a step needs. No token changes. The first start "
                f"writes {mib(self._sizes(choices).total)} to the packed cache ({cause})"
            )
        if choices.lossless_compression != "off":
            notes.append(
                f"lossless_compression: {choices.lossless_compression} was chosen. It costs time: "
                "the first start packs longer, and steps with many tokens are slower. No token "
                f"changes ({cause})"
            )
        return tuple(notes)

    def _refusal(self) -> DoesNotFit:
        """Return the error of a start without choices, and why there are none that help."""
        considered = ", ".join(
            f"{name} ({self._alternatives.obstacles.get(name, 'not enough')})"
            for name in (INT8_KV, EXPERTS_ON_DISK, IN_12_BITS)
        )
        without = Choices()
        sizes = self._sizes(without)
        asked = replace(
            self.config, model=replace(self.config.model, max_model_len=self._least_context)
        )
        if self.config.cache.kv_cache_bytes is not None:
            asked = self.config
        try:
            check_weights_fit(
                self._bytes_in_memory(without),
                self.memory,
                loading_bytes(sizes, self._expert_memory(without)),
            )
            self.longest(without.apply(asked), self._budget(without))
        except DoesNotFit as error:
            return DoesNotFit(f"{error} Considered: {considered}.")
        raise AssertionError("the model fits without choices")


def decide_once(folder: str, decide: Callable[[], Choices], *, again: bool = False) -> Choices:
    """Return the choices of the first rank that decides; see the module's docstring.

    folder: the private directory of this server on this machine; "": there is none.
    again: the choices so far have failed. They are replaced by those of `decide`, unless another
        rank has replaced them already.
    """
    if not folder:
        return decide()
    path = Path(folder, _FILE)
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            earlier = msgspec.json.decode(path.read_bytes(), type=Choices)
            if not (again and earlier.lossless_compression != "off"):
                return earlier
        choices = decide()
        new = path.with_suffix(".new")  # a rank that is killed meanwhile leaves no half of a file
        new.write_bytes(msgspec.json.encode(choices))
        os.replace(new, path)
        return choices
    finally:
        os.close(lock)
