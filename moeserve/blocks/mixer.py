"""The seam of mixers: the blocks of a layer that read earlier tokens. One file each says everything about one kind.

D model width. A mixer's file has no torch: the front end reads specs, too. What computes is beside it and is imported
when a model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from moeserve.blocks.rope import RopeSpec
from moeserve.engine.kv_rule import KVRule

if TYPE_CHECKING:
    from torch import Tensor

    from moeserve.blocks.build import Builder
    from moeserve.blocks.weights import WeightPlan
    from moeserve.ops.inputs import HeadShape, LayerCache, StepInputs


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """What one token, or one tile of tokens, leaves behind in one tensor of a layer's cache: `heads` entries of `width`
    elements. They are fp32 where the rule of the cache has tiles."""

    name: str
    heads: int
    width: int
    per_tile: bool = False


@dataclass(frozen=True, slots=True)
class QueryScale:
    """A factor on queries that grows with the position: 1 + slope * log(1 + floor((position + first) / every))."""

    slope: float
    every: int
    first: int = 0


# The inputs of one step that layers share: computed once per step from its inputs and the padded tokens' positions.
Prepare = Callable[["StepInputs", "Tensor"], Any]


class MixerLayer(Protocol):
    """A mixer of one layer, ready to run. Layers with the same `prepare` share its result."""

    @property
    def prepare(self) -> Prepare:
        """Makes what `__call__` takes as `step`."""
        ...

    def __call__(self, x_TD: Tensor, step: Any, cache: LayerCache, channel: int) -> Tensor:
        """Returns the block's output [T, D]; writes what the tokens leave behind to `cache` first.

        channel: of the gathers between tensor-parallel ranks.
        """
        ...


class Mixer(Protocol):
    """A mixer in numbers."""

    @property
    def rule(self) -> KVRule:
        """How long its cache entries are needed."""
        ...

    @property
    def rope(self) -> RopeSpec | None:
        """Its rotary embedding, if it has one."""
        ...

    @property
    def possible_tp(self) -> Sequence[int]:
        """The numbers of tensor-parallel ranks that can share the block, in order."""
        ...

    @property
    def sharing(self) -> str:
        """What tensor-parallel ranks share, for errors: "12 query heads on 4 KV heads"."""
        ...

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """Returns the tensors of a layer's cache on one of tp_size ranks."""
        ...

    def head_shape(self, tp_size: int) -> HeadShape | None:
        """Returns the heads that attention is planned for on one of tp_size ranks; None without any."""
        ...

    def products(self, width: int) -> list[tuple[int, int]]:
        """Returns (outputs, inputs) of every matrix product of a model that is `width` wide."""
        ...

    def obstacle(self, kernels: str) -> str:
        """Returns why the kernels "native" or "triton" cannot compute the block; empty if they can."""
        ...

    def cache_obstacle(self, dtype: str) -> str:
        """Returns why the cache cannot be kept in `dtype` ("int8"); empty if it can."""
        ...

    def plan(self, plan: WeightPlan, ours: str, theirs: str) -> None:
        """Adds the block's parameters: named `ours` + ..., from the checkpoint's `theirs` + ..."""
        ...

    def build(self, build: Builder, name: str, group: int) -> MixerLayer:
        """Returns the block, made of the parameters `name` + ... group: its KV group."""
        ...

    def workspace(self, width: int, tokens: int, max_len: int, size: int, tp_size: int) -> int:
        """Returns an upper bound of the bytes that a call needs beside the residual stream.

        tokens: padded, of a step. max_len: of a context. size: bytes of an element.
        """
        ...


class LazyMixer:
    """The part of `Mixer` that is alike for most kinds, and the one that needs torch: the class with Layer behind the
    mixer's name, and the function `workspace`, of the file beside the mixer's own, which has _layer behind its name and
    is imported when they are called."""

    __slots__ = ()

    @property
    def shares(self) -> tuple[int, str]:
        """What tensor-parallel ranks share out evenly: how many, and of what."""
        raise NotImplementedError

    @property
    def possible_tp(self) -> list[int]:
        """See `Mixer`."""
        return divisors(self.shares[0])

    @property
    def sharing(self) -> str:
        """See `Mixer`."""
        return "{} {}".format(*self.shares)

    def obstacle(self, kernels: str) -> str:
        """See `Mixer`."""
        return ""

    def cache_obstacle(self, dtype: str) -> str:
        """See `Mixer`."""
        return ""

    def build(self, build: Builder, name: str, group: int) -> MixerLayer:
        """See `Mixer`."""
        layer: MixerLayer = getattr(self._beside(), type(self).__name__ + "Layer")(self, build, name, group)
        return layer

    def workspace(self, width: int, tokens: int, max_len: int, size: int, tp_size: int) -> int:
        """See `Mixer`."""
        num_bytes: int = self._beside().workspace(self, width, tokens, max_len, size, tp_size)
        return num_bytes

    def _beside(self) -> Any:
        return import_module(type(self).__module__ + "_layer")


def divisors(number: int) -> list[int]:
    """Returns what a number can be shared out to evenly, in order.

    6 -> [1, 2, 3, 6]
    """
    return [tp for tp in range(1, number + 1) if number % tp == 0]
