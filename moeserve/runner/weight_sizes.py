"""The memory for a rank's weights, from headers alone: packed, and while they are read and packed.

Native kernels pack a weight into another layout. So until a weight is packed, it is in memory
twice: as it was read, in buffers of loader/weights.py, and packed.
"""

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.dummy import quantized_format
from moeserve.loader.load_plan import LoadPlan, Param, Piece, is_expert, is_packed
from moeserve.loader.row_table import CACHE_BYTES
from moeserve.loader.stored_format import StoredFormat
from moeserve.loader.weights import MAX_READ_BYTES, empty_weight, format_of
from moeserve.ops.native_layer import BYTES_IN_12_BITS
from moeserve.ops.quantized import CPU_JOB_ELEMENTS, QuantizeTo
from moeserve.ops.table import Ops

# Bytes per weight that a thread needs while it decodes a weight that files have quantized.
DECODING_BYTES = 24
# Freed memory that the C library keeps while weights are packed.
HEAP_BYTES = 128 << 20
# Bytes per weight of a weight that is rounded to int8 or int4, before it is packed.
ROUNDED_BYTES = 1 + 4 / 32


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of a rank's weights."""

    total: int  # packed
    experts: int = 0  # of these, the experts'
    layer: int = 0  # of these, those of the layer with the largest experts
    expert: int = 0  # the largest one
    loading: int = 0  # in addition to packed weights, until all are packed

    @property
    def others(self) -> int:
        """The bytes of weights that are always in memory."""
        return self.total - self.experts


def bytes_in_memory(sizes: WeightSizes, expert_memory: int | None) -> int:
    """Return the bytes of loaded weights. expert_memory: the setting."""
    if expert_memory is None:
        return sizes.total
    return sizes.others + min(expert_memory, sizes.experts)


def loading_bytes(sizes: WeightSizes, expert_memory: int | None) -> int:
    """Return the bytes beside loaded weights while they are read and packed.

    With `expert_memory`, the experts of one layer are in memory while they are packed, and memory
    for experts is allocated only then.
    """
    if expert_memory is None:
        return sizes.loading
    return max(0, sizes.layer + sizes.loading - min(expert_memory, sizes.experts))


def weight_sizes(
    checkpoint: Checkpoint, plan: LoadPlan, ops: Ops, quantize_to: QuantizeTo | None
) -> WeightSizes:
    """Return the sizes of the parameters that a rank loads."""
    sizes = _param_bytes(checkpoint, plan, ops, quantize_to)
    layers: dict[str, int] = defaultdict(int)
    num_experts: dict[str, int] = {}
    for param in plan.params:
        if is_expert(param.name):
            layer = param.name.rpartition(".")[0]
            layers[layer] += sizes[param.name]
            num_experts[layer] = param.shape[0]
    return WeightSizes(
        total=sum(sizes.values()),
        experts=sum(layers.values()),
        layer=max(layers.values(), default=0),
        expert=max((-(-layers[layer] // n) for layer, n in num_experts.items() if n), default=0),
        loading=_loading_bytes(checkpoint, plan, ops, quantize_to) if ops.native else 0,
    )


def weight_bytes(
    checkpoint: Checkpoint, plan: LoadPlan, ops: Ops, quantize_to: QuantizeTo | None
) -> int:
    """Return the approximate size in memory of the parameters that a rank loads."""
    return sum(_param_bytes(checkpoint, plan, ops, quantize_to).values())


def _param_bytes(
    checkpoint: Checkpoint, plan: LoadPlan, ops: Ops, quantize_to: QuantizeTo | None
) -> dict[str, int]:
    narrow = {
        param.name: form.bytes_per_weight
        for param, form in quantized_params(checkpoint, plan, quantize_to)
    }
    narrow |= dict.fromkeys(compressed_names(ops, plan, narrow), BYTES_IN_12_BITS)
    sizes = {
        param.name: int(math.prod(param.shape) * narrow.get(param.name, _itemsize(param, ops)))
        for param in plan.params
    }
    for param in plan.params:
        if param.on_disk:
            sizes[param.name] = min(sizes[param.name], CACHE_BYTES)
    return sizes


def quantized_params(
    checkpoint: Checkpoint, plan: LoadPlan, quantize_to: QuantizeTo | None
) -> Iterator[tuple[Param, StoredFormat]]:
    """Yield each parameter with 4 or 8 bits per weight, and its format."""
    pieces = _pieces_of(plan)
    for param in plan.params:
        if form := format_of(checkpoint, param, pieces[param.name]):
            yield param, form
        elif quantize_to and param.quantized_on_load:
            yield param, quantized_format(quantize_to, param.shape[-1])


def compressed_names(ops: Ops, plan: LoadPlan, quantized: Collection[str]) -> list[str]:
    """Return the names of the parameters that are compressed to 12 bits per weight."""
    if ops.lossless == "off":
        return []
    is_selected = is_packed if ops.lossless == "all" else is_expert
    fit = (
        param
        for param in plan.params
        if is_selected(param.name) and not param.fp32 and param.shape[-1] % 8 == 0
    )
    return [param.name for param in fit if param.name not in quantized]


def _loading_bytes(
    checkpoint: Checkpoint, plan: LoadPlan, ops: Ops, quantize_to: QuantizeTo | None
) -> int:
    """Return an upper bound of the bytes beside packed weights, while weights are read and packed.

    They are those of the weights that are read and not packed yet, and the buffers of threads.
    """
    pieces = _pieces_of(plan)
    buffers: list[int] = []  # those that loader/weights.py reuses, for weights in 16 and 32 bits
    largest = 0  # of the weights that are packed together, without those in buffers
    decoded = 0  # weights that a thread decodes at a time
    for params in _packed_together(plan):
        plain = []
        others = 0
        for param in params:
            sources = pieces[param.name]
            weight = empty_weight(checkpoint, param, sources, ops.dtype, torch.device("meta"))
            if isinstance(weight, Tensor):
                plain.append(weight.nbytes)
                if quantize_to and param.quantized_on_load:
                    others += int(weight.numel() * ROUNDED_BYTES)
            else:
                others += weight.nbytes
            decoded = max(decoded, _decoded_weights(checkpoint, sources))
        _take_buffers(buffers, plain)
        largest = max(largest, others)
    threads = max(2, min(16, os.cpu_count() or 1))  # as in loader/weights.py
    per_thread = max(MAX_READ_BYTES, DECODING_BYTES * decoded)
    return sum(buffers) + largest + threads * per_thread + HEAP_BYTES


def _packed_together(plan: LoadPlan) -> list[list[Param]]:
    """Return the parameters that kernels pack: w13 and w2 of a layer together, others alone."""
    together: dict[str, list[Param]] = defaultdict(list)
    for param in plan.params:
        if is_packed(param.name):
            layer = param.name.rpartition(".")[0]
            together[f"{layer}.experts" if is_expert(param.name) else param.name].append(param)
    return list(together.values())


def _take_buffers(buffers: list[int], sizes: list[int]) -> None:
    """Add the buffers that `ReusedMemory` (loader/weights.py) allocates for these weights."""
    free = sorted(buffers)
    for size in sizes:
        found = next((buffer for buffer in free if size <= buffer <= 2 * size), None)
        if found is None:
            buffers.append(size)
        else:
            free.remove(found)


def _decoded_weights(checkpoint: Checkpoint, pieces: list[Piece]) -> int:
    """Return how many weights of a parameter a thread decodes at a time; 0 if none is quantized."""
    largest = 0
    for piece in pieces:
        stored = checkpoint.stored.get(piece.source)
        if stored is not None:
            rows, columns = piece.taken_shape[-2:]
            if stored.format.layout == "ggml" and not piece.transposed:
                rows = min(rows, max(1, 4 * CPU_JOB_ELEMENTS // columns))
            largest = max(largest, rows * columns)
    return largest


def _pieces_of(plan: LoadPlan) -> dict[str, list[Piece]]:
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in plan.pieces:
        pieces[piece.param].append(piece)
    return pieces


def _itemsize(param: Param, ops: Ops) -> int:
    if param.int64:
        return torch.int64.itemsize
    return torch.float32.itemsize if param.fp32 else ops.dtype.itemsize
