"""A model family: how its config.json becomes a spec, and how its checkpoints name tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moeserve.loader.fields import Fields


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """One spelling of the routed experts, relative to `model.layers.N.`; `{}` stands for the expert's id.

    gate, up, down: one tensor per expert. gate_up, down: all experts in one tensor, [E, 2I, D] and [E, D, I].
    """

    down: str
    gate: str = ""
    up: str = ""
    gate_up: str = ""


PER_EXPERT = ExpertNames(
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
)
FUSED = ExpertNames(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj")


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a family's MoE tensors; all other tensors have the same names in every family.

    experts: the spellings of its checkpoints, the usual one first. router: likewise.
    """

    experts: tuple[ExpertNames, ...] = (PER_EXPERT, FUSED)
    router: tuple[str, ...] = ("mlp.gate.weight",)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    architecture, model_type: as config.json has them. fields(config, number of layers): the fields of ModelSpec that
    not all families share. defaults: the values where config.json is silent, those of the family's configuration class
    in transformers 5.
    """

    architecture: str
    model_type: str
    fields: Callable[[Fields, int], dict[str, Any]]
    defaults: dict[str, Any]
    names: Names = field(default_factory=Names)
