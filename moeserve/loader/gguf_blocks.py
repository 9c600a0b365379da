"""Decoded blocks of ggml's quantized types, and the numbers of few bits in them.

Shapes: n rows, B blocks per row.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """Decoded blocks: a weight is value * scale - min, in fp32."""

    values: Tensor  # int8 [n, B, groups, elements]: numbers, or indices into `codes`
    scales: Tensor  # fp32 [n, B, groups]
    mins: Tensor | None = None  # fp32 [n, B, groups]
    supers: tuple[Tensor, ...] = ()  # fp32 [n, B, 1], see `Quantized`
    codes: tuple[int, ...] = ()

    @property
    def numbers(self) -> Tensor:
        """The values as numbers, int8 [n, B, groups, elements]."""
        if not self.codes:
            return self.values
        return torch.tensor(self.codes, dtype=torch.int8)[self.values.int()]

    def scaled(self, factors: Tensor) -> "Blocks":
        """Return blocks without mins with all weights multiplied by factors, one of each matrix.

        factors: fp32, of the leading dimensions of the blocks.
        """
        assert self.mins is None
        assert not self.supers
        missing = self.scales.dim() - factors.dim()
        return self._replace(scales=self.scales * factors[(..., *[None] * missing)])


def half(raw: Tensor, offset: int) -> Tensor:
    """Return the fp16 at byte `offset` of each block, as fp32 [n, B, 1]."""
    return raw[..., offset : offset + 2].contiguous().view(torch.float16).float()


def words(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes [n, B, bytes] as integers of a signed dtype, in little-endian order, int64."""
    # `contiguous` would keep the bytes of a single block, which may not be aligned.
    numbers = raw.clone(memory_format=torch.contiguous_format).view(dtype).long()
    return numbers & ((1 << 8 * dtype.itemsize) - 1)


def fields(numbers: Tensor, width: int, count: int) -> Tensor:
    """Unpack numbers of `width` bits from integers, the lowest bits first.

    [...] -> [..., count]. For example width 2, count 4: [0b11_10_01_00] -> [[0, 1, 2, 3]].
    """
    shifts = torch.arange(0, width * count, width).to(numbers.dtype)
    return (numbers.unsqueeze(-1) >> shifts) & ((1 << width) - 1)


def strided_fields(raw: Tensor, width: int, run: int) -> Tensor:
    """Unpack numbers of `width` bits from bytes: of each `run` bytes, the lowest bits come first.

    [n, B, runs * run] -> [n, B, runs * (8 / width), run]
    """
    runs = torch.unflatten(raw, -1, (-1, run))
    return fields(runs, width, 8 // width).transpose(-1, -2).flatten(-3, -2)


def nibbles(raw: Tensor, offset: int, run: int = 16) -> Tensor:
    """Unpack 4-bit numbers from byte `offset` on, as `strided_fields` does."""
    return strided_fields(raw[..., offset:], 4, run)
