"""The format of quantised weights in a checkpoint's files. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from moeserve.config import Activations

if TYPE_CHECKING:
    from moeserve.ops.quantised import Kind
_BITS = {"int8": 8, "fp8": 8, "int4": 4, "fp4": 4, "iq4_nl": 4}  # of a weight without scales
_MOST_GROUP = 128  # of int4 weights: GPUs have the scales of larger groups several times


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """How quantised weights of N outputs and K inputs lie in the files; names and shapes are at
    loader/stored.py.

    kind: of the values; fp8 is e4m3, fp4 is e2m1. layout: `plain` one byte each; `words` of
    compressed-tensors; `awq` (its version gemm), `gptq` and `gptq_v2` words; two values of fp4 in a
    byte, in rows (`nibbles`) or in groups of 32 (`blocks`); `ggml` blocks of the type `ggml`, each
    with its scales. rows, group: outputs and inputs that share a scale, 0 for all. zeros: with zero
    points. activations: the config quantises them, too, which not all kernels do. targets: the
    modules that have this format, where another group of the same config has another one. mins,
    supers, bits, scales (their dtype): of ggml's types, see `Quantised`.
    """

    kind: "Kind"
    layout: Literal["plain", "words", "awq", "gptq", "gptq_v2", "nibbles", "blocks", "ggml"] = (
        "plain"
    )
    rows: int = 1
    group: int = 0
    zeros: bool = False
    activations: bool = False
    targets: tuple[str, ...] = ()
    ggml: str = ""
    mins: bool = False
    supers: bool = False
    bits: int = 0
    scales: Literal["F32", "BF16", "F16"] = "F32"

    @property
    def values_dtype(self) -> str:
        """The dtype of the values as safetensors spells it."""
        if self.layout == "plain":
            return "F8_E4M3" if self.kind == "fp8" else "I8"
        return "U8" if self.kind == "fp4" else "I32"

    @property
    def per_element(self) -> int:
        """Weights in one element of the file."""
        return {"I32": 4, "U8": 1}.get(self.values_dtype, 1) * (
            2 if self.kind in ("int4", "fp4") else 1
        )

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight in memory, scales included. int4 in groups of 64 -> 0.5625"""
        group = min(self.group or _MOST_GROUP, _MOST_GROUP) if self.kind == "int4" else self.group
        scale = (
            1 + group / 128 if self.supers else 4 if self.scales == "F32" else 2
        )  # fp16 for 256 inputs, and bytes
        heads = scale * (1 + self.mins) + 4 * self.zeros
        return (self.bits or _BITS[self.kind]) / 8 + (heads / group if group else 0.0)

    @property
    def inputs_first(self) -> bool:
        """Whether scales are [C, N]."""
        return self.layout in ("awq", "gptq", "gptq_v2")

    def turned(self, transposed: bool) -> bool:
        """Whether values and scales are [K, N] and [C, R]. transposed: the unquantised weight would
        be [K, N].
        """
        return transposed and self.layout == "plain"

    def values_shape(self, shape: tuple[int, ...], transposed: bool = False) -> tuple[int, ...]:
        """The shape of the values of a weight that would be `shape` unquantised. gptq, [64, 32] ->
        [4, 64]
        """
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
        """Likewise of the scales, but for dimensions of size 1. gptq in groups of 8, [64, 32] ->
        [4, 64]
        """
        lead = shape[:-2]
        sizes = shape[:-3:-1] if transposed else shape[-2:]
        rows, columns = self.scale_shape(sizes)
        return (
            (*lead, columns, rows)
            if self.turned(transposed) or self.inputs_first
            else (*lead, rows, columns)
        )

    def zeros_shape(self, shape: tuple[int, ...], transposed: bool = False) -> tuple[int, ...]:
        """Likewise of the words of zero points."""
        lead, (rows, depth) = shape[:-2], shape[:-3:-1] if transposed else shape[-2:]
        words = -(-rows // self.per_element)
        groups = self.scale_shape((rows, depth))[1]
        return (groups, words) if self.inputs_first else (*lead, words, groups)

    def rows_as(self, asked: Activations) -> Literal["float", "int8"]:
        """What rows are before a product. asked: the setting; auto follows the config where weights
        are int8, too, and llama.cpp, which rounds rows for all of ggml's types."""
        rounds = self.layout == "ggml" or (self.activations and self.kind == "int8")
        return "int8" if asked == "int8" or (asked == "auto" and rounds) else "float"

    @property
    def for_floats(self) -> "StoredFormat | None":
        """The format where rows stay floats: without codes, and scales are fp32; None with minima,
        which integers alone can have."""
        kind: Kind = "int8" if self.kind == "iq4_nl" else self.kind
        return None if self.mins else replace(self, kind=kind, supers=False, bits=0, scales="F32")

    def rows_obstacle(self, inputs: int) -> str:
        """Returns why rows cannot be int8 for weights with so many inputs; empty if they can."""
        group = self.group or (-(-inputs // 8) * 8 if self.kind == "int4" else 0)
        if self.kind in ("int8", "int4") and (group == 16 or group % 32 == 0):
            return ""
        if self.kind in ("fp4", "iq4_nl") and group == 32:
            return ""
        return (
            "activations=int8 takes int8 and int4 in groups of 16 or 32 n inputs, and fp4 in "
            "groups of 32"
        )

    @property
    def described(self) -> str:
        """What parts of a weight must have in common: "int4 in groups of 64 with zero points"."""
        groups = f" in groups of {self.group}" if self.group else ""
        return f"{self.kind}{groups}{' with zero points' if self.zeros else ''}"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The numbers of scales along the outputs and the inputs of a weight [..., N, K]."""
        sizes = zip(shape[-2:], (self.rows, self.group), strict=True)
        rows, columns = (-(-size // step) if step else 1 for size, step in sizes)
        return rows, columns


def _ggml(name: str, kind: "Kind", group: int = 32, **more: Any) -> StoredFormat:
    return StoredFormat(kind=kind, layout="ggml", group=group, ggml=name, **more)


GGML_FORMATS = {
    form.ggml: form
    for form in (
        _ggml("Q4_0", "int4", scales="F16"),
        _ggml("Q4_1", "int4", scales="F16", mins=True),
        _ggml("Q5_0", "int8", scales="F16", bits=5),
        _ggml("Q5_1", "int8", scales="F16", bits=5, mins=True),
        _ggml("Q8_0", "int8", scales="F16"),
        _ggml("Q4_K", "int4", supers=True, mins=True),
        _ggml("Q5_K", "int8", supers=True, mins=True, bits=5),
        _ggml("Q6_K", "int8", 16, supers=True, bits=6),
        _ggml("MXFP4", "fp4", scales="BF16"),
        _ggml("IQ4_NL", "iq4_nl", scales="F16"),
        _ggml("IQ4_XS", "iq4_nl", supers=True),
    )
}


def common_format(
    forms: Sequence[StoredFormat | None], linear: bool, asked: Activations = "auto"
) -> StoredFormat | None:
    """Returns the format of a parameter whose parts have these in the files (None: not quantised);
    None: it is not.

    linear: whether products read it. asked: the setting. int8 in small groups, with minima if need
    be, holds all values of ggml's types. Parts of other layouts are alike (`check_plan`).
    """
    first = forms[0] if forms else None
    known = [form for form in forms if form is not None]
    if not any(form.layout == "ggml" for form in known):
        return first
    if not linear or len(known) < len(forms):
        return None
    form = known[0]
    if len(set(known)) > 1:
        form = _ggml(
            "", "int8", min(form.group for form in known), mins=any(form.mins for form in known)
        )
    return form if form.rows_as(asked) == "int8" else form.for_floats
