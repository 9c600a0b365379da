"""Quantised weights from the layouts of files (loader/stored.py) to those of `Quantised`.

N outputs, n of them taken, K inputs, R x C scales.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.load_plan import Index, Piece
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import StoredWeight, logical
from moeserve.ops.quantised import Quantised

Read = Callable[[TensorInfo, Index], Tensor]
_ALL = slice(None)
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight outputs lies in a word


def unpack(stored: StoredWeight, piece: Piece, into: Quantised, read: Read) -> None:
    """Fills `into`, the part of a parameter that a piece is for.

    Raises CheckpointError when a value or a scale is NaN or infinite, or where inputs or zero
    points are not those that config.json implies.
    """
    full = (*piece.take, *[_ALL] * (len(piece.shape) - len(piece.take)))
    lead, (rows, inputs) = full[:-2], full[:-3:-1] if piece.transposed else full[-2:]
    *sizes, num_rows, depth = (
        piece.shape if not piece.transposed else (*piece.shape[:-2], *piece.shape[:-3:-1])
    )
    assert isinstance(rows, slice), piece
    assert isinstance(inputs, slice), piece
    assert len(range(depth)[inputs]) == depth, (
        f"all inputs of a quantised weight are taken: {piece}"
    )
    into.values.copy_(
        _values(stored, (*lead, rows), depth, stored.form.turned(piece.transposed), read)
    )
    into.scales.copy_(
        _scales(stored, (*lead, rows), (*sizes, num_rows, depth), piece.transposed, read)
    )
    if stored.order is not None:
        order = read(stored.order, ())
        if not torch.equal(
            order, torch.arange(len(order), dtype=order.dtype) // (stored.form.group or depth)
        ):
            raise CheckpointError(
                f"{stored.order} has groups of inputs in another order (desc_act), which is not "
                "supported; use a "
                "checkpoint without desc_act, or with static_groups"
            )
    zeros = (
        None
        if stored.zeros is None
        else _zeros(stored, (*lead, rows), (*sizes, num_rows, depth), read)
    )
    if into.zeros is not None:
        assert zeros is not None
        into.zeros.copy_(zeros)
    elif zeros is not None and (zeros != (usual := 128 if stored.form.kind == "int8" else 8)).any():
        raise CheckpointError(
            f"{stored.zeros} has other zero points than {usual}, and config.json says that "
            "weights are symmetric "
            "(sym); correct it there, or download the model again"
        )


def _values(stored: StoredWeight, take: Index, depth: int, turned: bool, read: Read) -> Tensor:
    """The values [..., n, K] of some rows; take: the last index is that of rows."""
    form, tensor, (*lead, rows) = stored.form, stored.values, take
    if form.layout == "plain":
        values = read(tensor, (*lead, _ALL, rows)).mT if turned else read(tensor, take)
        if form.kind == "fp8" and (values & 127 == 127).any():
            raise CheckpointError(f"{tensor} has NaN; download it again")
        return values
    if form.layout == "awq":
        return _awq_order(_numbers(read(tensor, ()), 8))[:, rows].mT
    if form.inputs_first:
        words = _turned(read(tensor, (_ALL, rows)))
    else:
        words = read(tensor, take)
        words = words.flatten(-2) if form.layout == "blocks" else words
    if form.kind == "int8":
        return (words.view(torch.int8) ^ -128)[..., :depth]
    return _numbers(words, 8)[..., :depth]


def _scales(
    stored: StoredWeight, take: Index, shape: tuple[int, ...], transposed: bool, read: Read
) -> Tensor:
    """The scales [..., n, C] of some rows of a weight [..., N, K]."""
    form, (*lead, rows), (*sizes, num_rows, _) = stored.form, take, shape
    turned = form.inputs_first or form.turned(transposed)
    rows_and_groups = form.scale_shape(shape)
    tensor = logical(stored.scales, *sizes, *(rows_and_groups[::-1] if turned else rows_and_groups))
    scales = _decoded(tensor, read(tensor, tuple(lead)))
    if stored.outer is not None:
        single = math.prod(stored.outer.shape) == 1
        outer = read(
            logical(stored.outer, *([] if single else sizes)), () if single else tuple(lead)
        ).float()
        if not (outer.isfinite().all() and (outer > 0).all()):
            raise CheckpointError(
                f"{stored.outer} has NaN, infinity or no positive number; download it again"
            )
        outer = outer[..., None, None]
        scales = scales / outer if stored.outer.name.endswith("_global_scale") else scales * outer
    if not scales.isfinite().all():
        raise CheckpointError(f"{stored.scales} has NaN or infinity; download it again")
    scales = scales.mT if turned else scales
    if form.rows != 1:
        scales = scales.repeat_interleave(form.rows or num_rows, -2)[..., :num_rows, :]
    return scales[..., rows, :]


def _decoded(tensor: TensorInfo, raw: Tensor) -> Tensor:
    """Scales in fp32; NaN where bytes of e8m0 or e4m3 say so."""
    if tensor.dtype == "F8_E4M3":
        return raw.view(torch.float8_e4m3fn).float()
    if (
        raw.dtype == torch.uint8
    ):  # 2 ** (byte - 127): the exponent of a float, but for the least, which is half of one
        bits = (raw.int() << 23).where(raw > 0, 1 << 22)
        return bits.view(torch.float32).where(raw < 255, torch.nan)
    return raw.float()


def _zeros(stored: StoredWeight, take: Index, shape: tuple[int, ...], read: Read) -> Tensor:
    """The zero points [..., n, C] of some rows of a weight [..., N, K]."""
    assert stored.zeros is not None
    form, (*lead, rows), num_rows = stored.form, take, shape[-2]
    words = read(logical(stored.zeros, *form.zeros_shape(shape)), tuple(lead))
    numbers = _numbers(words if form.inputs_first else _turned(words), form.per_element)
    if form.layout == "awq":
        numbers = _awq_order(numbers)
    if form.layout == "gptq":
        numbers = numbers.int() + 1
    if form.kind == "int4" and (numbers > 15).any():
        raise CheckpointError(
            f"{stored.zeros} has a zero point of 16, which 4 bits are not; use another checkpoint"
        )
    return numbers.mT[..., :num_rows, :][..., rows, :].float()


def _numbers(words: Tensor, per_word: int) -> Tensor:
    """Returns the numbers of 4 (8 to a word of 32 bits) or 8 bits in the last dimension, lowest
    bits first.
    """
    parts = words.view(torch.uint8)
    return parts if per_word == 4 else torch.stack((parts & 15, parts >> 4), -1).flatten(-2)


def _turned(words: Tensor) -> Tensor:
    return words.mT.clone(
        memory_format=torch.contiguous_format
    )  # `contiguous` keeps strides beside sizes of 1


def _awq_order(numbers: Tensor) -> Tensor:
    return torch.unflatten(numbers, -1, (-1, 8))[..., _AWQ].flatten(-2)
