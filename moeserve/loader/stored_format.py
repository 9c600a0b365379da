"""The format of quantised weights in a checkpoint's files. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moeserve.config import Activations

_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5, "fp4": 0.5}  # of a weight without scales
_MOST_GROUP = 128  # of int4 weights: GPUs have the scales of larger groups several times


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """How quantised weights of N outputs and K inputs lie in the files; names and shapes are at loader/stored.py.

    kind: of the values; fp8 is e4m3, fp4 is e2m1. layout: `plain` one byte each; `words` of compressed-tensors;
    `awq` (its version gemm), `gptq` and `gptq_v2` words; two values of fp4 in a byte, in rows (`nibbles`) or in groups
    of 32 (`blocks`); `ggml` blocks of the type `ggml`, each with its scales. rows, group: outputs and inputs that share
    a scale, 0 for all. zeros: with zero points.
    activations: the config quantises them, too, which not all kernels do. targets: the modules that have this format,
    where another group of the same config has another one. widened: kernels do not know it, so it becomes 16 or 32
    bits on loading.
    """

    kind: Literal["int8", "int4", "fp8", "fp4"]
    layout: Literal["plain", "words", "awq", "gptq", "gptq_v2", "nibbles", "blocks", "ggml"] = "plain"
    rows: int = 1
    group: int = 0
    zeros: bool = False
    activations: bool = False
    targets: tuple[str, ...] = ()
    ggml: str = ""
    widened: bool = False

    @property
    def values_dtype(self) -> str:
        """The dtype of the values as safetensors spells it."""
        if self.layout == "plain":
            return "F8_E4M3" if self.kind == "fp8" else "I8"
        return "U8" if self.kind == "fp4" else "I32"

    @property
    def per_element(self) -> int:
        """Weights in one element of the file."""
        return {"I32": 4, "U8": 1}.get(self.values_dtype, 1) * (2 if self.kind in ("int4", "fp4") else 1)

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight in memory, scales included. int4 in groups of 64 -> 0.5625"""
        if self.widened:
            return 2.0
        group = min(self.group or _MOST_GROUP, _MOST_GROUP) if self.kind == "int4" else self.group
        return _BYTES[self.kind] + ((8 if self.zeros else 4) / group if group else 0.0)

    @property
    def inputs_first(self) -> bool:
        """Whether scales are [C, N]."""
        return self.layout in ("awq", "gptq", "gptq_v2")

    def turned(self, transposed: bool) -> bool:
        """Whether values and scales are [K, N] and [C, R]. transposed: the unquantised weight would be [K, N]."""
        return transposed and self.layout == "plain"

    def values_shape(self, shape: tuple[int, ...], transposed: bool = False) -> tuple[int, ...]:
        """The shape of the values of a weight that would be `shape` unquantised. gptq, [64, 32] -> [4, 64]"""
        if self.turned(transposed) or self.layout == "ggml":
            return shape
        lead, (rows, depth) = shape[:-2], shape[:-3:-1] if transposed else shape[-2:]
        if self.layout == "awq":
            return depth, -(-rows // self.per_element)
        if self.inputs_first:
            return -(-depth // self.per_element), rows
        if self.layout == "blocks":
            return *lead, rows, -(-depth // 32), 16
        return *lead, rows, -(-depth // self.per_element)

    def scales_shape(self, shape: tuple[int, ...], transposed: bool = False) -> tuple[int, ...]:
        """Likewise of the scales, but for dimensions of size 1. gptq in groups of 8, [64, 32] -> [4, 64]"""
        lead, sizes = shape[:-2], shape[:-3:-1] if transposed else shape[-2:]
        rows, columns = self.scale_shape(sizes)
        return (*lead, columns, rows) if self.turned(transposed) or self.inputs_first else (*lead, rows, columns)

    def zeros_shape(self, shape: tuple[int, ...], transposed: bool = False) -> tuple[int, ...]:
        """Likewise of the words of zero points."""
        lead, (rows, depth) = shape[:-2], shape[:-3:-1] if transposed else shape[-2:]
        words, groups = -(-rows // self.per_element), self.scale_shape((rows, depth))[1]
        return (groups, words) if self.inputs_first else (*lead, words, groups)

    def rows_as(self, asked: Activations) -> Literal["float", "int8"]:
        """What rows are before a product. asked: the setting; auto follows the config where weights are int8, too."""
        rounds = asked == "int8" or (asked == "auto" and (self.activations and self.kind == "int8"))
        return "int8" if rounds else "float"

    def rows_obstacle(self, inputs: int) -> str:
        """Returns why rows cannot be int8 for weights with so many inputs; empty if they can."""
        group = self.group or (-(-inputs // 8) * 8 if self.kind == "int4" else 0)
        if self.kind in ("int8", "int4") and (group == 16 or group % 32 == 0):
            return ""
        if self.kind == "fp4" and group == 32:
            return ""
        return "activations=int8 takes int8 and int4 in groups of 16 or 32 n inputs, and fp4 in groups of 32"

    @property
    def described(self) -> str:
        """What parts of a weight must have in common: "int4 in groups of 64 with zero points"."""
        return f"{self.kind}{f' in groups of {self.group}' * bool(self.group)}{' with zero points' * self.zeros}"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The numbers of scales along the outputs and the inputs of a weight [..., N, K]."""
        sizes = zip(shape[-2:], (self.rows, self.group), strict=True)
        rows, columns = (-(-size // step) if step else 1 for size, step in sizes)
        return rows, columns


def _ggml(name: str, kind: Literal["int8", "int4", "fp4"], group: int = 32, *, widened: bool = False) -> StoredFormat:
    return StoredFormat(kind=kind, layout="ggml", group=group, ggml=name, widened=widened)


GGML_FORMATS = {  # those with a minimum beside each scale are widened
    form.ggml: form
    for form in (
        _ggml("Q4_0", "int4"), _ggml("Q4_1", "int4", widened=True), _ggml("Q5_0", "int8"),
        _ggml("Q5_1", "int8", widened=True), _ggml("Q8_0", "int8"), _ggml("Q4_K", "int4", widened=True),
        _ggml("Q5_K", "int8", widened=True), _ggml("Q6_K", "int8", 16), _ggml("MXFP4", "fp4"),
        _ggml("IQ4_NL", "int8"), _ggml("IQ4_XS", "int8"),
    )
}  # fmt: skip


def common_format(forms: Sequence[StoredFormat | None], linear: bool) -> StoredFormat | None:
    """Returns the format of a parameter whose parts have these in the files (None: not quantised); None: it is not.

    linear: whether products read it. int8 in small groups holds all values of ggml's types. Parts of other layouts are
    alike (`check_plan`).
    """
    first = forms[0] if forms else None
    known = [form for form in forms if form is not None]
    if not any(form.layout == "ggml" for form in known):
        return first
    if not linear or len(known) < len(forms) or any(form.widened for form in known):
        return None
    return first if len(set(known)) == 1 else _ggml("", "int8", min(form.group for form in known))
