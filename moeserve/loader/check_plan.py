"""Compares a LoadPlan with the headers of a checkpoint, before anything is allocated or read."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.load_plan import Index, LoadPlan
from moeserve.loader.safetensors_file import TensorInfo

SUPPORTED = ("F32", "BF16", "F16")
_MAX_SHOWN = 5
_MAX_NAME = 200  # characters: a name in a file may be of any length


def check_plan(checkpoint: Checkpoint, plan: LoadPlan) -> None:
    """Raises one CheckpointError with everything missing, surplus or of a wrong shape or dtype (the first 5 of it)."""
    _check_coverage(plan)
    wanted = {piece.source: piece.shape for piece in plan.pieces}
    found, stored = checkpoint.names, checkpoint.stored
    problems = [f"tensor {name!r} {list(shape)} is missing" for name, shape in wanted.items() if name not in found]
    for name, shape in wanted.items():
        if name in stored:
            problem = stored[name].mismatch(shape)
        else:
            problem = _mismatch(checkpoint.tensors[name], shape) if name in found else ""
        problems += [problem] if problem else []
    owners = {part.name: name for name, weight in stored.items() for part in weight.parts}
    for name, tensor in checkpoint.tensors.items():
        if (owner := owners.get(name, name)) not in wanted and owner not in plan.ignore:
            problems.append(f"tensor {name[:_MAX_NAME]!r} in {tensor.path.name} has no place in this model")
    problems += _half_quantised(checkpoint, plan) if stored else ()
    if problems:
        more = f"\n  and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        shown = "".join(f"\n  {problem}" for problem in problems[:_MAX_SHOWN])
        raise CheckpointError(
            f"{checkpoint.model_dir}: the weights are not those of the model in config.json:{shown}{more}\n"
            "Use the config.json that came with the weights, or download the model again."
        )


def _mismatch(tensor: TensorInfo, shape: tuple[int, ...]) -> str:
    where = f"tensor {tensor.name!r} in {tensor.path.name}"
    if tensor.shape != shape:
        return f"{where} has shape {list(tensor.shape)}, config.json implies {list(shape)}"
    if tensor.dtype not in SUPPORTED:
        return f"{where} is {tensor.dtype}; supported: {', '.join(SUPPORTED)}"
    return ""


def _half_quantised(checkpoint: Checkpoint, plan: LoadPlan) -> Iterator[str]:
    """Parts of a parameter are computed as one: all of them are quantised, or none."""
    kinds: dict[str, dict[bool, str]] = defaultdict(dict)
    for piece in plan.pieces:
        kinds[piece.param][piece.source in checkpoint.stored] = piece.source
    for param in plan.params:
        sources = kinds[param.name]
        if len(sources) > 1:
            yield f"tensor {sources[True]!r} is quantised and {sources[False]!r} is not; they are computed as one"
        elif True in sources and not param.may_be_stored_quantised:
            yield f"tensor {sources[True]!r} is quantised; this is supported for linear layers only"


def _check_coverage(plan: LoadPlan) -> None:
    """Every parameter is written exactly once: a gap would be served as whatever was in memory before."""
    shapes = {param.name: param.shape for param in plan.params}
    assert len(shapes) == len(plan.params), "two parameters of one name"
    written: Counter[str] = Counter()
    for piece in plan.pieces:
        taken, target = part_shape(piece.shape, piece.take), part_shape(shapes[piece.param], piece.at)
        if piece.transpose:
            taken = (*taken[:-2], taken[-1], taken[-2])
        assert taken == target, (piece, taken, target)
        written[piece.param] += math.prod(target)
    wrong = [name for name, shape in shapes.items() if written[name] != math.prod(shape)]
    assert not wrong, f"pieces do not cover {wrong[:_MAX_SHOWN]}"


def part_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """The shape of an array of `shape` after basic indexing: [6, 4] with (slice(0, 2),) -> (2, 4)"""
    left = [len(range(size)[part]) for part, size in zip(index, shape, strict=False) if isinstance(part, slice)]
    return (*left, *shape[len(index) :])
