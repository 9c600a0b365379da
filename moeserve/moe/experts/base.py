"""The seam between the MoE layer and an expert kernel. Kernels never see top-k, and never reduce
over it.

e local experts, P received rows, D model width, I expert width.
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
    """The weights of one layer's local experts; the first dimension of every tensor is the local
    expert.

    w13_eFD: gate rows, then up rows, [e, 2I, D], or [e, I, D] without gates. w2_eDI: [e, D, I].
    Tensors, or Quantised where the kernel takes it. b13_eF, b2_eD: biases of their outputs, fp32;
    both or neither.
    """

    w13_eFD: Any
    w2_eDI: Any
    b13_eF: Tensor | None = None
    b2_eD: Tensor | None = None

    def __post_init__(self) -> None:
        assert (self.b13_eF is None) == (self.b2_eD is None), "biases of one product alone"

    @property
    def num_experts(self) -> int:
        """The number of local experts, e."""
        return int(self.w13_eFD.shape[0])

    @staticmethod
    def of_one(
        w13_FD: Any, w2_DI: Any, b13_F: Tensor | None = None, b2_D: Tensor | None = None
    ) -> "ExpertWeights":
        """Return the weights of a single expert, as the only local one."""
        parts = (w13_FD, w2_DI, b13_F, b2_D)
        return ExpertWeights(*(None if part is None else part[None] for part in parts))


@dataclass(frozen=True, slots=True)
class ExpertsCaps:
    """Capabilities of a kernel; `plan_moe` compares them with backends and model once at start.

    not_on: why the kernel does not run on a device, where that needs a reason. width_step: elements
    that the model's width and an expert's must be multiples of. device_counts: whether the kernel
    takes row counts that only the device knows, see `Inbound`. biases: whether it takes experts
    with biases. ungated: whether it takes experts without gates; fuses_ungated: whether its fused
    form does, too. obstacle: why it cannot serve here.
    """

    name: str
    layouts: frozenset[Layout]
    dtypes: frozenset[str]
    devices: frozenset[str]
    not_on: Mapping[str, str] = field(default_factory=dict)
    width_step: int = 1
    device_counts: bool = False
    biases: bool = True
    ungated: bool = False
    fuses_ungated: bool = False
    obstacle: str | None = None


class Experts(Protocol):
    """One kernel family for experts with one activation, over the rows that a dispatch brought."""

    caps: ExpertsCaps
    _activation: Activation = SWIGLU

    def with_activation(self, activation: Activation) -> Self:
        """Return the same kernel for experts with another activation; what either packs serves
        both.
        """
        kernel = copy(self)
        kernel._activation = activation
        return kernel

    def pack(self, weights: ExpertWeights) -> Any:
        """Return the weights in this kernel's own layout, expert by expert; keeps none of the
        tensors it replaces.
        """

    def pack_expert(
        self, w13_FD: Any, w2_DI: Any, b13_F: Tensor | None = None, b2_D: Tensor | None = None
    ) -> Any:
        """Return one expert's weights in this kernel's layout, for `put`. For any thread, while
        others compute.
        """

    def put(self, packed: Any, index: int, expert: Any) -> None:
        """Replace a local expert, between two steps. Takes no longer than copying one expert."""

    def take(self, packed: Any, index: int) -> Any:
        """Return a local expert as `put` takes it, unchanged by a later `put`. For any thread."""

    def stack(self, experts: Sequence[Any]) -> Any:
        """Return packed weights with these as local experts 0, 1, ...; each came from
        `pack_expert` or `take`.
        """

    def run(self, inbound: Inbound, weights: Any, out: Tensor) -> None:
        """Compute out = w2 (act(w1 x) * w3 x) for each row by its expert's weights, or with biases
        out = w2 (act(w1 x + b1) * (w3 x + b3)) + b2; out is laid out as inbound.rows."""


class StackedExperts(Experts):
    """A base of kernels whose packed weights are tensors with the local expert as their first
    dimension: `parts` has all of them, and `of_parts` returns the same weights with other tensors.
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


# Router, dispatch, experts and combine of rows that stay on their rank, in one call: maps x [T, D],
# the packed weights and the number of tokens (rows from there on are padding) to the weighted sums
# [T, D] and the rows of each expert [E]. Logical expert e is local expert e.
FusedExperts = Callable[[Tensor, Any, int | Tensor], tuple[Tensor, Load]]


@runtime_checkable
class Fusible(Experts, Protocol):
    """A kernel family that has a fused form as well."""

    def fuse(self, router: Router) -> FusedExperts:
        """Return the fused form for the layer with this router; its bits are those of the separate
        steps.
        """
