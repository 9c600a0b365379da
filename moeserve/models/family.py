"""What a model family must say about itself: its architecture's name and how its checkpoints name tensors."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moeserve.comm.world import World
from moeserve.loader.plan import WeightPlan
from moeserve.loader.spec import ModelSpec
from moeserve.models.build import build_decoder
from moeserve.models.checkpoint import Names, expert_plan, weight_plan
from moeserve.models.decoder import Decoder
from moeserve.moe.placement.placement import Placement
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class Family:
    """One model family. A family with another block structure overrides these methods."""

    architecture: str
    names: Names = field(default_factory=Names)

    def weight_plan(
        self,
        spec: ModelSpec,
        names: Collection[str],
        world: World | None = None,
        placement: Placement | None = None,
    ) -> WeightPlan:
        """This rank's parameters, and how the tensors `names` of the checkpoint fill them."""
        return weight_plan(spec, self.names, names, world, placement)

    def expert_plan(
        self, spec: ModelSpec, names: Collection[str], moe_layer: int, experts: Sequence[int]
    ) -> WeightPlan:
        """Some experts of one MoE layer alone: parameters w13 [n, 2I, D] and w2 [n, D, I]."""
        return expert_plan(spec, self.names, names, moe_layer, experts)

    def build(
        self, spec: ModelSpec, params: MutableMapping[str, Any], ops: Ops, dtype: torch.dtype, **options: Any
    ) -> Decoder:
        """The model; takes the tensors out of `params`. Options as in `build_decoder`."""
        return build_decoder(spec, params, ops, dtype, **options)
