"""Weights in 4 or 8 bits with scales: their meaning, and how weights of 16 or 32 bits are rounded
to them.

N outputs, K inputs, G groups of inputs with a scale each. Dimensions of experts may come first.
Rows are rounded one by one, so a row's bits depend on nothing but the row: not on ranks' shares,
threads, or what else is loaded.
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

Kind = Literal["int8", "int4", "fp8", "fp4", "iq4_nl"]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4_NL = (
    -127.0,
    -104.0,
    -83.0,
    -65.0,
    -49.0,
    -35.0,
    -22.0,
    -10.0,
    1.0,
    13.0,
    25.0,
    38.0,
    53.0,
    69.0,
    89.0,
    113.0,
)
Asked = Literal["int8", "int4"]  # what 16 and 32 bits may become here
PART = 2**18  # elements that one thread rounds at a time: they stay in its cache
LARGE_PART = 2**21  # likewise on a device, which has no use for less


@dataclass(frozen=True, slots=True)
class Quantised:
    """w[n, k] = (values[n, k] - zeros[n, k // group]) * scales[n, k // group] - mins[n, k //
    group].

    values [..., N, K]: int8, or bytes: 0 to 15 (int4), e4m3fn (fp8), or 0 to 15 that are numbers of
    E2M1 (fp4) or IQ4_NL (iq4_nl). scales, zeros, mins: fp32 [..., N, G]. zeros None: 8 for int4
    without mins, otherwise 0. mins None:
    0. group 0: one scale per output. dtype: of the activations that the weight is multiplied with.
       rows: outputs of a checkpoint's block, which have equal scales; 0: all outputs of a tensor.
       activations: `int8` rounds these in blocks of 32 before the product.

    What adds no meaning, and lets a packer keep fewer bits: supers: (d, dmin) of 256 inputs each,
    fp32 [..., N, K / 256] and exact in fp16: scales are whole multiples of d, and mins of dmin,
    from 0 to 63 (-128 to 127 where dmin is None). scale_dtype: scales and mins are exact in it.
    bits: of int8 values that need fewer, 5 (0 to 31 with mins, -16 to 15 without) or 6 (-32 to 31,
    in groups of 16); 0: all.

    int4, values [[9, 7]], scales [[0.5]] -> w [[0.5, -0.5]]
    """

    kind: Kind
    group: int
    dtype: torch.dtype
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    rows: int = 1
    mins: Tensor | None = None
    supers: tuple[Tensor, Tensor | None] | None = None
    activations: Literal["float", "int8"] = "float"
    scale_dtype: torch.dtype = torch.float32
    bits: int = 0

    @staticmethod
    def empty(
        kind: Kind,
        group: int,
        zeros: bool,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: Device = None,
    ) -> "Quantised":
        """Return uninitialised memory for a weight of `shape` [..., N, K]."""
        groups = -(-shape[-1] // group) if group else 1
        values = torch.empty(
            shape, dtype=torch.int8 if kind == "int8" else torch.uint8, device=device
        )
        scales = torch.empty(*shape[:-1], groups, device=device)
        return Quantised(
            kind, group, dtype, values, scales, torch.empty_like(scales) if zeros else None
        )

    @property
    def shape(self) -> torch.Size:
        """The sizes [..., N, K], whatever the values are packed as."""
        return self.values.shape

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that make up the weight, the values first."""
        parts = self.values, self.scales, self.zeros, self.mins, *(self.supers or ())
        return tuple(part for part in parts if part is not None)

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Quantised":
        """Return the weight with a change of leading dimensions applied to every part."""
        d, dmin = self.supers or (None, None)
        zeros, mins, d, dmin = (
            None if part is None else change(part) for part in (self.zeros, self.mins, d, dmin)
        )
        supers = None if d is None else (d, dmin)
        scales = change(self.scales)
        return replace(
            self, values=change(self.values), scales=scales, zeros=zeros, mins=mins, supers=supers
        )

    def __getitem__(self, index: Any) -> "Quantised":
        return self.each(lambda part: part[index])

    def chunk(self, count: int) -> "tuple[Quantised, ...]":
        """Split the first dimension into `count` parts, as Tensor.chunk does."""
        step = -(-self.shape[0] // count)
        return tuple(self[i : i + step] for i in range(0, self.shape[0], step))

    def contiguous(self) -> "Quantised":
        """Return the weight with contiguous parts."""
        return self.each(Tensor.contiguous)


Weight = Tensor | Quantised


def dequantised(weight: Quantised) -> Tensor:
    """Return what a weight means, fp32 [..., N, K]."""
    values = weight.values.float()
    if weight.kind == "fp8":
        values = weight.values.view(torch.float8_e4m3fn).float()
    elif weight.kind in ("fp4", "iq4_nl"):
        table = E2M1 if weight.kind == "fp4" else IQ4_NL
        values = torch.tensor(table, device=values.device)[weight.values.int()]
    inputs = values.shape[-1]

    def spread(parts: Tensor) -> Tensor:
        return parts.repeat_interleave(weight.group or inputs, -1)[..., :inputs]

    zeros = (
        spread(weight.zeros)
        if weight.zeros is not None
        else 8
        if weight.kind == "int4" and weight.mins is None
        else 0
    )
    scaled = (values - zeros) * spread(weight.scales)
    return scaled if weight.mins is None else scaled - spread(weight.mins)


def group_of(num_inputs: int) -> int:
    """The number of inputs in a group of int4 weights; 0 where no group size divides num_inputs."""
    return next((group for group in INT4_GROUPS if num_inputs % group == 0), 0)


def quantisation_of(
    weight: Tensor, kind: Asked, name: str, activations: Activations = "auto"
) -> tuple[Quantised, list[Callable[[], None]]]:
    """Return memory for a quantised weight, and the calls of `quantise` that fill it, in any
    order.
    """
    group = group_of(weight.shape[-1]) if kind == "int4" else 0
    into = Quantised.empty(kind, group, False, weight.dtype, tuple(weight.shape), weight.device)
    into = replace(into, activations="int8" if activations == "int8" else "float")
    rows_NK = weight.flatten(0, -2)
    into_NK = into.each(lambda part: part.flatten(0, -2))
    step = max(1, (PART if weight.device.type == "cpu" else LARGE_PART) // weight.shape[-1])
    parts = [slice(i, i + step) for i in range(0, len(rows_NK), step)]
    return into, [partial(quantise, rows_NK[part], into_NK[part], name) for part in parts]


@torch.inference_mode()  # per thread: the caller's mode does not reach others
def quantise(weight_NK: Tensor, into: Quantised, name: str) -> None:
    """Round rows to whole multiples of their scales, without zero points.

    int8: the largest magnitude is 127. int4: it is -8, of the 16 values the one without a
    counterpart, so that the one weight that matters most is exact. Raises CheckpointError (with
    `name`) for NaN and infinity.
    """
    w_NGg = weight_NK.float().view(*into.scales.shape, -1)
    high = w_NGg.amax(-1)
    low = w_NGg.amin(-1)
    if into.kind == "int8":
        scales = torch.maximum(high, -low) / 127
        least = -127
        most = 127
        shift = 0
    else:
        scales = torch.where(high > -low, high, low) / -8
        least = -8
        most = 7
        shift = 8
    if not scales.isfinite().all():
        raise CheckpointError(
            f"{name} has weights that are NaN or infinite: they cannot be quantised"
        )
    divisors = torch.where(scales == 0, 1, scales).unsqueeze(-1)
    into.scales.copy_(scales)
    into.values.copy_((w_NGg / divisors).round_().clamp_(least, most).add_(shift).flatten(-2))
