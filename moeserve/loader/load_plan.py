"""Load plans: which parts of which checkpoint tensors are copied into which parameters.

Model families make a plan (models/), this module checks it against a checkpoint's headers, and
loader/weights.py executes it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import CACHE_SCALES

Index = tuple[int | slice, ...]
SUPPORTED_DTYPES = ("F32", "BF16", "F16")
_MAX_SHOWN = 5  # problems that an error lists
_MAX_NAME_CHARS = 200  # of a tensor's name in errors; names in files may be of any length
_MIXER_KINDS = {
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
    "ngram_in",
}
_MLP_KINDS = {
    "gate_up",
    "down",
    "shared_gate_up",
    "shared_down",
    "dense_gate_up",
    "dense_down",
    "merge",
}
# The products of connections (blocks/gated_residual.py, blocks/hyper_connection.py)
_CONNECTION_KINDS = {
    f"{connection}_{product}"
    for connection in ("attn_connection", "mlp_connection", "collapse")
    for product in ("down", "up", "inject", "fn")
}
# The kinds of linear layers' weights
LINEAR_KINDS = frozenset({*_MIXER_KINDS, *_MLP_KINDS, "w13", "w2"})


def kind_of(name: str) -> str:
    """Return a parameter's kind, the last part of its name: "layers.3.qkv" -> "qkv"."""
    return name.rpartition(".")[2]


def is_packed(name: str) -> bool:
    """Return whether a parameter is the weight of a matrix product, which kernels pack."""
    return kind_of(name) in LINEAR_KINDS | {
        "router",
        "attn_router",
        "router_first",
        "router_second",
        "lm_head",
        "shared_gate",
        "index_q",
        "index_k",
        "index_weights",
        "compress",
        "relative",
        "profiles",
        "sink",
        "k",
        "v",
        "k_taps",
        "v_taps",
        *_CONNECTION_KINDS,
    }


def is_expert(name: str) -> bool:
    """Return whether a parameter has experts' weights.

    Kernels pack w13 and w2 of a layer together, under the name of w2.
    """
    return kind_of(name) in ("w13", "w2")


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the model, in the layout that its kernels take."""

    name: str
    shape: tuple[int, ...]  # expert parameters: local experts first
    # dequantized to the model's dtype on load, because no product reads it in the files' format
    widened: bool = False
    fp32: bool = False  # kept in fp32, whatever the model's dtype
    int64: bool = False  # integers, such as the constants of a hash
    on_disk: bool = False  # a table whose rows are read when they are needed (row_table.py)
    below: int = 0  # rows of different integers have those from 0 to below - 1; 0: any integers

    @property
    def quantized_on_load(self) -> bool:
        """Whether `--quantization` applies: to linear layers, which are nearly all of the bytes.

        Not to the router, which is small and decides much, nor to the LM head, which llama.cpp and
        vLLM also leave in 16 bits.
        """
        return kind_of(self.name) in LINEAR_KINDS and not self.widened


@dataclass(frozen=True, slots=True)
class Piece:
    """A copy of `source[take]` in a checkpoint to `param[at]`.

    For example the gate of expert 3, from a tensor [E, D, 2I] with interleaved gate and up columns:
    take (3, slice(None), slice(0, None, 2)) and transposed -> [I, D].
    """

    source: str
    shape: tuple[int, ...]  # of the whole source, as if it were not quantized
    param: str
    at: Index = ()  # an index of integers and slices, with steps above 0
    # The same for the source. Of a quantized source, it takes whole rows along the input dimension.
    take: Index = ()
    transposed: bool = False  # swap the last two dimensions, for weights stored as [..., K, N]

    @property
    def taken_shape(self) -> tuple[int, ...]:
        """The shape of the copied part, after the transposition."""
        shape = part_shape(self.shape, self.take)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All parameters of a rank, and the copies that fill them."""

    params: tuple[Param, ...]
    pieces: tuple[Piece, ...]
    # Tensors that may be in the checkpoint without use, such as a tied lm_head that was saved
    # anyway. Other tensors without a piece are an error.
    ignore: frozenset[str] = frozenset()


def check_plan(checkpoint: Checkpoint, plan: LoadPlan) -> None:
    """Check a plan against a checkpoint's headers, before anything is allocated or read.

    Raises one CheckpointError that lists missing and surplus tensors and wrong shapes and dtypes
    (the first 5 problems).
    """
    _check_coverage(plan)
    sources = {piece.source: (piece.shape, piece.transposed) for piece in plan.pieces}
    int64 = {param.name for param in plan.params if param.int64}
    integers = {piece.source for piece in plan.pieces if piece.param in int64}
    tensors = checkpoint.tensors
    stored = checkpoint.stored
    problems = []
    for name, (shape, transposed) in sources.items():
        if name in stored:
            problems.append(stored[name].mismatch(shape, transposed))
        elif name in tensors:
            problems.append(_mismatch(tensors[name], shape, integers=name in integers))
        else:
            file = checkpoint.missing.get(name)
            where = f" from {file}, where the index has it" if file else ""
            problems.append(f"tensor {name!r} {list(shape)} is missing{where}")
    weight_of = {part.name: name for name, weight in stored.items() for part in weight.parts}
    for name, tensor in tensors.items():
        weight = weight_of.get(name, name)  # a tensor that is not quantized is its own weight
        if name in sources or weight in sources:
            continue
        if stored and name.endswith(CACHE_SCALES):  # a scale of the KV cache
            is_ignored = weight == name
        else:
            is_ignored = weight in plan.ignore
        if not is_ignored:
            problems.append(
                f"tensor {name[:_MAX_NAME_CHARS]!r} in {tensor.path.name} is not part of this model"
            )
    if stored:
        problems += _mixed_formats(checkpoint, plan)
    problems = [problem for problem in problems if problem]
    if problems:
        more = f"\n  and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        shown = "".join(f"\n  {problem}" for problem in problems[:_MAX_SHOWN])
        raise CheckpointError(
            f"{checkpoint.model_dir}: the weights do not match config.json:{shown}{more}\n"
            "Use the config.json that came with the weights, or download the model again."
        )


def _mismatch(tensor: TensorInfo, shape: tuple[int, ...], *, integers: bool) -> str:
    if tensor.shape != shape:
        return f"{tensor} has shape {list(tensor.shape)}, config.json implies {list(shape)}"
    supported = ("I64", "I32") if integers else SUPPORTED_DTYPES
    if tensor.dtype not in supported:
        return f"{tensor} is {tensor.dtype}; supported: {', '.join(supported)}"
    return ""


def _mixed_formats(checkpoint: Checkpoint, plan: LoadPlan) -> Iterator[str]:
    """Yield a problem for each parameter whose sources have different formats.

    A parameter is one operand of one product, so its parts must be quantized alike or not at all.
    """
    # name of a parameter -> description of a format -> a source with this format
    formats_of: dict[str, dict[str, str]] = defaultdict(dict)
    for piece in plan.pieces:
        stored = checkpoint.stored.get(piece.source)
        description = stored.format.description if stored else "not quantized"
        formats_of[piece.param][description] = piece.source
    for param in plan.params:
        source_of = formats_of[param.name]
        if any(
            source in checkpoint.stored and checkpoint.stored[source].format.layout == "ggml"
            for source in source_of.values()
        ):
            continue  # loader/stored_format.common_format finds a format that holds all parts
        if len(source_of) > 1 and not param.widened:
            (first_format, first), (second_format, second) = list(source_of.items())[:2]
            yield (
                f"tensor {first!r} is {first_format} and {second!r} is {second_format}; they must "
                "have the same format, because they are computed as one matrix"
            )
        elif (
            source_of
            and "not quantized" not in source_of
            and not (param.widened or is_packed(param.name))
        ):
            yield (
                f"tensor {next(iter(source_of.values()))!r} is quantized, which is supported for "
                "linear layers only"
            )


def _check_coverage(plan: LoadPlan) -> None:
    """Assert that the pieces fill each parameter: a gap would be uninitialized memory."""
    shapes = {param.name: param.shape for param in plan.params}
    assert len(shapes) == len(plan.params), "two parameters of one name"
    num_written: Counter[str] = Counter()  # elements of each parameter
    for piece in plan.pieces:
        target = part_shape(shapes[piece.param], piece.at)
        assert piece.taken_shape == target, (piece, piece.taken_shape, target)
        num_written[piece.param] += math.prod(target)
    uncovered = [name for name, shape in shapes.items() if num_written[name] != math.prod(shape)]
    assert not uncovered, f"pieces do not cover {uncovered[:_MAX_SHOWN]}"


def part_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Return the shape of `x[index]` for an x of `shape`: [6, 4] with (slice(0, 2),) -> (2, 4)."""
    assert len(index) <= len(shape), (index, shape)
    sliced = [
        len(range(size)[part])
        for part, size in zip(index, shape, strict=False)
        if isinstance(part, slice)
    ]
    return (*sliced, *shape[len(index) :])


@dataclass(frozen=True, slots=True)
class Block:
    """A contiguous range of a tensor in a file, read at once: target[at] = block[index]."""

    first: int  # number of its first element in the tensor
    shape: tuple[int, ...]
    index: Index  # the elements of the block that are used
    at: Index  # their place in the target

    @property
    def whole(self) -> bool:
        """Whether all elements are used."""
        return part_shape(self.shape, self.index) == self.shape


def blocks_of(shape: tuple[int, ...], take: Index, max_elements: int) -> Iterator[Block]:
    """Split a read of `x[take]`, for an x of `shape`, into blocks of about `max_elements`.

    [6, 4], (slice(0, 6, 2), 1), 16 -> rows 0 to 2 for the first two elements of the target, row 4
    for the last one.
    """
    if not shape or (math.prod(shape) <= max_elements and not take):
        yield Block(first=0, shape=shape, index=(), at=())
        return
    row_size = math.prod(shape[1:])  # elements of a row
    take_in_row = take[1:]
    rows = range(shape[0])[take[0] if take else slice(None)]
    if isinstance(rows, int):
        for block in blocks_of(shape[1:], take_in_row, max_elements):
            yield replace(block, first=rows * row_size + block.first)
    elif row_size > max_elements:
        for i, row in enumerate(rows):
            for block in blocks_of(shape[1:], take_in_row, max_elements):
                yield replace(block, first=row * row_size + block.first, at=(i, *block.at))
    else:
        assert rows.step > 0, take
        num_rows = max(1, max_elements // (max(1, row_size) * rows.step))
        for i in range(0, len(rows), num_rows):
            part = rows[i : i + num_rows]
            yield Block(
                first=part[0] * row_size,
                shape=(part[-1] - part[0] + 1, *shape[1:]),
                index=(
                    (slice(None, None, rows.step), *take_in_row)
                    if take_in_row or rows.step > 1
                    else ()
                ),
                at=(slice(i, i + len(part)),),
            )
