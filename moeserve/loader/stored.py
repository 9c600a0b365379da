"""Finds the tensors of each quantized weight in a checkpoint, by name, dtype and shape.

Shapes: N outputs, K inputs, R x C scales. R is 1, N, or the number of blocks along N; C likewise
along K. Dimensions of experts may come first.

In an unquantized checkpoint the weight is `x.weight`, or `x` for fused experts. Quantized, it is

    layout     tensor                format
    plain      x.weight              int8 or e4m3 [N, K]; [K, N] with scales [C, R] if the
                                     unquantized weight is transposed
    words      x.weight_packed       int32 [N, K / 8 or 4], lowest bits: first input
               x.weight_zero_point   int32 [N / 8, C] of eight outputs, for asymmetric int4
    nibbles    x.weight_packed       uint8 or int8 [N, K / 2], lowest bits: first input; or x.weight
    blocks     x.weight_blocks       uint8 [N, C, 16], lowest bits: first input
               x.weight_scales       [N, C]
    gptq       x.qweight             int32 [K / 8 or 4, N], lowest bits: first input
               x.scales              [C, N]
               x.qzeros              int32 [C, N / 8 or 4]: zero points, minus 1 unless gptq_v2
               x.g_idx               group of each input
    awq        x.qweight             int32 [K, N / 8] of eight outputs; from the lowest bits up
                                     they are outputs 0, 2, 4, 6, 1, 3, 5, 7
               x.scales              [C, N]
               x.qzeros              int32 [C, N / 8], likewise

The scales of the other layouts are x.weight_scale, x.weight_scale_inv, x.scale (DeepSeek-V4) or
x.qscale_weight (Mistral Large 4): floats, or e8m0, or e4m3.
Those in e4m3 are multiplied by x.weight_scale_2 (ModelOpt), or divided by x.weight_global_scale
(compressed-tensors). Tensors about activations or shapes are not used.

Does not import torch.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moeserve.errors import CheckpointError
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored_format import StoredFormat

_FLOATS = ("F32", "BF16", "F16")
_E8M0 = ("U8", "F8_E8M0")
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
# The first multiplies scales, the second divides them.
_OUTER_SCALE_SUFFIXES = ("_scale_2", "_global_scale")
# Suffix of the tensor with the values -> suffix of the unquantized weight
_VALUES_SUFFIXES = {"_packed": "", "_blocks": "", ".qweight": ".weight"}
_UNUSED_SUFFIXES = (
    "_shape",
    "_activation_scale",
    "_input_scale",
    "input_scale",
    "input_zero_point",
    "activation_scale",
    "input_global_scale",
    "output_scale",
    "input_scale_ub",
    "qscale_act",
)
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")  # of an 8-bit KV cache


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The tensors of one quantized weight."""

    format: StoredFormat
    values: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None = None
    outer_scale: TensorInfo | None = None  # one scale for all scales of a matrix
    group_index: TensorInfo | None = None  # the group of each input (GPTQ's g_idx)
    # The bias of the weight's module. GPTQ checkpoints have zeros here if the model has no bias.
    bias: TensorInfo | None = None
    others: tuple[TensorInfo, ...] = field(default=())  # tensors that are not used

    @property
    def parts(self) -> list[TensorInfo]:
        """All tensors of the weight, starting with the values."""
        parts = (
            self.values,
            self.scales,
            self.zeros,
            self.outer_scale,
            self.group_index,
            self.bias,
            *self.others,
        )
        return [part for part in parts if part is not None]

    def mismatch(self, shape: tuple[int, ...], transposed: bool = False) -> str:
        """Return how the tensors do not match a weight of `shape`; empty if they do.

        transposed: `shape` is [..., K, N]. This matters for the plain layout alone.
        """
        if len(shape) < 2:
            return f"{self.values} is quantized, but config.json implies a vector {list(shape)}"
        scales_shape = self.format.scales_shape(shape, transposed)
        values_shape = self.format.values_shape(shape, transposed)
        if self.values.shape != values_shape:
            return (
                f"{self.values} has shape {list(self.values.shape)}, config.json implies "
                f"{list(values_shape)}"
            )
        if self.format.layout == "ggml":
            return ""  # GGUF's blocks contain their scales
        dtypes: tuple[str, ...] = _FLOATS
        if self.format.kind in ("fp8", "fp4"):
            dtypes += _E8M0
        if self.format.kind == "fp4":
            dtypes += ("F8_E4M3",)
        has_right_shape = _squeezed(self.scales.shape) == _squeezed(scales_shape)
        if not has_right_shape or self.scales.dtype not in dtypes:
            return (
                f"{self.scales} is {self.scales.dtype} {list(self.scales.shape)}; supported: "
                f"{list(scales_shape)} scales in {', '.join(dtypes)}"
            )
        return self._companion_mismatch(shape, transposed)

    def _companion_mismatch(self, shape: tuple[int, ...], transposed: bool) -> str:
        """Return how zero points, outer scale or group index do not match; empty if they do."""
        lead = shape[:-2]
        depth = shape[-2 if transposed else -1]
        zeros_shape = self.format.zeros_shape(shape, transposed)
        if self.zeros is None:
            has_right_zeros = not self.format.zeros
        else:
            has_right_zeros = (self.zeros.dtype, self.zeros.shape) == ("I32", zeros_shape)
        if not has_right_zeros:
            return f"{self.values} needs a tensor of zero points, I32 {list(zeros_shape)}"
        if self.scales.dtype == "F8_E4M3" and self.outer_scale is None:
            return (
                f"{self.scales} is F8_E4M3, and its outer scale (_scale_2 or _global_scale) is "
                "missing"
            )
        outer = self.outer_scale
        if outer and (outer.dtype not in _FLOATS or _size(outer) not in (1, math.prod(lead))):
            return (
                f"{outer} is {outer.dtype} {list(outer.shape)}; supported: "
                "one number for each matrix"
            )
        index = self.group_index
        if index and (index.dtype, index.shape) != ("I32", (depth,)):
            return f"{index} is {index.dtype} {list(index.shape)}; supported: I32 [{depth}]"
        return ""


def find_stored(
    tensors: Mapping[str, TensorInfo], formats: Sequence[StoredFormat]
) -> dict[str, StoredWeight]:
    """Return the quantized weights, by the names that they have in an unquantized checkpoint.

    Raises CheckpointError for a weight without scales, or one that is also present unquantized.
    """
    weights: dict[str, StoredWeight] = {}
    for name, tensor in tensors.items():
        suffix = next((suffix for suffix in _VALUES_SUFFIXES if name.endswith(suffix)), "")
        base = name.removesuffix(suffix) + _VALUES_SUFFIXES.get(suffix, "")
        candidates = list(_candidates(tensors, tensor, suffix, base, formats))
        if not candidates:
            continue
        if base in weights or (suffix and base in tensors):
            raise CheckpointError(
                f"{tensor} is there as {base!r}, too; remove the one that does not belong to the "
                "model"
            )
        weights[base] = _choose(base, candidates)
    return weights


def _candidates(
    tensors: Mapping[str, TensorInfo],
    values: TensorInfo,
    suffix: str,
    base: str,
    formats: Sequence[StoredFormat],
) -> Iterator[StoredWeight]:
    """Yield the weight with these values once for each format that the values may have.

    suffix: the one of `_VALUES_SUFFIXES` that the values' name has; "" if it has none.
    base: the unquantized weight's name.
    """
    if len(values.shape) < 2 or values.name.endswith(
        (*_SCALE_SUFFIXES, *_OUTER_SCALE_SUFFIXES, ".scale", "_scales", "_zero_point", "_shape")
    ):
        return
    module = base.removesuffix("weight")
    for stored_format in formats:
        suffixes = _SUFFIXES_OF_LAYOUT[stored_format.layout]
        if values.dtype not in stored_format.values_dtypes or suffix not in suffixes:
            continue
        if suffix == ".qweight":
            scales_names: tuple[str, ...] = (module + "scales",)
        elif suffix == "_blocks":
            scales_names = (base + "_scales",)
        else:
            scales_names = (
                module + "scale",
                module + "qscale_weight",
                *(base + end for end in _SCALE_SUFFIXES),
            )
        scales = next((tensors[name] for name in scales_names if name in tensors), None)
        if scales is None:
            raise CheckpointError(
                f"{values} is {values.dtype}, but {scales_names[-1]} is missing; download the "
                "model again"
            )
        # GPTQ and AWQ have zero points even for symmetric weights.
        is_gptq_or_awq = suffix == ".qweight"
        is_gptq = stored_format.layout in ("gptq", "gptq_v2")
        zeros = tensors.get(module + "qzeros" if is_gptq_or_awq else base + "_zero_point")
        outer_names = [base + end for end in _OUTER_SCALE_SUFFIXES]
        yield StoredWeight(
            format=stored_format,
            values=values,
            scales=scales,
            zeros=zeros if stored_format.zeros or is_gptq_or_awq else None,
            outer_scale=next((tensors[name] for name in outer_names if name in tensors), None),
            group_index=tensors.get(module + "g_idx") if is_gptq else None,
            bias=tensors.get(module + "bias") if is_gptq_or_awq else None,
            others=tuple(
                tensors[prefix + end]
                for end in _UNUSED_SUFFIXES
                for prefix in {base, module}
                if prefix + end in tensors
            ),
        )


_SUFFIXES_OF_LAYOUT = {  # layout -> suffixes of the tensor with the values
    "plain": ("",),
    "words": ("_packed",),
    "nibbles": ("", "_packed"),
    "blocks": ("_blocks",),
    "awq": (".qweight",),
    "gptq": (".qweight",),
    "gptq_v2": (".qweight",),
}


def _choose(base: str, candidates: list[StoredWeight]) -> StoredWeight:
    """Return the candidate whose shapes match each other.

    If several match, return the one whose format's `targets` name the module, or else the first.
    """
    if len(candidates) == 1:
        return candidates[0]
    matching = [stored for stored in candidates if not stored.mismatch(_unquantized_shape(stored))]
    matching = matching or candidates
    module = base.removesuffix(".weight")
    for stored in matching:
        if any(_is_target(target, module) for target in stored.format.targets):
            return stored
    return matching[0]


def _unquantized_shape(stored: StoredWeight) -> tuple[int, ...]:
    """Return the weight's unquantized shape, provided that packing did not pad it."""
    shape = stored.values.shape
    weights_per_element = stored.format.weights_per_element
    if stored.format.layout == "blocks":
        shape = (*shape[:-2], math.prod(shape[-2:]))
    *lead, rows, columns = shape
    if stored.format.layout == "awq":  # [K, N / 8]
        return columns * weights_per_element, rows
    if stored.format.inputs_first:  # [K / 8 or 4, N]
        return columns, rows * weights_per_element
    return *lead, rows, columns * weights_per_element


def _is_target(target: str, module: str) -> bool:
    """Return whether an entry of `targets`, a name or "re:PATTERN", matches a module."""
    with CheckpointError.instead_of(
        re.error, f"quantization_config: targets has the pattern {target!r}"
    ):
        if target.startswith("re:"):
            return re.match(target.removeprefix("re:"), module) is not None
        return target == module


def _size(tensor: TensorInfo) -> int:
    return math.prod(tensor.shape)


def _squeezed(shape: Sequence[int]) -> list[int]:
    """Return the shape without sizes of 1, which some writers omit and some add."""
    return [size for size in shape if size != 1]


def with_shape(tensor: TensorInfo, *shape: int) -> TensorInfo:
    """Return the tensor with `shape`, which may differ in dimensions of size 1."""
    assert _size(tensor) == math.prod(shape), (tensor, shape)
    return replace(tensor, shape=shape)
