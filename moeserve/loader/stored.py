"""The tensors of each quantised weight in a checkpoint, by their names, dtypes and shapes. No torch
here.

N outputs, K inputs, R x C scales: R is 1, N or a block's share of N, C likewise of K. Dimensions of
experts may come first. A weight that is `x.weight` in an unquantised checkpoint (y: its module
`x.`; or whole fused experts, without `.weight`) lies in the files as

    plain       x.weight           int8 or e4m3, laid out as unquantised: [N, K], or
                                   [K, N] with scales [C, R]
    words       x.weight_packed    words of 32 bits [N, K / 8 or 4], first inputs lowest
                x.weight_zero_point    words of eight outputs [N / 8, C], if int4 is not symmetric
    nibbles     x.weight or x.weight_packed    bytes [N, K / 2], first inputs lowest
    blocks      x.weight_blocks    bytes [N, C, 16], first inputs lowest; x.weight_scales [N, C]
    gptq        y.qweight          words [K / 8 or 4, N], first inputs lowest; y.scales [C, N]
                y.qzeros           words of outputs [C, N / 8 or 4]: zero points, less 1
                                   unless gptq_v2
                y.g_idx            each input's group
    awq         y.qweight          words of eight outputs [K, N / 8], lowest first
                                   0, 2, 4, 6, 1, 3, 5, 7
                y.qzeros           likewise [C, N / 8]; y.scales [C, N]

Other scales are x.weight_scale or x.weight_scale_inv: floats, or bytes of e8m0, or e4m3, times
x.weight_scale_2 (ModelOpt) or divided by x.weight_global_scale (compressed-tensors). What is said
of activations or of the shape is not needed.
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
_SCALES = ("_scale_inv", "_scale")
_OUTER = ("_scale_2", "_global_scale")  # the first multiplies, the second divides
_VALUES = {
    "_packed": "",
    "_blocks": "",
    ".qweight": ".weight",
}  # endings of values, and of the weight's own name
_UNUSED = (
    "_shape",
    "_activation_scale",
    "_input_scale",
    "input_scale",
    "input_zero_point",
    "activation_scale",
    "input_global_scale",
    "output_scale",
    "input_scale_ub",
)
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")  # for a cache in 8 bits


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One quantised weight in the files. outer: a scale of all scales. order: of the inputs, by
    groups. bias: of its module; writers of GPTQ add zeros where a model has none. others: tensors
    that belong to it and are not needed."""

    form: StoredFormat
    values: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None = None
    outer: TensorInfo | None = None
    order: TensorInfo | None = None
    bias: TensorInfo | None = None
    others: tuple[TensorInfo, ...] = field(default=())

    @property
    def parts(self) -> list[TensorInfo]:
        """All tensors of the weight, the values first."""
        parts = (
            self.values,
            self.scales,
            self.zeros,
            self.outer,
            self.order,
            self.bias,
            *self.others,
        )
        return [part for part in parts if part is not None]

    def mismatch(self, shape: tuple[int, ...], transposed: bool = False) -> str:
        """Returns what is wrong with the headers for a weight of `shape`; empty if nothing is.

        transposed: unquantised it would be [..., K, N], of which the fixed layouts know nothing.
        """
        if len(shape) < 2:
            return f"{self.values} is quantised, config.json implies a vector {list(shape)}"
        form = self.form
        scales = self.form.scales_shape(shape, transposed)
        if self.values.shape != (found := form.values_shape(shape, transposed)):
            return (
                f"{self.values} has shape {list(self.values.shape)}, config.json implies "
                f"{list(found)}"
            )
        if form.layout == "ggml":
            return ""
        dtypes = _FLOATS + (_E8M0 if form.kind in ("fp8", "fp4") else ())
        dtypes += ("F8_E4M3",) if form.kind == "fp4" else ()
        if _wide(self.scales.shape) != _wide(scales) or self.scales.dtype not in dtypes:
            what = f"{self.scales.dtype} {list(self.scales.shape)}"
            return (
                f"{self.scales} is {what}; supported: {list(scales)} scales in {', '.join(dtypes)}"
            )
        return self._odd_companion(shape, transposed)

    def _odd_companion(self, shape: tuple[int, ...], transposed: bool) -> str:
        lead = shape[:-2]
        depth = shape[-2 if transposed else -1]
        zeros = list(self.form.zeros_shape(shape, transposed))
        have = None if self.zeros is None else (self.zeros.dtype, list(self.zeros.shape))
        if have != (("I32", zeros) if self.form.zeros or have else None):
            return f"{self.values} needs zero points, I32 {zeros}, beside it"
        if self.scales.dtype == "F8_E4M3" and self.outer is None:
            return (
                f"{self.scales} is F8_E4M3, and there is no scale of all scales (_scale_2 or "
                "_global_scale) beside it"
            )
        if self.outer and (
            self.outer.dtype not in _FLOATS or _size(self.outer) not in (1, math.prod(lead))
        ):
            return (
                f"{self.outer} is {self.outer.dtype} {list(self.outer.shape)}; supported: "
                "one number for each matrix"
            )
        if self.order and (self.order.dtype, self.order.shape) != ("I32", (depth,)):
            return (
                f"{self.order} is {self.order.dtype} {list(self.order.shape)}; supported: "
                f"I32 [{depth}]"
            )
        return ""


def find_stored(
    tensors: Mapping[str, TensorInfo], formats: Sequence[StoredFormat]
) -> dict[str, StoredWeight]:
    """Returns the quantised weights among `tensors`, by the names that they would have unquantised.

    Raises CheckpointError where one has no scales, or is present unquantised as well.
    """
    found: dict[str, StoredWeight] = {}
    for name, tensor in tensors.items():
        ending = next((ending for ending in _VALUES if name.endswith(ending)), "")
        base = name.removesuffix(ending) + _VALUES.get(ending, "")
        stored = list(_candidates(tensors, tensor, ending, base, formats))
        if not stored:
            continue
        if base in found or (ending and base in tensors):
            raise CheckpointError(
                f"{tensor} is there as {base!r}, too; only one of them can be meant"
            )
        found[base] = _choose(base, stored)
    return found


def _candidates(
    tensors: Mapping[str, TensorInfo],
    values: TensorInfo,
    ending: str,
    base: str,
    formats: Sequence[StoredFormat],
) -> Iterator[StoredWeight]:
    """Yields a weight as each format has it whose values these may be."""
    if len(values.shape) < 2 or values.name.endswith(
        (*_SCALES, *_OUTER, "_scales", "_zero_point", "_shape")
    ):
        return
    module = base.removesuffix("weight")
    for form in formats:
        if values.dtype != form.values_dtype or ending not in _ENDINGS[form.layout]:
            continue
        scales_names = {".qweight": (module + "scales",), "_blocks": (base + "_scales",)}.get(
            ending, tuple(base + end for end in _SCALES)
        )
        scales = next((tensors[name] for name in scales_names if name in tensors), None)
        if scales is None:
            raise CheckpointError(
                f"{values} is {values.dtype}, and there is no {scales_names[-1]}; download it again"
            )
        gptq_like = ending == ".qweight"  # which has zero points even where they are all the same
        zeros = tensors.get(module + "qzeros" if gptq_like else base + "_zero_point")
        outer = next((tensors[base + end] for end in _OUTER if base + end in tensors), None)
        order = tensors.get(module + "g_idx") if form.layout.startswith("gptq") else None
        others = tuple(
            tensors[at + end] for end in _UNUSED for at in {base, module} if at + end in tensors
        )
        bias = tensors.get(module + "bias") if gptq_like else None
        yield StoredWeight(
            form,
            values,
            scales,
            zeros if form.zeros or gptq_like else None,
            outer,
            order,
            bias,
            others,
        )


_ENDINGS = {
    "plain": ("",),
    "words": ("_packed",),
    "nibbles": ("", "_packed"),
    "blocks": ("_blocks",),
    "awq": (".qweight",),
    "gptq": (".qweight",),
    "gptq_v2": (".qweight",),
}


def _choose(base: str, candidates: list[StoredWeight]) -> StoredWeight:
    """Returns the weight in the format that its shapes agree with; of several the one whose targets
    name its module.
    """
    if len(candidates) == 1:
        return candidates[0]
    fitting = [
        stored for stored in candidates if not stored.mismatch(_shape_of(stored))
    ] or candidates
    module = base.removesuffix(".weight")
    return next(
        (s for s in fitting if any(_names(target, module) for target in s.form.targets)), fitting[0]
    )


def _shape_of(stored: StoredWeight) -> tuple[int, ...]:
    """The shape that a weight has in the format, if its own is in none of the rounded sizes."""
    shape = stored.values.shape
    each = stored.form.per_element
    *lead, rows, depth = (
        shape if stored.form.layout != "blocks" else (*shape[:-2], math.prod(shape[-2:]))
    )
    if stored.form.layout == "awq":
        return depth * each, rows
    return (depth, rows * each) if stored.form.inputs_first else (*lead, rows, depth * each)


def _names(target: str, module: str) -> bool:
    """Whether an entry of `targets` names a module: itself, or a pattern behind "re:"."""
    with CheckpointError.instead_of(
        re.error, f"quantization_config: targets has the pattern {target!r}"
    ):
        return (
            re.match(target[3:], module) is not None
            if target.startswith("re:")
            else target == module
        )


def _size(tensor: TensorInfo) -> int:
    return math.prod(tensor.shape)


def _wide(shape: Sequence[int]) -> list[int]:
    """Drops dimensions of size 1, which writers leave out or add."""
    return [size for size in shape if size != 1]


def logical(tensor: TensorInfo, *shape: int) -> TensorInfo:
    """Returns the tensor with dimensions of size 1 added or dropped."""
    assert _size(tensor) == math.prod(shape), (tensor, shape)
    return replace(tensor, shape=shape)
