"""The seam of mixers: the blocks of a layer that read earlier tokens.

Each kind has two files: its numbers (a `Mixer`, without torch, because the front end reads specs,
too) and its computation (a `MixerLayer`). `blocks/kinds.py` maps the one to the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from moeserve.blocks.rope import RopeSpec
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.ops.rules import TILE

if TYPE_CHECKING:
    from torch import Tensor

    from moeserve.blocks.weights import WeightPlan
    from moeserve.ops.inputs import HeadShape, LayerCache, Positions, RowContext, StepInputs


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """The cache of one token, or of one tile of tokens, in one tensor of a layer's cache.

    Entries are fp32 where the rule of the cache has tiles.
    """

    name: str
    heads: int  # entries
    width: int  # elements of an entry
    per_tile: bool = False


@dataclass(frozen=True, slots=True)
class CacheRead:
    """The cost of attention to earlier positions."""

    span: int | None  # positions before a query that it reads; None: all
    elements: int  # of each position
    operations: int  # for each query and position


@dataclass(frozen=True, slots=True)
class QueryScale:
    """A factor on queries that grows with the position: 1 + slope * log(1 + floor((position +
    first) / every)).
    """

    slope: float
    every: int
    first: int = 0


# The inputs of one step that layers share: computed once per step from its inputs and the padded
# tokens' positions.
Prepare = Callable[["StepInputs", "Positions"], Any]


class MixerLayer(Protocol):
    """A mixer of one layer, ready to run. Layers with the same `prepare` share its result."""

    @property
    def prepare(self) -> Prepare:
        """Make the `step` argument of `__call__`, once per step for all layers that share it."""

    def __call__(
        self, x_TD: "Tensor", step: Any, cache: "LayerCache", context: "RowContext"
    ) -> "Tensor":
        """Return the block's output [T, D]. The tokens' entries are written to `cache` first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer(ABC):
    """A mixer in numbers. `blocks/kinds.py` names the layer class that computes it.

    rope: its rotary embedding, if it has one. rule: how long its cache entries are needed.
    """

    shared: ClassVar[
        tuple[str, str]
    ]  # the field with the number of what ranks share out evenly, and its name
    rope: RopeSpec | None
    rule: KVRule = FULL

    @property
    def possible_tp(self) -> list[int]:
        """The numbers of tensor-parallel ranks that can share the block, in order."""
        return divisors(getattr(self, self.shared[0]))

    @property
    def sharing(self) -> str:
        """What tensor-parallel ranks share, for errors: "12 query heads on 4 KV heads"."""
        return f"{getattr(self, self.shared[0])} {self.shared[1]}"

    @abstractmethod
    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """Return the tensors of a layer's cache on one of tp_size ranks."""

    def head_shape(self, tp_size: int) -> "HeadShape | None":
        """Return the heads that attention is planned for on one of tp_size ranks; None without
        any.
        """
        return None

    def reads(self, tp_size: int) -> tuple[CacheRead, ...]:
        """Return the reads of attention on one of tp_size ranks; none without heads."""
        if (heads := self.head_shape(tp_size)) is None:
            return ()
        elements = sum(tensor.heads * tensor.width for tensor in self.cache(tp_size))
        operations = 2 * heads.num_heads * (heads.dim + heads.v_dim)
        return (CacheRead(self.rule.window or self.rule.chunk, elements, operations),)

    @abstractmethod
    def products(self, width: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of every matrix product of a model that is `width` wide."""

    def obstacle(self, kernels: str) -> str:
        """Return why the kernels "native", "triton" or "fa3" cannot compute the block; empty if
        they can.
        """
        return ""

    def cache_obstacle(self, dtype: str) -> str:
        """Return why the cache cannot be kept in `dtype` ("int8"); empty if it can."""
        return ""

    @abstractmethod
    def plan(self, plan: "WeightPlan", ours: str, theirs: str) -> None:
        """Add the block's parameters: named `ours` + ..., from the checkpoint's `theirs` + ..."""


TILED = KVRule(tile=TILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentMixer(Mixer):
    """The part of `Mixer` that is alike for all blocks with a state. States are fp32 whatever the
    other caches are.
    """

    rope: RopeSpec | None = None
    rule: KVRule = TILED


def conv_cache(channels: int, inputs: int) -> tuple[CacheTensor, ...]:
    """Return what `ops.causal_conv` keeps: a tile's inputs, and those before its border that it
    still reads.
    """
    return CacheTensor("conv", 1, channels), CacheTensor(
        "conv_border", inputs - 1, channels, per_tile=True
    )


def recurrence_cache(
    groups: int, heads: int, dim: int, v_dim: int, decays: int = 1
) -> tuple[CacheTensor, ...]:
    """Return what `ops.recurrence` keeps: the state at a tile's border, and k, u and s of its
    tokens.
    """
    return (
        CacheTensor("state", heads, dim * v_dim, per_tile=True),
        CacheTensor("k", groups, dim),
        CacheTensor("u", heads, v_dim),
        CacheTensor("decay", heads, decays),
    )


def divisors(number: int) -> list[int]:
    """Return what a number can be shared out to evenly, in order.

    6 -> [1, 2, 3, 6]
    """
    return [tp for tp in range(1, number + 1) if number % tp == 0]
