"""Decodes the blocks of ggml's quantized types, as ggml-quants.c does.

gguf_native.py decodes the frequent types faster. The decoders here are its references, and decode
the other types.

Blocks of 256 weights have a small integer scale for every 16 or 32 weights.

Shapes: n rows, B blocks per row.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader import gguf_native
from moeserve.loader.gguf_blocks import Blocks, fields, half, nibbles, strided_fields
from moeserve.loader.gguf_file import TYPES
from moeserve.loader.gguf_grids import GRID_DECODERS
from moeserve.loader.load_plan import Index
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored_format import IQ4_CODES
from moeserve.ops.quantized import E2M1_INTEGERS, Quantized

_TYPES_BY_NAME = {tensor_type.name: tensor_type for tensor_type in TYPES.values()}


def read_raw(
    tensor: TensorInfo, take: Index, read: Callable[[TensorInfo, Index], Tensor]
) -> Tensor:
    """Read the blocks of rows of a tensor, uint8 [n, B, bytes].

    take: index in all dimensions but the last.
    """
    tensor_type = _TYPES_BY_NAME[tensor.dtype]
    row_bytes = tensor.shape[-1] // tensor_type.block_size * tensor_type.block_bytes
    raw = read(replace(tensor, dtype="U8", shape=(*tensor.shape[:-1], row_bytes)), take)
    return torch.unflatten(raw, -1, (-1, tensor_type.block_bytes))


def read_blocks(
    tensor: TensorInfo, take: Index, read: Callable[[TensorInfo, Index], Tensor]
) -> Blocks:
    """Read and decode rows of a tensor, as `read_raw` and `decode` do."""
    return decode(tensor, read_raw(tensor, take, read))


def decode(tensor: TensorInfo, raw: Tensor, *, use_native: bool = True) -> Blocks:
    """Decode blocks of a tensor.

    use_native: by the native decoder of the type, if there is one; otherwise by its reference.

    Raises CheckpointError if a scale is NaN or infinite.
    """
    if use_native and gguf_native.decodes(tensor.dtype):
        native_blocks = gguf_native.decode_blocks(
            tensor.dtype, raw, _TYPES_BY_NAME[tensor.dtype].block_size
        )
        if native_blocks is None:
            raise _not_finite(tensor)
        return native_blocks
    blocks = _DECODERS[tensor.dtype](raw)
    if not all(part is None or part.isfinite().all() for part in (blocks.scales, blocks.mins)):
        raise _not_finite(tensor)
    return blocks


def decode_into(tensor: TensorInfo, raw: Tensor, into: Quantized) -> None:
    """Decode blocks of rows into a parameter of the type's own kind, or of int8 (see `fill`).

    Raises CheckpointError if a scale is NaN or infinite.
    """
    if not (gguf_native.decodes(tensor.dtype) and gguf_native.fits(tensor.dtype, into)):
        fill(decode(tensor, raw), into)
    elif not gguf_native.decode_into(tensor.dtype, raw, into):
        raise _not_finite(tensor)


def _not_finite(tensor: TensorInfo) -> CheckpointError:
    return CheckpointError(f"{tensor} has a scale that is NaN or infinite; download it again")


def dense(blocks: Blocks) -> Tensor:
    """Return the dequantized weights, fp32 [n, K]."""
    weights = blocks.numbers * blocks.scales.unsqueeze(-1)
    if blocks.mins is not None:
        weights -= blocks.mins.unsqueeze(-1)
    return weights.flatten(-3)


def fill(blocks: Blocks, into: Quantized) -> None:
    """Fill a parameter of the type's own kind, or of int8 in groups of the same size or less."""
    values = (blocks.values if into.kind in ("fp4", "codes") else blocks.numbers).flatten(-3)
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


def _32_nibbles(raw: Tensor, offset: int) -> Tensor:
    """Unpack 32 4-bit numbers of one group, int8 [n, B, 1, 32]."""
    return nibbles(raw, offset).flatten(-2).unsqueeze(-2).to(torch.int8)


def _32_fifth_bits(raw: Tensor, offset: int) -> Tensor:
    """Unpack 32 fifth bits of one group as 0 or 16, int8 [n, B, 1, 32]."""
    return (fields(raw[..., offset : offset + 4], 1, 8).flatten(-2).unsqueeze(-2) * 16).to(
        torch.int8
    )


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
    super_scale = half(raw, 0)
    super_min = half(raw, 2)
    return super_scale * scales, super_min * mins, (super_scale, super_min)


def _in_groups(values: Tensor, group: int) -> Tensor:
    """Arrange values [n, B, runs, run] in groups, int8 [n, B, groups, group]."""
    return torch.unflatten(values.flatten(-2), -1, (-1, group)).to(torch.int8)


def _q2_k(raw: Tensor) -> Blocks:
    """16 bytes have a scale and a min of 4 bits each; the super-scales are at the end."""
    values = _in_groups(strided_fields(raw[..., 16:80], 2, 32), 16)
    super_scale = half(raw, 80)
    super_min = half(raw, 82)
    return Blocks(
        values,
        super_scale * (raw[..., :16] & 15),
        super_min * (raw[..., :16] >> 4),
        supers=(super_scale, super_min),
    )


def _q3_k(raw: Tensor) -> Blocks:
    """The third bit of a value is 0 for negative numbers. 12 bytes have 16 scales of 6 bits."""
    third = strided_fields(raw[..., :32], 1, 32)
    values = strided_fields(raw[..., 32:96], 2, 32) | (third << 2)
    low = nibbles(raw[..., 96:104], 0, 8).flatten(-2)
    high = strided_fields(raw[..., 104:108], 2, 4).flatten(-2)
    scales = (low | (high << 4)).to(torch.int8) - 32
    super_scale = half(raw, 108)
    return Blocks(
        _in_groups(values, 16) - 4,
        super_scale * scales,
        supers=(super_scale,),
    )


def _q5_k(raw: Tensor) -> Blocks:
    values = nibbles(raw[..., 48:], 0, 32) | (strided_fields(raw[..., 16:48], 1, 32) << 4)
    return Blocks(values.to(torch.int8), *_k_scales(raw))


def _q6_k(raw: Tensor) -> Blocks:
    """Each 128 of the 256 values have their low 4 bits in 64 bytes, and their high 2 bits in 32."""
    low = torch.unflatten(
        torch.unflatten(nibbles(raw[..., :128], 0, 64), -2, (2, 2)), -1, (2, 32)
    ).flatten(-3, -2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    high = (torch.unflatten(raw[..., 128:192], -1, (2, 1, 32)) >> shifts) & 3
    values = (low | (high << 4)).to(torch.int8) - 32
    scales = raw[..., 192:208].contiguous().view(torch.int8)
    super_scale = half(raw, 208)
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
    values = torch.unflatten(nibbles(raw, 8), -2, (8, 2)).flatten(-2)
    super_scale = half(raw, 0)
    return Blocks(
        values.to(torch.int8), super_scale * scales, supers=(super_scale,), codes=IQ4_CODES
    )


def _mxfp4(raw: Tensor) -> Blocks:
    """Values are integers, 2 * E2M1, so scales are half of e8m0's; for bytes 0 and 1 subnormal."""
    exponents = raw[..., :1].int()
    bits = ((exponents - 1) << 23).where(exponents > 1, 0x200000 << exponents)
    scales = bits.view(torch.float32).where(exponents < 255, torch.nan)
    return Blocks(_32_nibbles(raw, 1), scales, codes=E2M1_INTEGERS)


def _nvfp4(raw: Tensor) -> Blocks:
    """Each 16 of 64 weights have a scale in e4m3, whose sign has no meaning; 127 is 0.

    Values are integers, 2 * E2M1, so scales are half of the stored ones.
    """
    stored = raw[..., :4]
    codes = stored & 127
    finite = codes.view(torch.float8_e4m3fn).float().where(codes != 127, 480.0)
    values = torch.unflatten(raw[..., 4:], -1, (4, 8))
    return Blocks(
        torch.cat((values & 15, values >> 4), -1).to(torch.int8),
        (finite / 2).where(stored != 127, 0.0),
        codes=E2M1_INTEGERS,
    )


def _tq1_0(raw: Tensor) -> Blocks:
    """A byte is a fraction of 256 with 5 ternary digits, the first one highest.

    The last 4 bytes have 4 digits each.
    """
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).unsqueeze(-1)
    digits = [
        (raw[..., None, begin:end] * powers[:count]).flatten(-2)
        for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    values = ((torch.cat(digits, -1).short() * 3) >> 8) - 1
    return Blocks(values.unsqueeze(-2).to(torch.int8), half(raw, 52))


def _less_one(values: Tensor, scales: Tensor) -> Blocks:
    """Return blocks of (values - 1) * scales, for values of 0 to 3.

    The negative values, with negative scales, fit into signed 2 bits.
    """
    return Blocks(1 - values, -scales)


def _tq2_0(raw: Tensor) -> Blocks:
    return _less_one(_in_groups(strided_fields(raw[..., :64], 2, 32), 256), half(raw, 64))


def _q1_0(raw: Tensor) -> Blocks:
    signs = fields(raw[..., 2:], 1, 8).to(torch.int8)
    return Blocks(_in_groups(signs, 128) * 2 - 1, half(raw, 0))


def _q2_0(raw: Tensor) -> Blocks:
    return _less_one(_in_groups(fields(raw[..., 2:], 2, 4), 64), half(raw, 0))


_DECODERS: dict[str, Callable[[Tensor], Blocks]] = {
    "Q4_0": lambda raw: Blocks(_32_nibbles(raw, 2) - 8, half(raw, 0)),
    "Q4_1": lambda raw: Blocks(_32_nibbles(raw, 4), half(raw, 0), -half(raw, 2)),
    "Q5_0": lambda raw: Blocks((_32_nibbles(raw, 6) | _32_fifth_bits(raw, 2)) - 16, half(raw, 0)),
    "Q5_1": lambda raw: Blocks(
        _32_nibbles(raw, 8) | _32_fifth_bits(raw, 4), half(raw, 0), -half(raw, 2)
    ),
    "Q8_0": lambda raw: Blocks(raw[..., None, 2:].view(torch.int8), half(raw, 0)),
    "Q4_K": lambda raw: Blocks(nibbles(raw, 16, 32).to(torch.int8), *_k_scales(raw)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda raw: Blocks(_32_nibbles(raw, 2), half(raw, 0), codes=IQ4_CODES),
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    **GRID_DECODERS,
}
