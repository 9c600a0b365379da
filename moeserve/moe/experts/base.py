"""The interface between the MoE layer and an expert kernel.

Kernels compute one result per row. They do not know top-k, and do not sum a token's results.

e: local experts. P: received rows. D: model width. I: expert width.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.routing import Router
from moeserve.moe.ubatch import Load
from moeserve.ops.rules import SWIGLU, Activation


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one layer's local experts: tensors, or Quantized if the kernel supports it."""

    w13_eFD: Any  # gate rows, then up rows, [e, 2I, D]; without gates [e, I, D]
    w2_eDI: Any  # down projection, [e, D, I]
    b13_eF: Tensor | None = None  # bias of w13, fp32; both biases or neither
    b2_eD: Tensor | None = None  # bias of w2, fp32

    def __post_init__(self) -> None:
        assert (self.b13_eF is None) == (self.b2_eD is None), "only one of two products has a bias"

    @property
    def num_experts(self) -> int:
        """The number of local experts, e."""
        return int(self.w13_eFD.shape[0])

    @staticmethod
    def of_one(
        w13_FD: Any, w2_DI: Any, b13_F: Tensor | None = None, b2_D: Tensor | None = None
    ) -> "ExpertWeights":
        """Return the weights of a single local expert."""
        parts = (w13_FD, w2_DI, b13_F, b2_D)
        return ExpertWeights(*(None if part is None else part[None] for part in parts))


@dataclass(frozen=True, slots=True)
class ExpertsCaps:
    """Capabilities of a kernel. `plan_moe` compares them with backends and model once at start."""

    name: str
    layouts: frozenset[Layout]
    dtypes: frozenset[str]
    devices: frozenset[str]
    not_on: Mapping[str, str] = field(default_factory=dict)  # device -> why it is unsupported
    width_step: int = 1  # the model's width and the experts' must be multiples
    device_counts: bool = False  # supports row counts on the device, see `Inbound.counts_e`
    biases: bool = True  # supports experts with biases
    ungated: bool = False  # supports experts without gates
    fuses_ungated: bool = False  # the fused form does, too
    obstacle: str | None = None  # why the kernel is unavailable here; None if it is available


class Experts(Protocol):
    """A kernel for experts with one activation."""

    caps: ExpertsCaps
    _activation: Activation = SWIGLU

    def with_activation(self, activation: Activation) -> Self:
        """Return the same kernel for experts with another activation. Packed weights fit both."""
        kernel = copy(self)
        kernel._activation = activation
        return kernel

    def pack(self, weights: ExpertWeights) -> Any:
        """Convert weights to this kernel's layout. Does not keep the original tensors alive."""

    def pack_expert(
        self, w13_FD: Any, w2_DI: Any, b13_F: Tensor | None = None, b2_D: Tensor | None = None
    ) -> Any:
        """Convert one expert's weights to this kernel's layout, for `put`.

        May be called from any thread, while others compute.
        """

    def put(self, packed: Any, index: int, expert: Any) -> None:
        """Replace a local expert, between two steps. Takes no longer than copying one expert."""

    def take(self, packed: Any, index: int) -> Any:
        """Return a copy of a local expert, for `put`. May be called from any thread."""

    def stack(self, experts: Sequence[Any]) -> Any:
        """Return packed weights with local experts 0, 1, ... from `pack_expert` or `take`."""

    def run(self, inbound: Inbound, weights: Any, out: Tensor) -> None:
        """Compute each row with the weights of its expert, and write the result to `out`.

        out = w2 (act(w1 x) * w3 x), or with biases out = w2 (act(w1 x + b1) * (w3 x + b3)) + b2.
        weights: as packed. out: in the layout of inbound.rows.
        """


class StackedExperts(Experts):
    """The base of kernels whose packed weights are tensors with the local expert as dimension 0.

    Packed weights have the tensors in `parts`; their method `of_parts` returns the same weights
    with other tensors.
    """

    def pack_expert(
        self, w13_FD: Any, w2_DI: Any, b13_F: Tensor | None = None, b2_D: Tensor | None = None
    ) -> Any:
        return self.pack(ExpertWeights.of_one(w13_FD, w2_DI, b13_F, b2_D))

    def put(self, packed: Any, index: int, expert: Any) -> None:
        for into, part in zip(packed.parts, expert.parts, strict=True):
            into[index].copy_(part[0])

    def take(self, packed: Any, index: int) -> Any:
        return packed.of_parts([part[index : index + 1].clone() for part in packed.parts])

    def stack(self, experts: Sequence[Any]) -> Any:
        columns = zip(*(expert.parts for expert in experts), strict=True)
        return experts[0].of_parts([torch.cat(column) for column in columns])


# A whole MoE layer in one call, on a single rank: router, dispatch, experts and combine. The
# arguments are x [T, D], the packed weights, and the number of tokens (further rows are padding).
# The results are the weighted sums [T, D], and the number of rows of each expert [E]. Logical
# expert e is local expert e.
FusedExperts = Callable[[Tensor, Any, int | Tensor], tuple[Tensor, Load]]


@runtime_checkable
class Fusible(Experts, Protocol):
    """A kernel that also has a fused form."""

    def can_fuse(self, router: Router) -> bool:
        """Return whether the fused form can compute this router."""

    def fuse(self, router: Router) -> FusedExperts:
        """Return the fused form for a layer with this router. It computes the same bits."""
