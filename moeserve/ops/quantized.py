"""Weights in 4 or 8 bits with scales: their in-memory format, and quantization at load time.

Shapes: N outputs, K inputs, G groups of inputs (each group has one scale); a dimension of experts
may come first. Each row (output) is quantized on its own, so its bits depend on no other row, on
no thread and on no rank's share of the weight.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.types import Device

from moeserve.config import INT4_GROUPS, Activations
from moeserve.errors import CheckpointError

Kind = Literal["int8", "int4", "fp8", "fp4", "codes"]
# The numbers that the 16 codes of fp4 stand for, and the same times 2.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_INTEGERS = tuple(int(2 * number) for number in E2M1)
QuantizeTo = Literal["int8", "int4"]  # the kinds that `quantize` can produce
CPU_JOB_ELEMENTS = 2**18  # that a thread rounds at a time, so that they stay in its cache
GPU_JOB_ELEMENTS = 2**21  # at a time, because smaller jobs only add launches


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized weight, before a kernel packs it.

    With g = k // group:

        w[n, k] = (values[n, k] - zeros[n, g]) * scales[n, g] - mins[n, g]

    For example int4, values [[9, 7]], scales [[0.5]] -> w [[0.5, -0.5]].
    """

    kind: Kind
    group: int  # inputs per scale; 0: one scale per output
    dtype: torch.dtype  # of the activations that the weight is multiplied with
    # [..., N, K]: int8; otherwise uint8 with 0 to 15 (int4), the bits of e4m3fn (fp8), or an index
    # into E2M1 (fp4) or `codes` (codes)
    values: Tensor
    scales: Tensor  # fp32 [..., N, G]
    zeros: Tensor | None = None  # fp32 [..., N, G]; None: 8 for int4 without mins, otherwise 0
    # outputs per block of the checkpoint, whose scales are equal; 0: all outputs of a tensor
    rows: int = 1
    mins: Tensor | None = None  # fp32 [..., N, G]; None: 0
    # "int8": activations are rounded in blocks of 32 inputs before the product
    activations: Literal["float", "int8"] = "float"
    codes: tuple[int, ...] = ()  # the numbers, up to 16, that values of the kind "codes" stand for

    # The other fields do not change w. They let a kernel pack GGUF's types in fewer bits.

    # GGUF's super-scales (d, dmin), fp32 [..., N, K / 256]: within 256 inputs, scales are integer
    # multiples of d, and mins of dmin. The integers are 0 to 63, or -128 to 127 if dmin is None.
    # d / super_factor and dmin are exact in fp16.
    supers: tuple[Tensor, Tensor | None] | None = None
    super_factor: float = 1.0
    scale_dtype: torch.dtype = torch.float32  # scales and mins are exact in it
    # bits that codes need, or values of int8: b bits are 0 to 2^b - 1 with mins, otherwise
    # -2^(b - 1) to 2^(b - 1) - 1; 0: all 8
    bits: int = 0

    @staticmethod
    def empty(
        kind: Kind,
        group: int,
        zeros: bool,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: Device = None,
    ) -> "Quantized":
        """Return an uninitialized weight of `shape` [..., N, K]. zeros: with zero points."""
        groups = -(-shape[-1] // group) if group else 1
        values = torch.empty(
            shape, dtype=torch.int8 if kind == "int8" else torch.uint8, device=device
        )
        scales = torch.empty(*shape[:-1], groups, device=device)
        return Quantized(
            kind=kind,
            group=group,
            dtype=dtype,
            values=values,
            scales=scales,
            zeros=torch.empty_like(scales) if zeros else None,
        )

    @property
    def shape(self) -> torch.Size:
        """The shape [..., N, K] of the weight."""
        return self.values.shape

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that make up the weight, starting with the values."""
        parts = self.values, self.scales, self.zeros, self.mins, *(self.supers or ())
        return tuple(part for part in parts if part is not None)

    @property
    def nbytes(self) -> int:
        """The total size of all parts in bytes."""
        return sum(part.nbytes for part in self.parts)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Quantized":
        """Return the weight with `change` applied to every part.

        `change` must leave the last dimension alone, whose size differs between parts. If it
        returns views, the new weight shares memory with this one.
        """

        def changed(part: Tensor | None) -> Tensor | None:
            return None if part is None else change(part)

        supers = None
        if self.supers is not None:
            d, dmin = self.supers
            supers = change(d), changed(dmin)
        return replace(
            self,
            values=change(self.values),
            scales=change(self.scales),
            zeros=changed(self.zeros),
            mins=changed(self.mins),
            supers=supers,
        )

    def __getitem__(self, index: Any) -> "Quantized":
        return self.each(lambda part: part[index])

    def index_select(self, dim: int, index: Tensor) -> "Quantized":
        """Return rows or experts in another order, as Tensor.index_select does."""
        assert 0 <= dim < self.values.dim() - 1, dim
        return self.each(lambda part: part.index_select(dim, index))

    def chunk(self, count: int) -> "tuple[Quantized, ...]":
        """Split the first dimension into `count` chunks, as Tensor.chunk does."""
        step = -(-self.shape[0] // count)
        return tuple(self[i : i + step] for i in range(0, self.shape[0], step))

    def contiguous(self) -> "Quantized":
        """Return the weight with contiguous parts."""
        return self.each(Tensor.contiguous)


Weight = Tensor | Quantized


def dequantized(weight: Quantized) -> Tensor:
    """Return the dequantized weight, fp32 [..., N, K].

    Reference for the kernels. The loader uses it, too, for weights that it cannot keep quantized.
    """
    values = weight.values.float()
    if weight.kind == "fp8":
        values = weight.values.view(torch.float8_e4m3fn).float()
    elif weight.kind in ("fp4", "codes"):
        table = torch.tensor(E2M1 if weight.kind == "fp4" else weight.codes, dtype=torch.float32)
        values = table.to(values.device)[weight.values.int()]
    num_inputs = values.shape[-1]

    def per_input(per_group: Tensor) -> Tensor:
        return per_group.repeat_interleave(weight.group or num_inputs, -1)[..., :num_inputs]

    zeros: Tensor | int = 0
    if weight.zeros is not None:
        zeros = per_input(weight.zeros)
    elif weight.kind == "int4" and weight.mins is None:
        zeros = 8
    scaled = (values - zeros) * per_input(weight.scales)
    return scaled if weight.mins is None else scaled - per_input(weight.mins)


def group_of(num_inputs: int) -> int:
    """Return the group size of an int4 weight; 0 if no supported size divides `num_inputs`."""
    return next((group for group in INT4_GROUPS if num_inputs % group == 0), 0)


def quantization_of(
    weight: Tensor, kind: QuantizeTo, name: str, activations: Activations = "auto"
) -> tuple[Quantized, list[Callable[[], None]]]:
    """Return an uninitialized quantized weight, and the jobs that fill it.

    The jobs may run in any order and on any threads. name: of the parameter, for error messages.
    """
    group = group_of(weight.shape[-1]) if kind == "int4" else 0
    quantized = Quantized.empty(
        kind, group, False, weight.dtype, tuple(weight.shape), weight.device
    )
    quantized = replace(quantized, activations="int8" if activations == "int8" else "float")
    weight_NK = weight.flatten(0, -2)
    # `quantized` is contiguous, so these are views of it: the jobs fill it through them.
    target_NK = quantized.each(lambda part: part.flatten(0, -2))
    job_elements = CPU_JOB_ELEMENTS if weight.device.type == "cpu" else GPU_JOB_ELEMENTS
    step = max(1, job_elements // weight.shape[-1])
    rows = [slice(i, i + step) for i in range(0, len(weight_NK), step)]
    return quantized, [partial(quantize, weight_NK[part], target_NK[part], name) for part in rows]


@torch.inference_mode()  # the mode is per thread: the caller's does not apply in a thread pool
def quantize(weight_NK: Tensor, into: Quantized, name: str) -> None:
    """Quantize rows into `into` (int8 or int4), without zero points.

    int8: the scale maps the largest magnitude to 127. int4: it maps the weight of the largest
    magnitude to -8, which of the values -8 to 7 has no counterpart of the other sign. So this
    weight, which matters most, is exact. Raises CheckpointError (with `name`) for NaN and infinity.
    """
    w_NGg = weight_NK.float().view(*into.scales.shape, -1)
    highest_weight = w_NGg.amax(-1)
    lowest_weight = w_NGg.amin(-1)
    if into.kind == "int8":
        scales = torch.maximum(highest_weight, -lowest_weight) / 127
        min_value = -127
        max_value = 127
        offset = 0
    else:
        scales = torch.where(highest_weight > -lowest_weight, highest_weight, lowest_weight) / -8
        min_value = -8
        max_value = 7
        offset = 8  # stored as 0 to 15
    if not scales.isfinite().all():
        raise CheckpointError(f"{name} has NaN or infinite weights, which cannot be quantized")
    divisors = torch.where(scales == 0, 1, scales).unsqueeze(-1)
    into.scales.copy_(scales)
    into.values.copy_(
        (w_NGg / divisors).round_().clamp_(min_value, max_value).add_(offset).flatten(-2)
    )
