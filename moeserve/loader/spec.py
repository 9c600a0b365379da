"""The format of quantised weights in numbers, as config.json says it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """The format of a checkpoint's quantised weights.

    packed: in words of 32 bits. rows, group: outputs and inputs that share a scale, 0 for all. zeros: with zero points.
    activations: the config quantises them, too, which not all kernels do.
    """

    kind: Literal["int8", "int4", "fp8"]
    packed: bool = False
    rows: int = 1
    group: int = 0
    zeros: bool = False
    activations: bool = False

    @property
    def values_dtype(self) -> str:
        """The dtype of the values as safetensors spells it."""
        return "I32" if self.packed else "F8_E4M3" if self.kind == "fp8" else "I8"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The numbers of scales along the outputs and the inputs of a weight [..., N, K]."""
        sizes = zip(shape[-2:], (self.rows, self.group), strict=True)
        rows, columns = (-(-size // step) if step else 1 for size, step in sizes)
        return rows, columns
