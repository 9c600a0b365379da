"""Compares a WeightPlan with the headers of a checkpoint, before anything is allocated or read."""

from __future__ import annotations

import math
from collections import Counter

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.plan import Index, WeightPlan
from moeserve.loader.safetensors_file import TensorInfo

SUPPORTED = ("F32", "BF16", "F16")
_MAX_SHOWN = 5
_MAX_NAME = 200  # characters: a name in a file may be of any length


def check_plan(checkpoint: Checkpoint, plan: WeightPlan) -> None:
    """Raises one CheckpointError with everything missing, surplus or of a wrong shape or dtype (the first 5 of it)."""
    _check_coverage(plan)
    wanted = {piece.source: piece.shape for piece in plan.pieces}
    found = checkpoint.tensors
    problems = [f"tensor {name!r} {list(shape)} is missing" for name, shape in wanted.items() if name not in found]
    for name, shape in wanted.items():
        if name in found and (problem := _mismatch(found[name], shape)):
            problems.append(problem)
    for name, tensor in found.items():
        if name not in wanted and name not in plan.ignore:
            problems.append(f"tensor {name[:_MAX_NAME]!r} in {tensor.path.name} has no place in this model")
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


def _check_coverage(plan: WeightPlan) -> None:
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
