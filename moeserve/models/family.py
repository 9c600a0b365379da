"""What a model family must say about itself: its architecture's name and how its checkpoints name tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moeserve.loader.plan import WeightPlan
from moeserve.loader.spec import ModelSpec
from moeserve.models.build import build_decoder
from moeserve.models.checkpoint import Names, weight_plan
from moeserve.models.decoder import Decoder
from moeserve.ops.table import Ops
from moeserve.parallel.world import World


@dataclass(frozen=True, slots=True)
class Family:
    """One model family. A family with another block structure overrides these two methods."""

    architecture: str
    names: Names = field(default_factory=Names)

    def weight_plan(self, spec: ModelSpec, names: Collection[str], world: World | None = None) -> WeightPlan:
        """The parameters, and how the tensors `names` of the checkpoint fill them."""
        return weight_plan(spec, self.names, names, world)

    def build(
        self, spec: ModelSpec, params: dict[str, Tensor], ops: Ops, dtype: torch.dtype, **options: Any
    ) -> Decoder:
        """The model; takes the tensors out of `params`. Options as in `build_decoder`."""
        return build_decoder(spec, params, ops, dtype, **options)
