"""Load plans: copies from checkpoint tensors to parameters, which `weights.py` carries out."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import CACHE_SCALES

Index = tuple[int | slice, ...]
SUPPORTED = ("F32", "BF16", "F16")
_MAX_SHOWN = 5
_MAX_NAME = 200  # characters: a name in a file may be of any length
_MIXERS = {
    "in",
    "narrow",
    "decays",
    "gates",
    "select",
    "dt",
    "qkv",
    "out",
    "gate",
    "q",
    "q_a",
    "q_b",
    "kv_a",
}
_MLPS = {"gate_up", "down", "shared_gate_up", "shared_down", "dense_gate_up", "dense_down", "merge"}
LINEAR = frozenset({*_MIXERS, *_MLPS, "w13", "w2"})


def kind_of(name: str) -> str:
    """Returns a parameter's kind: "layers.3.qkv" -> "qkv"."""
    return name.rpartition(".")[2]


def is_packed(name: str) -> bool:
    """Returns whether a parameter is the weight of a matrix product, which kernels pack."""
    return kind_of(name) in LINEAR | {
        "router",
        "lm_head",
        "shared_gate",
        "index_q",
        "index_k",
        "index_weights",
    }


def is_expert(name: str) -> bool:
    """Returns whether a parameter has experts' weights; packed, both are kept under the second
    one's name.
    """
    return kind_of(name) in ("w13", "w2")


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the model in the layout of its kernels. Expert parameters have the local
    expert first.

    widened: it is a tensor of the model's dtype also where the files have it quantised, since
    nothing multiplies with it as it is there. fp32: it is, whatever the model's dtype.
    """

    name: str
    shape: tuple[int, ...]
    widened: bool = False
    fp32: bool = False

    @property
    def quantised_on_load(self) -> bool:
        """Whether `--quantization` rounds it: the products that take nearly all of the weights'
        bytes.

        The router decides too much with too little, and the LM head is the layer that llama.cpp and
        vLLM spare, too.
        """
        return kind_of(self.name) in LINEAR and not self.widened


@dataclass(frozen=True, slots=True)
class Piece:
    """A copy of `source[take]` of a checkpoint to `param[at]`.

    shape: of the whole source, as it would lie in the file if it were not quantised. take, at:
    basic indices, with steps above 0. transposed: the last two dimensions of what is taken change
    places, for weights stored [..., K, N]. Of a quantised source all K inputs are taken.

    Gate of expert 3, [D, 2I] with gate and up by turns: take (3, slice(None), slice(0, None, 2)),
    transposed -> [I, D]
    """

    source: str
    shape: tuple[int, ...]
    param: str
    at: Index = ()
    take: Index = ()
    transposed: bool = False

    @property
    def taken(self) -> tuple[int, ...]:
        """The shape of what is copied."""
        shape = part_shape(self.shape, self.take)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All parameters and all copies.

    Checkpoint tensors that no piece names are refused as surplus, except those in `ignore` (such as
    a tied lm_head that was saved anyway).
    """

    params: tuple[Param, ...]
    pieces: tuple[Piece, ...]
    ignore: frozenset[str] = frozenset()


def check_plan(checkpoint: Checkpoint, plan: LoadPlan) -> None:
    """Compares a plan with a checkpoint's headers, before anything is allocated or read.

    Raises one CheckpointError with everything missing, surplus or of a wrong shape or dtype (the
    first 5 of it).
    """
    _check_coverage(plan)
    wanted = {piece.source: (piece.shape, piece.transposed) for piece in plan.pieces}
    tensors = checkpoint.tensors
    stored = checkpoint.stored
    problems = []
    for name, (shape, transposed) in wanted.items():
        if name in stored:
            problems.append(stored[name].mismatch(shape, transposed))
        elif name in tensors:
            problems.append(_mismatch(tensors[name], shape))
        else:
            file = checkpoint.absent.get(name)
            where = f" from {file}, which has it by the index" if file else ""
            problems.append(f"tensor {name!r} {list(shape)} is missing{where}")
    owners = {part.name: name for name, weight in stored.items() for part in weight.parts}
    for name, tensor in tensors.items():
        unused = plan.ignore if not stored or not name.endswith(CACHE_SCALES) else {name}
        if (
            name not in wanted
            and (owner := owners.get(name, name)) not in wanted
            and owner not in unused
        ):
            problems.append(
                f"tensor {name[:_MAX_NAME]!r} in {tensor.path.name} has no place in this model"
            )
    problems += _half_quantised(checkpoint, plan) if stored else ()
    if problems := list(filter(None, problems)):
        more = f"\n  and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        shown = "".join(f"\n  {problem}" for problem in problems[:_MAX_SHOWN])
        raise CheckpointError(
            f"{checkpoint.model_dir}: the weights are not those of the model in "
            f"config.json:{shown}{more}\n"
            "Use the config.json that came with the weights, or download the model again."
        )


def _mismatch(tensor: TensorInfo, shape: tuple[int, ...]) -> str:
    if tensor.shape != shape:
        return f"{tensor} has shape {list(tensor.shape)}, config.json implies {list(shape)}"
    if tensor.dtype not in SUPPORTED:
        return f"{tensor} is {tensor.dtype}; supported: {', '.join(SUPPORTED)}"
    return ""


def _half_quantised(checkpoint: Checkpoint, plan: LoadPlan) -> Iterator[str]:
    """Yields parameters whose parts are quantised differently, or some of them not: they are
    computed as one.
    """
    kinds: dict[str, dict[str, str]] = defaultdict(dict)
    for piece in plan.pieces:
        stored = checkpoint.stored.get(piece.source)
        kinds[piece.param][stored.form.described if stored else "not quantised"] = piece.source
    for param in plan.params:
        sources = kinds[param.name]
        if any(
            name in checkpoint.stored and checkpoint.stored[name].form.layout == "ggml"
            for name in sources.values()
        ):
            continue  # `common_format` has one for all
        if len(sources) > 1 and not param.widened:
            (one, first), (other, second) = list(sources.items())[:2]
            yield f"tensor {first!r} is {one} and {second!r} is {other}; they are computed as one"
        elif (
            sources
            and "not quantised" not in sources
            and not (param.widened or is_packed(param.name))
        ):
            yield (
                f"tensor {next(iter(sources.values()))!r} is quantised; this is supported for "
                "linear layers only"
            )


def _check_coverage(plan: LoadPlan) -> None:
    """Check that each element is written exactly once: a gap would hold random memory."""
    shapes = {param.name: param.shape for param in plan.params}
    assert len(shapes) == len(plan.params), "two parameters of one name"
    written: Counter[str] = Counter()
    for piece in plan.pieces:
        target = part_shape(shapes[piece.param], piece.at)
        assert piece.taken == target, (piece, piece.taken, target)
        written[piece.param] += math.prod(target)
    wrong = [name for name, shape in shapes.items() if written[name] != math.prod(shape)]
    assert not wrong, f"pieces do not cover {wrong[:_MAX_SHOWN]}"


def part_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Returns the shape of an array of `shape` after basic indexing: [6, 4] with (slice(0, 2),) ->
    (2, 4)
    """
    assert len(index) <= len(shape), (index, shape)
    left = [
        len(range(size)[part])
        for part, size in zip(index, shape, strict=False)
        if isinstance(part, slice)
    ]
    return (*left, *shape[len(index) :])


@dataclass(frozen=True, slots=True)
class Block:
    """A contiguous part of a tensor, `shape` from element `first` on, of which `index` goes to `at`
    of the target.
    """

    first: int
    shape: tuple[int, ...]
    index: Index
    at: Index

    @property
    def whole(self) -> bool:
        """Whether all of it is taken."""
        return part_shape(self.shape, self.index) == self.shape


def blocks_of(shape: tuple[int, ...], take: Index, most: int) -> Iterator[Block]:
    """Cuts what `take` takes of a tensor into blocks of about `most` elements.

    [6, 4], (slice(0, 6, 2), 1), 16 -> rows 0 to 3 for the first two elements of the target, row 4
    for the last
    """
    if not shape or (math.prod(shape) <= most and not take):
        yield Block(0, shape, (), ())
        return
    row = math.prod(shape[1:])
    rest = take[1:]
    part = range(shape[0])[take[0] if take else slice(None)]
    if isinstance(part, int):
        for block in blocks_of(shape[1:], rest, most):
            yield replace(block, first=part * row + block.first)
    elif row > most:
        for i, at in enumerate(part):
            for block in blocks_of(shape[1:], rest, most):
                yield replace(block, first=at * row + block.first, at=(i, *block.at))
    else:
        assert part.step > 0, take
        count = max(1, most // (max(1, row) * part.step))
        for i in range(0, len(part), count):
            rows = part[i : i + count]
            span = rows[-1] - rows[0] + 1
            index = (slice(None, None, part.step), *rest) if rest or part.step > 1 else ()
            yield Block(rows[0] * row, (span, *shape[1:]), index, (slice(i, i + len(rows)),))
