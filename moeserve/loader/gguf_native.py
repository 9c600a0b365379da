"""Decodes rows of ggml's quantized types in C++ (csrc/core/ggml_blocks.cpp).

The results have the same bits as those of the decoders in gguf_quants.py and gguf_grids.py, which
take many times longer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moeserve.loader.gguf_blocks import Blocks
from moeserve.loader.gguf_grids import GRID_DECODERS, grid
from moeserve.loader.stored_format import GGML_FORMATS
from moeserve.ops.native import native
from moeserve.ops.native_rows import address
from moeserve.ops.quantized import E2M1_INTEGERS, Quantized

_native: Any = native()


def decodes(name: str) -> bool:
    """Return whether there is a native decoder of a ggml type."""
    return _native is not None and bool(_native.decodes_ggml(name))


def decode_blocks(name: str, raw: Tensor, block_size: int) -> Blocks | None:
    """Decode blocks, contiguous uint8 [..., B, bytes]; None if a scale or min is not finite."""
    stored = GGML_FORMATS[name]
    lead = raw.shape[:-1]
    shape = (*lead, block_size // stored.group)
    values = torch.empty((*shape, stored.group), dtype=torch.int8)
    scales = torch.empty(shape)
    mins = torch.empty(shape) if stored.mins else None
    num_supers = 0 if not stored.supers else 2 if stored.mins else 1
    supers = tuple(torch.empty((*lead, 1)) for _ in range(num_supers))
    is_finite = _decode(
        name,
        raw,
        values=values.view(-1, lead[-1] * block_size),
        scales=scales.view(-1, lead[-1] * shape[-1]),
        mins=None if mins is None else mins.view(-1, lead[-1] * shape[-1]),
        supers=[part.view(-1, lead[-1]) for part in supers],
    )
    codes = E2M1_INTEGERS if stored.kind == "fp4" else stored.codes
    return Blocks(values, scales, mins, supers, codes) if is_finite else None


def fits(name: str, into: Quantized) -> bool:
    """Return whether rows of a ggml type can be decoded into a parameter directly.

    The parameter has the type's own kind and groups, and its rows are contiguous.
    """
    stored = GGML_FORMATS[name]
    return (
        into.values.dim() == 2
        and into.kind == stored.kind
        and into.group == stored.group
        and (into.mins is not None) == stored.mins
        and all(part.stride(-1) == 1 or part.shape[-1] == 1 for part in into.parts)
    )


def decode_into(name: str, raw: Tensor, into: Quantized) -> bool:
    """Decode contiguous rows, uint8 [n, B, bytes], into a parameter that `fits`.

    Returns whether all scales and mins are finite.
    """
    supers = [part for part in into.supers or () if part is not None]
    return _decode(
        name,
        raw,
        values=into.values,
        scales=into.scales,
        mins=into.mins,
        supers=supers,
        # `Quantized` has indices of E2M1, and the block's codes are 2 * E2M1.
        factor=2.0 if into.kind == "fp4" else 1.0,
        # The zero point of int4 without mins in `Quantized`.
        offset=8 if into.kind == "int4" and into.mins is None else 0,
    )


def _decode(
    name: str,
    raw: Tensor,
    *,
    values: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    supers: Sequence[Tensor],
    factor: float = 1.0,
    offset: int = 0,
) -> bool:
    """Decode rows to matrices of n rows. Return whether all scales and mins are finite."""
    assert raw.is_contiguous()
    assert mins is None or mins.stride() == scales.stride()
    assert all(part.stride() == supers[0].stride() for part in supers)
    num_rows = len(values)
    grid_of_type = (
        grid("iq1_s" if name == "IQ1_M" else name.lower()) if name in GRID_DECODERS else None
    )
    is_finite: bool = _native.decode_ggml(
        name,
        raw.data_ptr(),
        num_rows,
        raw.shape[-2],
        address(grid_of_type),
        values.data_ptr(),
        values.stride(0),
        scales.data_ptr(),
        address(mins),
        scales.stride(0),
        address(supers[0]) if supers else 0,
        address(supers[1]) if len(supers) > 1 else 0,
        supers[0].stride(0) if supers else 0,
        offset,
        factor,
    )
    return is_finite
