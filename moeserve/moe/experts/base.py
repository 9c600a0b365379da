"""The seam between the MoE layer and an expert kernel. Kernels never see top-k, and never reduce over it.

e local slots, P received rows, D model width, I expert width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.routing import Router
from moeserve.moe.ubatch import Load, Scratch


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one layer's local experts; every tensor has the slot first, so moving an expert copies a slot.

    w13_eFD: gate rows, then up rows, [e, 2I, D]. w2_eDI: [e, D, I]. Tensors, or Quantised with products that take it.
    """

    w13_eFD: Any
    w2_eDI: Any

    @property
    def num_slots(self) -> int:
        return int(self.w13_eFD.shape[0])


@dataclass(frozen=True, slots=True)
class ExpertsCaps:
    """What a kernel can compute; `plan_moe` compares it with backends and model once at start.

    not_on: why it does not run on a device, where that needs a reason. width_step: elements that the model's width and
    an expert's must be multiples of. device_counts: it takes counts that only the device knows, see `Inbound`.
    """

    name: str
    layouts: frozenset[Layout]
    dtypes: frozenset[str]
    devices: frozenset[str]
    graph_safe: bool = False
    not_on: Mapping[str, str] = field(default_factory=dict)
    width_step: int = 1
    device_counts: bool = False


class Experts(Protocol):
    """One kernel family."""

    @property
    def caps(self) -> ExpertsCaps: ...

    def pack(self, weights: ExpertWeights) -> Any:
        """The weights in this kernel's own layout, slot by slot; keeps none of the tensors that it replaces."""
        ...

    def pack_expert(self, w13_FD: Any, w2_DI: Any) -> Any:
        """One expert's weights in this kernel's layout, ready for `put`; may run in any thread while others compute."""
        ...

    def put(self, packed: Any, slot: int, one: Any) -> None:
        """Replaces the expert in a slot, between two steps. Takes no longer than copying one expert."""
        ...

    def take(self, packed: Any, slot: int) -> Any:
        """The expert in a slot, as `put` takes it; stays what it is when the slot gets another. Any thread may ask."""
        ...

    def stack(self, ones: Sequence[Any]) -> Any:
        """Packed weights with these experts in slots 0, 1, ...; each came from `pack_expert` or `take`."""
        ...

    def run(self, inbound: Inbound, weights: Any, out: Tensor, scratch: Scratch) -> None:
        """out = w2 (silu(w1 x) * w3 x) for each row with its slot's weights; out is laid out as inbound.x."""
        ...


class FusedExperts(Protocol):
    """Router, dispatch, experts and combine of rows that stay on their rank, in one call."""

    def __call__(self, x_TD: Tensor, packed: Any, num_tokens: int | Tensor) -> tuple[Tensor, Load]:
        """Returns the weighted sums [T, D] and the rows of each expert [E]. Logical expert e is local expert e. Rows
        from `num_tokens` on are padding."""
        ...


@runtime_checkable
class Fusible(Experts, Protocol):
    """A kernel family that has a fused form as well."""

    def fuse(self, router: Router) -> FusedExperts:
        """Returns the fused form for the layer with this router; its bits are those of the separate steps."""
        ...
