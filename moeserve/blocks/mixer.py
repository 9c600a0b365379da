"""The interface of mixers: attention and recurrent blocks, which read earlier tokens.

Each kind has two files: its specification (a `Mixer`, without torch, because the front end reads
specifications, too) and its computation (a `MixerLayer`). `blocks/kinds.py` maps one to the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from moeserve.blocks.rope import RopeSpec
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.ops.rules import TILE

if TYPE_CHECKING:
    from torch import Tensor

    from moeserve.blocks.weights import WeightPlan
    from moeserve.ops.inputs import HeadShape, LayerCache, Positions, RowContext, StepInputs


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a layer's cache, with [heads, width] elements per token, per `every` tokens, or
    per tile of tokens.

    Elements are fp32 if the cache's `KVRule` has tiles (recurrent mixers).
    """

    name: str
    heads: int
    width: int
    per_tile: bool = False
    every: int = 1  # a row of a cache without tiles is that of so many tokens


@dataclass(frozen=True, slots=True)
class CacheRead:
    """The cost of reading earlier positions, for estimates of step times."""

    window: int | None  # number of positions before a query that it reads; None: all
    elements: int  # elements that a query reads per position
    operations: int  # floating-point operations per query and position


@dataclass(frozen=True, slots=True)
class QueryScale:
    """A position-dependent factor of queries, with x = (position + first) / every."""

    slope: float
    every: int
    first: int = 0
    # steps: 1 + slope * log(1 + floor(x)) (Llama-4, Mistral 4)
    # power: (1 + x) ** slope (Beam)
    # log: 1 + slope * log(max(x, 1)) (Inkling)
    form: Literal["steps", "power", "log"] = "steps"


# Computes the inputs of a step that several layers share, such as attention metadata and rotary
# angles, from the step's inputs and the positions of its (padded) tokens.
Prepare = Callable[["StepInputs", "Positions"], Any]


class MixerLayer(Protocol):
    """The mixer of one layer, ready to run."""

    @property
    def prepare(self) -> Prepare:
        """The function whose result is the argument `step` of `__call__`.

        Layers with the same function share one result per step.
        """

    def __call__(
        self, x_TD: "Tensor", step: Any, cache: "LayerCache", context: "RowContext"
    ) -> "Tensor":
        """Return the block's output [T, D]. Writes the tokens' cache entries first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer(ABC):
    """The specification of a mixer. `blocks/kinds.py` has the layer class that computes it."""

    # What tensor-parallel ranks divide evenly: the name of the field with the number of units, and
    # a name of the units for errors.
    tp_units: ClassVar[tuple[str, str]]
    rope: RopeSpec | None  # the rotary embedding, if any
    rule: KVRule = FULL  # how long cache entries are needed

    @property
    def possible_tp(self) -> list[int]:
        """The supported tensor-parallel sizes, in ascending order."""
        field, _ = self.tp_units
        return divisors(getattr(self, field))

    @property
    def sharing(self) -> str:
        """The units that ranks divide, for errors, such as "12 query heads on 4 KV heads"."""
        field, units = self.tp_units
        return f"{getattr(self, field)} {units}"

    @abstractmethod
    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """Return the tensors of a layer's cache on one of `tp_size` ranks."""

    def tiled_state(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """Return the tensors with the rule `TILED` that a layer has in addition to `cache`.

        In a layer's cache they follow the others. The layer finds their blocks in the KV group
        `Builder.state_group`.
        """
        return ()

    def head_shape(self, tp_size: int) -> "HeadShape | None":
        """Return the attention heads of one of `tp_size` ranks; None without attention."""
        return None

    def reads(self, tp_size: int) -> tuple[CacheRead, ...]:
        """Return the cache reads of attention on one of `tp_size` ranks, () without attention."""
        if (heads := self.head_shape(tp_size)) is None:
            return ()
        elements = sum(tensor.heads * tensor.width for tensor in self.cache(tp_size))
        operations = 2 * heads.num_heads * (heads.dim + heads.v_dim)
        return (CacheRead(self.rule.window or self.rule.chunk, elements, operations),)

    @abstractmethod
    def products(self, width: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of every matrix product.

        width: the width of the model.
        """

    def obstacle(self, kernels: str) -> str:
        """Return why kernels do not support the mixer; empty: they do.

        kernels: "native", "triton" or "fa3".
        """
        return ""

    def cache_obstacle(self, dtype: str) -> str:
        """Return why a cache in `dtype` ("int8") is not supported; empty: it is supported."""
        return ""

    @abstractmethod
    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add the block's parameters to a plan.

        param_prefix: the prefix of the parameters' names.
        tensor_prefix: the prefix of the tensors' names in the checkpoint.
        """


TILED = KVRule(tile=TILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentMixer(Mixer):
    """The specification of a mixer with a recurrent state. The state is always fp32."""

    rope: RopeSpec | None = None
    rule: KVRule = TILED
    # The checkpoint's tensor with the factors of decays: A_log, or A = -exp(A_log) (GGUF)
    decay_tensor: str = "A_log"


def conv_cache(channels: int, inputs: int) -> tuple[CacheTensor, ...]:
    """Return the cache of `ops.causal_conv`.

    The cache has the inputs of a tile's tokens, and the last inputs before the tile, because the
    convolutions of its first tokens read them.
    """
    return CacheTensor("conv", 1, channels), CacheTensor(
        "conv_border", inputs - 1, channels, per_tile=True
    )


def recurrence_cache(
    groups: int, heads: int, dim: int, v_dim: int, decays: int = 1
) -> tuple[CacheTensor, ...]:
    """Return the cache of `ops.recurrence`: the state before a tile, and its tokens' k, u and s."""
    return (
        CacheTensor("state", heads, dim * v_dim, per_tile=True),
        CacheTensor("k", groups, dim),
        CacheTensor("u", heads, v_dim),
        CacheTensor("decay", heads, decays),
    )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order: 6 -> [1, 2, 3, 6]."""
    return [tp for tp in range(1, number + 1) if number % tp == 0]
