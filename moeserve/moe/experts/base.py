"""The seam between the MoE layer and an expert kernel. Kernels never see top-k, and never reduce over it.

e local slots, P received rows, D model width, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.lane import Scratch


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one layer's local experts; every tensor has the slot first, so moving an expert copies a slot.

    w13_eFD: gate rows, then up rows, [e, 2I, D]. w2_eDI: [e, D, I].
    """

    w13_eFD: Tensor
    w2_eDI: Tensor

    @property
    def num_slots(self) -> int:
        return self.w13_eFD.shape[0]


@dataclass(frozen=True, slots=True)
class ExpertsCaps:
    """What a kernel can compute; `plan_moe` compares it with backends and model once at start."""

    name: str
    layouts: frozenset[Layout]
    dtypes: frozenset[str]
    devices: frozenset[str]
    graph_safe: bool = False


class Experts(Protocol):
    """One kernel family."""

    @property
    def caps(self) -> ExpertsCaps: ...

    def pack(self, weights: ExpertWeights) -> Any:
        """The weights in this kernel's own layout, slot by slot; keeps none of the tensors that it replaces."""
        ...

    def run(self, inbound: Inbound, weights: Any, out: Tensor, scratch: Scratch) -> None:
        """out = w2 (silu(w1 x) * w3 x) for each row with its slot's weights; out is laid out as inbound.x."""
        ...
