"""Quantised weights of a checkpoint: the tensors that make up each of them. No torch here.

N outputs, K inputs, R x C scales. A weight `x.weight` lies in the file as

    x.weight, or x.weight_packed    int8 or e4m3 [N, K], or words of 32 bits [N, K / 8 or 4], first inputs lowest
    x.weight_scale (_inv)           [R, C]; R is 1, N or a block's share of N, C likewise of K
    x.weight_zero_point             words of eight outputs [N / 8, C], if int4 is not symmetric

Two more tensors are not needed: x.weight_shape, which config.json implies, and x.input_scale, for quantised
activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeserve.errors import CheckpointError
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.spec import StoredFormat

_SCALE_DTYPES = ("F32", "BF16", "F16")
_SCALES = ("_scale_inv", "_scale")


@dataclass(frozen=True, slots=True)
class Stored:
    """One quantised weight in the files. others: tensors that belong to it and are not needed."""

    form: StoredFormat
    values: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None
    others: tuple[TensorInfo, ...]

    @property
    def parts(self) -> list[TensorInfo]:
        """All tensors of the weight, the values first."""
        return [part for part in (self.values, self.scales, self.zeros, *self.others) if part is not None]

    def mismatch(self, shape: tuple[int, ...]) -> str:
        """Returns what is wrong with the headers for a weight of `shape`; empty if nothing is."""
        rows, depth = shape[-2:]
        per_word = (8 if self.form.kind == "int4" else 4) if self.form.packed else 1
        scale_rows, scale_columns = self.form.scale_shape(shape)
        zeros = (*shape[:-2], -(-rows // 8), scale_columns)
        scales = [*shape[:-2], scale_rows, scale_columns]
        if self.values.shape != (found := (*shape[:-1], -(-depth // per_word))):
            return f"{place(self.values)} has shape {list(self.values.shape)}, config.json implies {list(found)}"
        if _wide(self.scales.shape) != _wide(scales) or self.scales.dtype not in _SCALE_DTYPES:
            what = f"{self.scales.dtype} {list(self.scales.shape)}"
            return f"{place(self.scales)} is {what}; supported: {scales} scales in {', '.join(_SCALE_DTYPES)}"
        if self.form.zeros and (self.zeros is None or (self.zeros.dtype, self.zeros.shape) != ("I32", zeros)):
            return f"{place(self.values)} needs zero points, I32 {list(zeros)}, beside it"
        return ""


def find_stored(tensors: Mapping[str, TensorInfo], form: StoredFormat) -> dict[str, Stored]:
    """Returns the quantised weights among `tensors`, by the names that they would have unquantised.

    Raises CheckpointError where one has no scales, or is present unquantised as well.
    """
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype != form.values_dtype or (form.packed and not name.endswith("_packed")):
            continue
        if name.endswith(("_zero_point", "_shape")):
            continue
        base = name.removesuffix("_packed") if form.packed else name
        if form.packed and base in tensors:
            raise CheckpointError(f"{place(tensor)} is there as {base!r}, too; only one of them can be meant")
        scales = next((tensors[base + end] for end in _SCALES if base + end in tensors), None)
        if scales is None:
            raise CheckpointError(f"{place(tensor)} is {tensor.dtype}, and there is no {base}_scale; download it again")
        module = base.removesuffix("weight")
        others = (base + "_shape", module + "input_scale", module + "input_zero_point")
        zeros = tensors.get(base + "_zero_point") if form.zeros else None
        found[base] = Stored(form, tensor, scales, zeros, tuple(tensors[n] for n in others if n in tensors))
    return found


def _wide(shape: Sequence[int]) -> list[int]:
    """Drops dimensions of size 1, which writers leave out or add."""
    return [size for size in shape if size != 1]


def place(tensor: TensorInfo) -> str:
    """Names a tensor and its file for an error."""
    return f"tensor {tensor.name!r} in {tensor.path.name}"
