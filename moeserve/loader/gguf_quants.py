"""Decodes the blocks of ggml's quantized types, as ggml-quants.c does.

A weight is value * scale - min, in fp32. Blocks of 256 weights have a small integer scale for every
16 or 32 weights. Shapes: n rows, B blocks per row.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.gguf_file import TYPES
from moeserve.loader.load_plan import Index
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.ops.quantized import E2M1, IQ4_NL, Quantized

_IQ4_NL_CODES = tuple(map(int, IQ4_NL))
_E2M1_CODES = tuple(int(2 * number) for number in E2M1)  # as integers
_TYPES_BY_NAME = {tensor_type.name: tensor_type for tensor_type in TYPES.values()}


class Blocks(NamedTuple):
    """Decoded blocks."""

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


def read_blocks(
    tensor: TensorInfo, take: Index, read: Callable[[TensorInfo, Index], Tensor]
) -> Blocks:
    """Read and decode rows of a tensor. take: index in all dimensions but the last.

    Raises CheckpointError if a scale is NaN or infinite.
    """
    tensor_type = _TYPES_BY_NAME[tensor.dtype]
    row_bytes = tensor.shape[-1] // tensor_type.block_size * tensor_type.block_bytes
    raw = read(replace(tensor, dtype="U8", shape=(*tensor.shape[:-1], row_bytes)), take)
    blocks = _DECODERS[tensor.dtype](raw.view(*raw.shape[:-1], -1, tensor_type.block_bytes))
    if not all(part is None or part.isfinite().all() for part in (blocks.scales, blocks.mins)):
        raise CheckpointError(f"{tensor} has a scale that is NaN or infinite; download it again")
    return blocks


def dense(blocks: Blocks) -> Tensor:
    """Return the dequantized weights, fp32 [n, K]."""
    weights = blocks.numbers * blocks.scales.unsqueeze(-1)
    if blocks.mins is not None:
        weights -= blocks.mins.unsqueeze(-1)
    return weights.flatten(-3)


def fill(blocks: Blocks, into: Quantized) -> None:
    """Fill a parameter of the type's own kind, or of int8 in groups of the same size or less."""
    values = (blocks.values if into.kind in ("fp4", "iq4_nl") else blocks.numbers).flatten(-3)
    scales = blocks.scales.flatten(-2)
    if into.kind == "fp4":
        scales = scales * 2  # `Quantized` has indices of E2M1, and the block's codes are 2 * E2M1
    if into.kind == "int4" and into.mins is None:
        values = values + 8  # the zero point of such weights in `Quantized`
    into.values.copy_(values)
    repeats = into.scales.shape[-1] // scales.shape[-1]
    into.scales.copy_(scales.repeat_interleave(repeats, -1))
    if into.mins is not None:
        mins = torch.zeros_like(scales) if blocks.mins is None else blocks.mins.flatten(-2)
        into.mins.copy_(mins.repeat_interleave(repeats, -1))
    # Not strict: without mins, `into.supers` has None for them, and `blocks.supers` has one entry.
    for target, source in zip(into.supers or (), blocks.supers, strict=False):
        assert target is not None
        target.copy_(source.flatten(-2))


def _half(raw: Tensor, offset: int) -> Tensor:
    """Return the fp16 at byte `offset` of each block, as fp32 [n, B, 1]."""
    return raw[..., offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor, offset: int, count: int = 16) -> Tensor:
    """Unpack 4-bit numbers from byte `offset` on: of each `count` bytes, all low halves come first.

    [n, B, runs * count] -> [n, B, 2 * runs, count]
    """
    runs = torch.unflatten(raw[..., offset:], -1, (-1, count))
    return torch.stack((runs & 15, runs >> 4), -2).flatten(-3, -2)


def _bits(raw: Tensor, offset: int, count: int) -> Tensor:
    """Unpack the bits of bytes: [n, B, count] -> [n, B, 8, count]."""
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    return (raw[..., offset : offset + count].unsqueeze(-2) >> shifts) & 1


def _32_nibbles(raw: Tensor, offset: int) -> Tensor:
    """Unpack 32 4-bit numbers of one group, int8 [n, B, 1, 32]."""
    return _nibbles(raw, offset).flatten(-2).unsqueeze(-2).to(torch.int8)


def _32_fifth_bits(raw: Tensor, offset: int) -> Tensor:
    """Unpack 32 fifth bits of one group as 0 or 16, int8 [n, B, 1, 32]."""
    return (_bits(raw, offset, 4).transpose(-1, -2).flatten(-2).unsqueeze(-2) * 16).to(torch.int8)


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return scales, mins and super-scales of Q4_K and Q5_K.

    A block has the super-scales of scales and of mins (d and dmin, fp16), then 8 scales and 8 mins
    of 6 bits each in 12 bytes.
    """
    first = raw[..., 4:8]
    second = raw[..., 8:12]
    high = raw[..., 12:16]
    scales = torch.cat((first & 63, (high & 15) | (first >> 6 << 4)), -1)
    mins = torch.cat((second & 63, (high >> 4) | (second >> 6 << 4)), -1)
    super_scale = _half(raw, 0)
    super_min = _half(raw, 2)
    return super_scale * scales, super_min * mins, (super_scale, super_min)


def _q5_k(raw: Tensor) -> Blocks:
    values = _nibbles(raw[..., 48:], 0, 32) | (_bits(raw, 16, 32) << 4)
    return Blocks(values.to(torch.int8), *_k_scales(raw))


def _q6_k(raw: Tensor) -> Blocks:
    """Each 128 of the 256 values have their low 4 bits in 64 bytes, and their high 2 bits in 32."""
    low = torch.unflatten(
        torch.unflatten(_nibbles(raw[..., :128], 0, 64), -2, (2, 2)), -1, (2, 32)
    ).flatten(-3, -2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    high = (torch.unflatten(raw[..., 128:192], -1, (2, 1, 32)) >> shifts) & 3
    values = (low | (high << 4)).to(torch.int8) - 32
    scales = raw[..., 192:208].contiguous().view(torch.int8)
    super_scale = _half(raw, 208)
    return Blocks(
        torch.unflatten(values.flatten(-3), -1, (16, 16)),
        super_scale * scales,
        supers=(super_scale,),
    )


def _iq4_xs(raw: Tensor) -> Blocks:
    high = raw[..., 2:4]
    low = raw[..., 4:8]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((high.unsqueeze(-1) >> shifts) & 3).flatten(-2)
    scales = (torch.stack((low & 15, low >> 4), -1).flatten(-2) | (high << 4)).to(torch.int8) - 32
    values = torch.unflatten(_nibbles(raw, 8), -2, (8, 2)).flatten(-2)
    super_scale = _half(raw, 0)
    return Blocks(
        values.to(torch.int8), super_scale * scales, supers=(super_scale,), codes=_IQ4_NL_CODES
    )


def _mxfp4(raw: Tensor) -> Blocks:
    """Values are integers, 2 * E2M1, so scales are half of e8m0's; for bytes 0 and 1 subnormal."""
    exponents = raw[..., :1].int()
    bits = ((exponents - 1) << 23).where(exponents > 1, 0x200000 << exponents)
    scales = bits.view(torch.float32).where(exponents < 255, torch.nan)
    return Blocks(_32_nibbles(raw, 1), scales, codes=_E2M1_CODES)


_DECODERS: dict[str, Callable[[Tensor], Blocks]] = {
    "Q4_0": lambda raw: Blocks(_32_nibbles(raw, 2) - 8, _half(raw, 0)),
    "Q4_1": lambda raw: Blocks(_32_nibbles(raw, 4), _half(raw, 0), -_half(raw, 2)),
    "Q5_0": lambda raw: Blocks((_32_nibbles(raw, 6) | _32_fifth_bits(raw, 2)) - 16, _half(raw, 0)),
    "Q5_1": lambda raw: Blocks(
        _32_nibbles(raw, 8) | _32_fifth_bits(raw, 4), _half(raw, 0), -_half(raw, 2)
    ),
    "Q8_0": lambda raw: Blocks(raw[..., None, 2:].view(torch.int8), _half(raw, 0)),
    "Q4_K": lambda raw: Blocks(_nibbles(raw, 16, 32).to(torch.int8), *_k_scales(raw)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda raw: Blocks(_32_nibbles(raw, 2), _half(raw, 0), codes=_IQ4_NL_CODES),
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
