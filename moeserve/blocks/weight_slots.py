"""Weight slots: how each parameter of a model is packed, and where its packed weights are.

Loading fills each slot once. Slots are kept after the build, so that new weights can be written in
place, into the memory that kernels already read. A slot refers to the packed weights, and never has
a second copy of them.

Parameters have the names of the load plan (models/load_plan.py).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from moeserve.ops.native_layer import allocate_new
from moeserve.ops.table import Ops

Transform = Callable[[Any], Any]  # changes a parameter's values before they are packed
Pack = Callable[..., Any]  # (ops, *values) -> packed weights


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Parameters that are packed together, such as a weight and its bias."""

    names: tuple[str, ...]
    pack: Pack
    destination: Any  # what `pack` returned at the start
    put: Callable[..., None]  # (destination, pack, ops, *values): writes new values in place


@dataclass(frozen=True, slots=True)
class Derivation:
    """How a parameter is made from another one."""

    source: str
    transform: Transform
    num_before: int  # transforms of the source that come before


class WeightSlots(Mapping[str, tuple[WeightSlot, ...]]):
    """The slots of each parameter, usually one. `load` removes parameters from `params`."""

    def __init__(self, params: MutableMapping[str, Any], ops: Ops) -> None:
        self._params = params
        self._ops = ops
        self._slots: dict[str, list[WeightSlot]] = defaultdict(list)
        self._transforms: dict[str, list[Transform]] = defaultdict(list)
        self._derivations: dict[str, Derivation] = {}  # by the name of the derived parameter

    def __getitem__(self, name: str) -> tuple[WeightSlot, ...]:
        if name not in self._slots:
            raise KeyError(name)
        return tuple(self._slots[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def prepare(self, name: str, transform: Transform) -> None:
        """Transform a parameter before it is packed, if there is one of this name."""
        if name in self._params:
            self._params[name] = transform(self._params.pop(name))
            self._transforms[name].append(transform)

    def derive(self, name: str, source: str, transform: Transform, value: Any = None) -> None:
        """Add a parameter `name`, made from `value`, or from the parameter `source` if present."""
        if value is None and source not in self._params:
            return
        self._params[name] = transform(self._params[source] if value is None else value)
        num_before = len(self._transforms[source])
        self._derivations[name] = Derivation(source, transform, num_before)

    def load(self, names: Sequence[str], pack: Pack, put: Callable[..., None] | None = None) -> Any:
        """Pack parameters together, and return the packed weights.

        All parameters but the first may be absent. `pack` gets None for an absent one.

        put: writes new values in place. The default packs them and copies the result.
        """
        first, *others = names
        values = [self._params.pop(first), *(self._params.pop(name, None) for name in others)]
        destination = pack(self._ops, *values)
        present = tuple(
            name for name, value in zip(names, values, strict=True) if value is not None
        )
        slot = WeightSlot(tuple(names), pack, destination, put or _overwrite)
        for name in present:
            self._slots[name].append(slot)
        return destination

    def finish(self) -> None:
        """Check that all parameters are packed, and release the mapping of parameters."""
        assert not self._params, f"parameters that nothing uses: {sorted(self._params)}"
        self._params = {}

    def write(self, values: Mapping[str, Any]) -> None:
        """Write new values of some parameters into the model. Call it between two steps.

        Shapes, dtypes and formats must be those of the loaded values. All parameters of a slot must
        be given together.
        """
        ops = self._ops.packing_into(allocate_new) if self._ops.native else self._ops
        prepared = dict(values)
        for name, derivation in self._derivations.items():
            source = derivation.source
            if source in values:
                value = self._transformed(values[source], source, derivation.num_before)
                prepared[name] = derivation.transform(value)
        for name in values:
            prepared[name] = self._transformed(values[name], name)
        for name, derivation in self._derivations.items():
            if derivation.source in values:
                prepared[name] = self._transformed(prepared[name], name)
        for slot in {id(slot): slot for name in prepared for slot in self[name]}.values():
            missing = [n for n in slot.names if n not in prepared and n in self._slots]
            assert not missing, f"{missing} must be written together with {slot.names}"
            slot.put(slot.destination, slot.pack, ops, *map(prepared.get, slot.names))

    def _transformed(self, value: Any, name: str, num_transforms: int | None = None) -> Any:
        """Return a value after the first transforms of its parameter (None: after all)."""
        for transform in self._transforms[name][:num_transforms]:
            value = transform(value)
        return value


def _overwrite(destination: Any, pack: Pack, ops: Ops, *values: Any) -> None:
    old_tensors = memory_of(destination)
    new_tensors = memory_of(pack(ops, *values))
    for old_tensor, new_tensor in zip(old_tensors, new_tensors, strict=True):
        assert (old_tensor.shape, old_tensor.dtype) == (new_tensor.shape, new_tensor.dtype), (
            old_tensor.shape,
            new_tensor.shape,
        )
        old_tensor.copy_(new_tensor)


def memory_of(packed: Any) -> list[Tensor]:
    """Return the tensors that hold packed weights, in a fixed order."""
    if packed is None:
        return []
    if isinstance(packed, Tensor):
        return [packed]
    if isinstance(packed, partial):  # a function of its weights
        packed = list(packed.keywords.values())
    parts = packed if isinstance(packed, list | tuple) else packed.parts
    return [tensor for part in parts for tensor in memory_of(part)]
