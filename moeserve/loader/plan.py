"""From checkpoint tensors to parameters: a list of copies that a model family declares and the loader carries out."""

from __future__ import annotations

from dataclasses import dataclass

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the model as its kernels want it. Expert parameters have the local expert slot first."""

    name: str
    shape: tuple[int, ...]


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
class WeightPlan:
    """All parameters and all copies. Checkpoint tensors that no piece names are surplus and refused,
    except those in `ignore` (a tied lm_head that was saved anyway, say)."""

    params: tuple[Param, ...]
    pieces: tuple[Piece, ...]
    ignore: frozenset[str] = frozenset()
