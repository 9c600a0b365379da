"""The bytes of a stored quantised weight -> values, scales and zero points as the products take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.load_plan import Index, Piece
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import Stored, place
from moeserve.ops.quantised import Quantised

# A tensor, or a part of it; elements that torch cannot compute with as bytes.
Read = Callable[[TensorInfo, Index], Tensor]


def empty(stored: Stored, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Quantised:
    """Room for a parameter of this format."""
    form = stored.form
    whole = -(-shape[-1] // 8) * 8  # int4 always has groups
    group = form.group or (whole if form.kind == "int4" else 0)
    return replace(Quantised.empty(form.kind, group, form.zeros, dtype, shape, device), rows=form.rows)


def unpack(stored: Stored, piece: Piece, into: Quantised, read: Read) -> None:
    """Fills a piece of a parameter. Raises CheckpointError when a value or a scale is NaN or infinite."""
    form = stored.form
    values = read(stored.values, piece.take)
    if form.packed:
        values = _nibbles(values) if form.kind == "int4" else values.view(torch.int8) ^ -128
        values = values[..., : piece.shape[-1]]
    if form.kind == "fp8" and (values & 127 == 127).any():
        raise CheckpointError(f"{place(stored.values)} has NaN; download it again")
    into.values[piece.at] = values
    scales = read(stored.scales, ()).float()
    if not scales.isfinite().all():
        raise CheckpointError(f"{place(stored.scales)} has NaN or infinity; download it again")
    num_rows = piece.shape[-2]
    scales = scales.view(*piece.shape[:-2], *form.scale_shape(piece.shape))
    scales = scales.repeat_interleave(form.rows or num_rows, -2)[..., :num_rows, :]
    into.scales[piece.at] = scales[piece.take]
    if into.zeros is not None:
        assert stored.zeros is not None
        zeros = _nibbles(read(stored.zeros, ()).transpose(-1, -2).clone(memory_format=torch.contiguous_format))
        into.zeros[piece.at] = zeros.transpose(-1, -2)[..., :num_rows, :][piece.take].float()


def _nibbles(words: Tensor) -> Tensor:
    """Eight numbers from 0 to 15 for each int32 of the last dimension, lowest bits first."""
    pairs = words.view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
