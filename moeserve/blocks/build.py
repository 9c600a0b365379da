"""Builds layers from parameters: packs each weight for its kernel, and frees the original."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.linear import ColumnLinear, GatedMLP, pad_part
from moeserve.blocks.rope import RopeSpec
from moeserve.blocks.rotary import RotaryTable
from moeserve.blocks.weight_slots import WeightSlots
from moeserve.comm.tensor import TensorParallel
from moeserve.comm.world import World
from moeserve.moe.placement.placement import Placement
from moeserve.moe.plan import MoEPlan
from moeserve.ops.linear import LinearMethod
from moeserve.ops.rules import SWIGLU, Activation
from moeserve.ops.table import Ops


@dataclass(slots=True)
class Builder:
    """Takes parameters out of `params`, and packs them into layers."""

    width: int  # width of the model
    eps: float  # epsilon of norms
    max_position: int  # positions that a request may have
    params: MutableMapping[str, Any]  # becomes empty while layers are built
    ops: Ops
    world: World
    tp: TensorParallel
    placement: Placement
    plan_moe: Callable[[], MoEPlan]  # chooses the kernels and transport of MoE layers
    norm_shift: float = 0.0  # added to the weights of norms
    state_group: int | None = None  # the KV group of states
    num_moe: int = 0  # MoE layers built so far
    slots: WeightSlots = field(init=False)
    _shared: dict[Any, Any] = field(default_factory=dict)  # objects that several layers share

    def __post_init__(self) -> None:
        self.slots = WeightSlots(self.params, self.ops)

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the object of this key, which `make` creates at the first call."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def rotary_table(self, rope: RopeSpec | None, dim: int) -> RotaryTable:
        """Return the table of rotary angles for heads with `dim` elements."""
        make = partial(RotaryTable, rope, dim, self.max_position, self.ops.device)
        table: RotaryTable = self.shared(("rotary", rope, dim), make)
        return table

    def linear(self, name: str) -> LinearMethod:
        """Pack the weight `name` and its bias, if there is one."""
        packed: LinearMethod = self.slots.load(
            (name, name + "_bias"), lambda ops, weight, bias: ops.pack_linear(weight, bias)
        )
        return packed

    def columns(
        self, name: str, num_columns: int, tp: TensorParallel | None = None
    ) -> ColumnLinear:
        """Build a product whose output columns are sharded.

        name: the parameter with this rank's columns.
        """
        tp = tp or self.tp
        return ColumnLinear(self.part(name, num_columns, tp), num_columns, tp)

    def part(
        self, name: str, num_columns: int, tp: TensorParallel, *, parts: int = 1
    ) -> LinearMethod:
        """Pack this rank's columns of a sharded product, padded to the same number on all ranks.

        parts: number of weights of num_columns outputs each that are stacked in `name`.
        """
        for key in (name, name + "_bias"):
            self.slots.prepare(key, partial(pad_part, num_columns=num_columns, tp=tp, parts=parts))
        return self.linear(name)

    def norm(self, name: str, factor: float = 1.0) -> Tensor:
        """Return the weights of a norm, in fp32, multiplied by `factor`."""
        shift = self.norm_shift

        def make(weight: Tensor) -> Tensor:
            weight = weight + shift if shift else weight
            return weight if factor == 1.0 else weight * factor

        return self.fp32(name, make)

    def head_norms(self, names: Sequence[str], counts: Sequence[int]) -> Tensor:
        """Return norm weights per head: those of each name, repeated for its count of heads."""
        shift = self.norm_shift

        def pack(ops: Ops, *weights: Tensor) -> Tensor:
            shifted = (weight.float() + shift if shift else weight.float() for weight in weights)
            expanded = [w.expand(count, -1) for w, count in zip(shifted, counts, strict=True)]
            return torch.cat(expanded, 0)

        norms: Tensor = self.slots.load(names, pack)
        return norms

    def fp32(self, name: str, make: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return a parameter in fp32, for example a norm, after applying `make` if given."""

        def pack(ops: Ops, value: Tensor) -> Tensor:
            return value.float() if make is None else make(value.float())

        tensor: Tensor = self.slots.load((name,), pack)
        return tensor

    def reorder(self, name: str, order: Sequence[int]) -> None:
        """Reorder the rows of a weight, or the elements of a bias or norm."""
        index = torch.tensor(order)
        # Not `value[index]`, which imports sympy (one second) for weights on "meta".
        self.slots.prepare(name, lambda value: value.index_select(0, index))

    def gated(
        self, name: str, inner_size: int, tp: TensorParallel, activation: Activation = SWIGLU
    ) -> GatedMLP:
        """Build an MLP of inner width `inner_size`, gated if the activation is."""
        gate_up = self.part(name + "gate_up", inner_size, tp, parts=activation.parts)
        return GatedMLP(
            self.ops,
            gate_up,
            self.columns(name + "down", self.width, tp),
            inner_size,
            tp,
            activation,
        )
