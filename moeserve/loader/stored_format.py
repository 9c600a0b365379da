"""Descriptions of the formats of quantized weights in checkpoints. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from moeserve.config import Activations

if TYPE_CHECKING:
    from moeserve.ops.quantized import Kind
_BITS = {"int8": 8, "fp8": 8, "int4": 4, "fp4": 4}  # per weight, without scales
# Largest group of int4 weights in memory: GPU kernels repeat the scales of larger groups.
_MAX_GROUP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """The format of quantized weights with N outputs and K inputs in a checkpoint's files.

    | layout | values |
    |---|---|
    | plain | one byte per weight |
    | words | compressed-tensors: 4 or 8 weights per int32 |
    | awq, gptq, gptq_v2 | 4 or 8 weights per int32 (AWQ: its version gemm) |
    | nibbles | two fp4 weights per byte, in rows |
    | blocks | two fp4 weights per byte, in groups of 32 |
    | ggml | GGUF: blocks of the type `ggml` with their scales |

    Names and shapes of the tensors are listed in loader/stored.py.
    """

    kind: "Kind"  # of the values; fp8 is e4m3, fp4 is e2m1
    layout: Literal["plain", "words", "awq", "gptq", "gptq_v2", "nibbles", "blocks", "ggml"] = (
        "plain"
    )
    rows: int = 1  # outputs that share a scale; 0: all
    group: int = 0  # inputs that share a scale; 0: all
    zeros: bool = False  # with zero points
    activations: bool = False  # the config quantizes activations, too; not all kernels do
    targets: tuple[str, ...] = ()  # modules with this format, if the config has several formats
    ggml: str = ""  # the ggml type
    # For ggml types, see `Quantized`:
    mins: bool = False  # with mins
    supers: bool = False  # with super-scales
    super_factor: float = 1.0
    bits: int = 0  # of int8 values, or of codes
    codes: tuple[int, ...] = ()
    scales: Literal["F32", "BF16", "F16"] = "F32"  # dtype in which the scales are exact

    @property
    def values_dtype(self) -> str:
        """The dtype of the values, in safetensors' spelling."""
        if self.layout == "plain":
            return "F8_E4M3" if self.kind == "fp8" else "I8"
        return "U8" if self.kind == "fp4" else "I32"

    @property
    def values_dtypes(self) -> tuple[str, ...]:
        """The dtypes that the values may have. The bytes of DeepSeek-V4's fp4 pairs are signed."""
        return ("U8", "I8") if self.layout == "nibbles" else (self.values_dtype,)

    @property
    def weights_per_element(self) -> int:
        """The number of weights in one element of the values' tensor."""
        bytes_per_element = 4 if self.values_dtype == "I32" else 1
        weights_per_byte = 2 if self.kind in ("int4", "fp4") else 1
        return bytes_per_element * weights_per_byte

    @property
    def bytes_per_weight(self) -> float:
        """The bytes of a weight in memory, including its scales. int4 in groups of 64 -> 0.5625.

        The 0.5625 bytes are half a byte for the value, and 4 bytes of fp32 scale for 64 weights.
        """
        group = min(self.group or _MAX_GROUP, _MAX_GROUP) if self.kind == "int4" else self.group
        bytes_per_value = (self.bits or _BITS[self.kind]) / 8
        if not group:  # one scale for all inputs, whose bytes are negligible
            return bytes_per_value
        if self.supers:
            # One byte for the group, and its share of a super-scale: two bytes for 256 inputs
            bytes_per_scale = 1 + 2 * group / 256
        else:
            bytes_per_scale = 4 if self.scales == "F32" else 2
        scales_per_group = 2 if self.mins else 1  # a min has as many bytes as a scale
        bytes_per_zero = 4 if self.zeros else 0
        return bytes_per_value + (bytes_per_scale * scales_per_group + bytes_per_zero) / group

    @property
    def inputs_first(self) -> bool:
        """Whether the scales are [C, N] and not [N, C]."""
        return self.layout in ("awq", "gptq", "gptq_v2")

    def stores_transposed(self, transposed: bool) -> bool:
        """Return whether the files have values as [K, N], and scales as [C, R].

        transposed: whether the unquantized weight is [K, N]. Only the layout `plain` keeps that.
        """
        return transposed and self.layout == "plain"

    def values_shape(self, shape: tuple[int, ...], transposed: bool = False) -> tuple[int, ...]:
        """Return the shape of the values of a weight with the unquantized shape `shape`.

        transposed: `shape` is [..., K, N]. For example gptq, [64, 32] -> [4, 64].
        """
        if self.stores_transposed(transposed) or self.layout == "ggml":
            return shape
        lead = shape[:-2]
        rows, depth = _outputs_and_inputs(shape, transposed)
        if self.layout == "awq":
            return depth, -(-rows // self.weights_per_element)
        if self.inputs_first:
            return -(-depth // self.weights_per_element), rows
        if self.layout == "blocks":
            return *lead, rows, -(-depth // 32), 16
        return *lead, rows, -(-depth // self.weights_per_element)

    def scales_shape(self, shape: tuple[int, ...], transposed: bool = False) -> tuple[int, ...]:
        """Return the shape of the scales of a weight with the unquantized shape `shape`.

        The files may omit or add dimensions of size 1. transposed: as in `values_shape`. For
        example gptq in groups of 8, [64, 32] -> [4, 64].
        """
        lead = shape[:-2]
        rows, columns = self.num_scales(_outputs_and_inputs(shape, transposed))
        if self.stores_transposed(transposed) or self.inputs_first:
            return *lead, columns, rows
        return *lead, rows, columns

    def zeros_shape(self, shape: tuple[int, ...], transposed: bool = False) -> tuple[int, ...]:
        """Return the shape of the packed zero points of a weight.

        shape, transposed: as in `values_shape`.
        """
        lead = shape[:-2]
        rows, depth = _outputs_and_inputs(shape, transposed)
        words = -(-rows // self.weights_per_element)
        groups = self.num_scales((rows, depth))[1]
        return (groups, words) if self.inputs_first else (*lead, words, groups)

    def activation_format(self, setting: Activations) -> Literal["float", "int8"]:
        """Return the format to which activations are converted before a product.

        With `auto`, it is int8 for all ggml types, as in llama.cpp, and for int8 weights if the
        config quantizes activations. In all other cases, activations stay floats.
        """
        if setting == "auto":
            is_int8 = self.layout == "ggml" or (self.activations and self.kind == "int8")
        else:
            is_int8 = setting == "int8"
        return "int8" if is_int8 else "float"

    @property
    def for_float_activations(self) -> "StoredFormat | None":
        """The format of a ggml type for kernels with float activations.

        Codes become int8, and scales fp32. None for types with mins, which these kernels do not
        support.
        """
        if self.mins:
            return None
        kind: Kind = "int8" if self.kind == "codes" else self.kind
        return replace(
            self, kind=kind, supers=False, super_factor=1.0, bits=0, codes=(), scales="F32"
        )

    def int8_activations_obstacle(self, inputs: int) -> str:
        """Return why int8 activations are unsupported for these weights; empty if supported."""
        group = self.group
        if self.kind == "int4" and not group:
            group = -(-inputs // 8) * 8  # all inputs are one group, as in loader/weights.py
        if self.kind in ("int8", "int4") and (group == 16 or group % 32 == 0):
            return ""
        if self.kind in ("fp4", "codes") and group in (16, 32):
            return ""
        return (
            "activations=int8 supports int8 and int4 in groups of 16 inputs or a multiple of 32, "
            "and fp4 in groups of 16 or 32"
        )

    @property
    def description(self) -> str:
        """The properties that parts of a parameter must share: "int4 in groups of 64"."""
        groups = f" in groups of {self.group}" if self.group else ""
        return f"{self.kind}{groups}{' with zero points' if self.zeros else ''}"

    def num_scales(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of scales along outputs and inputs of a weight [..., N, K]."""
        num_outputs, num_inputs = shape[-2:]
        rows = -(-num_outputs // self.rows) if self.rows else 1
        columns = -(-num_inputs // self.group) if self.group else 1
        return rows, columns


def _outputs_and_inputs(shape: tuple[int, ...], transposed: bool) -> tuple[int, int]:
    """Return N and K of a weight [..., N, K], or [..., K, N] if `transposed`."""
    first, second = shape[-2:]
    return (second, first) if transposed else (first, second)


def _ggml(name: str, kind: "Kind", group: int = 32, **more: Any) -> StoredFormat:
    return StoredFormat(kind=kind, layout="ggml", group=group, ggml=name, **more)


# The numbers of ggml's types with codes. The upper bit of IQ3 and IQ2 is the sign.
IQ4_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ3_XXS_CODES = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
IQ3_S_CODES = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
IQ2_CODES = (8, 25, 43, 0, -8, -25, -43, 0)
# 8 times -1, 0 or 1, plus 1 for the first three and minus 1 for the last three
IQ1_CODES = (-7, 1, 9, 0, -9, -1, 7, 0)


def _iq(name: str, group: int = 32, **more: Any) -> StoredFormat:
    return _ggml(name, "codes", group=group, supers=True, **more)


GGML_FORMATS = {
    ggml_format.ggml: ggml_format
    for ggml_format in (
        _ggml("Q4_0", "int4", scales="F16"),
        _ggml("Q4_1", "int4", scales="F16", mins=True),
        _ggml("Q5_0", "int8", scales="F16", bits=5),
        _ggml("Q5_1", "int8", scales="F16", bits=5, mins=True),
        _ggml("Q8_0", "int8", scales="F16"),
        _ggml("Q4_K", "int4", supers=True, mins=True),
        _ggml("Q5_K", "int8", supers=True, mins=True, bits=5),
        _ggml("Q6_K", "int8", group=16, supers=True, bits=6),
        _ggml("MXFP4", "fp4", scales="BF16"),
        _ggml("NVFP4", "fp4", group=16, scales="BF16"),
        _ggml("Q2_K", "int8", group=16, supers=True, mins=True, bits=2),
        _ggml("Q3_K", "int8", group=16, supers=True, bits=3),
        _ggml("TQ1_0", "int8", group=256, scales="F16", bits=2),
        _ggml("TQ2_0", "int8", group=256, scales="F16", bits=2),
        _ggml("Q1_0", "int8", group=128, scales="F16", bits=2),
        _ggml("Q2_0", "int8", group=64, scales="F16", bits=2),
        _ggml("IQ4_NL", "codes", scales="F16", bits=4, codes=IQ4_CODES),
        _ggml("IQ4_XS", "codes", supers=True, bits=4, codes=IQ4_CODES),
        _iq("IQ3_XXS", bits=4, codes=IQ3_XXS_CODES, super_factor=1 / 4),
        _iq("IQ3_S", bits=4, codes=IQ3_S_CODES),
        _iq("IQ2_XXS", bits=3, codes=IQ2_CODES, super_factor=1 / 8),
        _iq("IQ2_XS", group=16, bits=3, codes=IQ2_CODES, super_factor=1 / 8),
        _iq("IQ2_S", group=16, bits=3, codes=IQ2_CODES, super_factor=1 / 8),
        _iq("IQ1_S", bits=3, codes=IQ1_CODES, super_factor=1 / 8),
        _iq("IQ1_M", group=16, bits=3, codes=IQ1_CODES, super_factor=1 / 8),
    )
}


def common_format(
    formats: Sequence[StoredFormat | None], is_linear: bool, activations: Activations = "auto"
) -> StoredFormat | None:
    """Return the format of a parameter, given those of its parts; None stands for unquantized.

    Parts of different ggml types become int8 in small groups, with mins if necessary, which can
    represent the values of all ggml types.

    is_linear: whether the parameter is the weight of a matrix product.
    activations: the setting.
    """
    first = formats[0] if formats else None
    quantized = [part for part in formats if part is not None]
    if not any(part.layout == "ggml" for part in quantized):
        return first  # `check_plan` ensures that the other parts have the same format
    if not is_linear or len(quantized) < len(formats):
        return None
    common = quantized[0]
    if len(set(quantized)) > 1:
        smallest_group = min(part.group for part in quantized)
        has_mins = any(part.mins for part in quantized)
        common = _ggml("", "int8", group=smallest_group, mins=has_mins)
    if common.activation_format(activations) == "int8":
        return common
    return common.for_float_activations
