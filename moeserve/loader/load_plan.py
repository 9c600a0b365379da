"""From checkpoint tensors to parameters: a list of copies that a model family declares and the loader carries out."""

from __future__ import annotations

from dataclasses import dataclass

Index = tuple[int | slice, ...]
LINEAR = frozenset({"qkv", "out", "gate_up", "down", "shared_gate_up", "shared_down", "w13", "w2"})


def is_packed(name: str) -> bool:
    """Whether a parameter is the weight of a matrix product, which kernels pack."""
    return name.rpartition(".")[2] in LINEAR | {"router", "lm_head", "shared_gate"}


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the model as its kernels want it. Expert parameters have the local expert slot first."""

    name: str
    shape: tuple[int, ...]

    @property
    def quantised_on_load(self) -> bool:
        """Where that is asked for: the products that take nearly all of the weights' bytes. The router decides too much
        with too little, and the LM head is the layer that llama.cpp and vLLM spare, too."""
        return self._kind in LINEAR

    @property
    def may_be_stored_quantised(self) -> bool:
        return self._kind in LINEAR | {"router", "lm_head"}

    @property
    def _kind(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Piece:
    """Copy checkpoint tensor `source` (or the part `take` of it) to `param[at]`.

    shape is what the whole source must have; `transpose` swaps its last two dimensions after `take`.
    """

    source: str
    shape: tuple[int, ...]
    param: str
    at: Index = ()
    take: Index = ()
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All parameters and all copies. Checkpoint tensors that no piece names are surplus and refused,
    except those in `ignore` (a tied lm_head that was saved anyway, say)."""

    params: tuple[Param, ...]
    pieces: tuple[Piece, ...]
    ignore: frozenset[str] = frozenset()
