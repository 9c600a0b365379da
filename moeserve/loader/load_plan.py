"""Load plans: copies from checkpoint tensors to parameters, which `weights.py` carries out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.safetensors_file import TensorInfo

Index = tuple[int | slice, ...]
SUPPORTED = ("F32", "BF16", "F16")
_MAX_SHOWN = 5
_MAX_NAME = 200  # characters: a name in a file may be of any length
LINEAR = frozenset({"qkv", "out", "gate_up", "down", "shared_gate_up", "shared_down", "w13", "w2"})


def kind_of(name: str) -> str:
    """Returns a parameter's kind: "layers.3.qkv" -> "qkv"."""
    return name.rpartition(".")[2]


def is_packed(name: str) -> bool:
    """Returns whether a parameter is the weight of a matrix product, which kernels pack."""
    return kind_of(name) in LINEAR | {"router", "lm_head", "shared_gate"}


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the model in the layout of its kernels. Expert parameters have the local expert first."""

    name: str
    shape: tuple[int, ...]

    @property
    def quantised_on_load(self) -> bool:
        """Whether `--quantization` rounds it: the products that take nearly all of the weights' bytes.

        The router decides too much with too little, and the LM head is the layer that llama.cpp and vLLM spare, too.
        """
        return kind_of(self.name) in LINEAR


@dataclass(frozen=True, slots=True)
class Piece:
    """A copy of checkpoint tensor `source` to `param[at]`, which is contiguous.

    shape: of the whole source. take: some rows of it, or one; empty for all.
    """

    source: str
    shape: tuple[int, ...]
    param: str
    at: Index = ()
    take: Index = ()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All parameters and all copies.

    Checkpoint tensors that no piece names are refused as surplus, except those in `ignore` (such as a tied lm_head that
    was saved anyway).
    """

    params: tuple[Param, ...]
    pieces: tuple[Piece, ...]
    ignore: frozenset[str] = frozenset()


def check_plan(checkpoint: Checkpoint, plan: LoadPlan) -> None:
    """Compares a plan with a checkpoint's headers, before anything is allocated or read.

    Raises one CheckpointError with everything missing, surplus or of a wrong shape or dtype (the first 5 of it).
    """
    _check_coverage(plan)
    wanted = {piece.source: piece.shape for piece in plan.pieces}
    tensors, stored, problems = checkpoint.tensors, checkpoint.stored, []
    for name, shape in wanted.items():
        if name in stored:
            problems.append(stored[name].mismatch(shape))
        elif name in tensors:
            problems.append(_mismatch(tensors[name], shape))
        else:
            problems.append(f"tensor {name!r} {list(shape)} is missing")
    owners = {part.name: name for name, weight in stored.items() for part in weight.parts}
    for name, tensor in tensors.items():
        if (owner := owners.get(name, name)) not in wanted and owner not in plan.ignore:
            problems.append(f"tensor {name[:_MAX_NAME]!r} in {tensor.path.name} has no place in this model")
    problems += _half_quantised(checkpoint, plan) if stored else ()
    if problems := list(filter(None, problems)):
        more = f"\n  and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        shown = "".join(f"\n  {problem}" for problem in problems[:_MAX_SHOWN])
        raise CheckpointError(
            f"{checkpoint.model_dir}: the weights are not those of the model in config.json:{shown}{more}\n"
            "Use the config.json that came with the weights, or download the model again."
        )


def _mismatch(tensor: TensorInfo, shape: tuple[int, ...]) -> str:
    if tensor.shape != shape:
        return f"{tensor} has shape {list(tensor.shape)}, config.json implies {list(shape)}"
    if tensor.dtype not in SUPPORTED:
        return f"{tensor} is {tensor.dtype}; supported: {', '.join(SUPPORTED)}"
    return ""


def _half_quantised(checkpoint: Checkpoint, plan: LoadPlan) -> Iterator[str]:
    """Yields parameters of which some parts are quantised and others not: they are computed as one."""
    kinds: dict[str, dict[bool, str]] = defaultdict(dict)
    for piece in plan.pieces:
        kinds[piece.param][piece.source in checkpoint.stored] = piece.source
    for param in plan.params:
        sources = kinds[param.name]
        if len(sources) > 1:
            yield f"tensor {sources[True]!r} is quantised and {sources[False]!r} is not; they are computed as one"
        elif True in sources and kind_of(param.name) not in LINEAR | {"router", "lm_head"}:
            yield f"tensor {sources[True]!r} is quantised; this is supported for linear layers only"


def _check_coverage(plan: LoadPlan) -> None:
    """Checks that every parameter is written exactly once: a gap would hold whatever was in memory."""
    shapes = {param.name: param.shape for param in plan.params}
    assert len(shapes) == len(plan.params), "two parameters of one name"
    written: Counter[str] = Counter()
    for piece in plan.pieces:
        assert len(piece.take) <= 1, piece
        taken, target = part_shape(piece.shape, piece.take), part_shape(shapes[piece.param], piece.at)
        assert taken == target, (piece, taken, target)
        written[piece.param] += math.prod(target)
    wrong = [name for name, shape in shapes.items() if written[name] != math.prod(shape)]
    assert not wrong, f"pieces do not cover {wrong[:_MAX_SHOWN]}"


def part_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Returns the shape of an array of `shape` after basic indexing: [6, 4] with (slice(0, 2),) -> (2, 4)"""
    left = [len(range(size)[part]) for part, size in zip(index, shape, strict=False) if isinstance(part, slice)]
    return (*left, *shape[len(index) :])
