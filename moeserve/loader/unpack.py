"""Converts quantized weights from the layouts in files (loader/stored.py) to `Quantized`.

Shapes: N outputs, of which n are read, K inputs, R x C scales.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.load_plan import Index, Piece
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import StoredWeight, with_shape
from moeserve.ops.quantized import Quantized

Read = Callable[[TensorInfo, Index], Tensor]  # returns a part of a tensor in a file
_ALL = slice(None)
# The position of each of eight outputs in an int32, from the low bits on
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(stored: StoredWeight, piece: Piece, into: Quantized, read: Read) -> None:
    """Read a piece of a quantized weight into `into`, the part of the parameter for it.

    Raises CheckpointError if a value or scale is NaN or infinite, or if the order of inputs or the
    zero points do not match config.json.
    """
    full = (*piece.take, *[_ALL] * (len(piece.shape) - len(piece.take)))
    shape = piece.shape
    lead = full[:-2]
    rows, inputs = full[-2:]
    if piece.transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
        rows, inputs = inputs, rows
    depth = shape[-1]
    assert isinstance(rows, slice), piece
    assert isinstance(inputs, slice), piece
    assert len(range(depth)[inputs]) == depth, f"a piece must take all quantized inputs: {piece}"
    take = (*lead, rows)
    into.values.copy_(
        _values(stored, take, depth, stored.format.stores_transposed(piece.transposed), read)
    )
    into.scales.copy_(_scales(stored, take, shape, piece.transposed, read))
    if stored.group_index is not None:
        group_index_K = read(stored.group_index, ())
        group = stored.format.group or depth
        in_order_K = torch.arange(len(group_index_K), dtype=group_index_K.dtype) // group
        if not torch.equal(group_index_K, in_order_K):
            raise CheckpointError(
                f"{stored.group_index} has groups of reordered inputs (desc_act), which are not "
                "supported; use a checkpoint without desc_act, or with static_groups"
            )
    zeros = None if stored.zeros is None else _zeros(stored, take, shape, read)
    if into.zeros is not None:
        assert zeros is not None
        into.zeros.copy_(zeros)
    elif zeros is not None:
        symmetric = 128 if stored.format.kind == "int8" else 8
        if (zeros != symmetric).any():
            raise CheckpointError(
                f"{stored.zeros} has other zero points than {symmetric}, but config.json says that "
                "weights are symmetric (sym); correct config.json, or download the model again"
            )


def _values(stored: StoredWeight, take: Index, depth: int, turned: bool, read: Read) -> Tensor:
    """Read the values [..., n, K] of some rows. take: its last index is that of the rows."""
    stored_format = stored.format
    tensor = stored.values
    *lead, rows = take
    if stored_format.layout == "plain":
        values = read(tensor, (*lead, _ALL, rows)).mT if turned else read(tensor, take)
        if stored_format.kind == "fp8" and (values & 127 == 127).any():
            raise CheckpointError(f"{tensor} has NaN; download it again")
        return values
    if stored_format.layout == "awq":
        return _awq_order(_unpacked(read(tensor, ()), 8))[:, rows].mT
    if stored_format.inputs_first:
        words = _transposed(read(tensor, (_ALL, rows)))
    else:
        words = read(tensor, take)
        words = words.flatten(-2) if stored_format.layout == "blocks" else words
    if stored_format.kind == "int8":
        return (words.view(torch.int8) ^ -128)[..., :depth]  # stored with an offset of 128
    return _unpacked(words, 8)[..., :depth]


def _scales(
    stored: StoredWeight, take: Index, shape: tuple[int, ...], transposed: bool, read: Read
) -> Tensor:
    """Read the scales [..., n, C] of some rows of a weight [..., N, K]."""
    stored_format = stored.format
    *lead, rows = take
    *sizes, num_rows, _ = shape
    is_groups_first = stored_format.inputs_first or stored_format.stores_transposed(transposed)
    rows_and_groups = stored_format.num_scales(shape)
    tensor = with_shape(
        stored.scales, *sizes, *(rows_and_groups[::-1] if is_groups_first else rows_and_groups)
    )
    scales = _decoded(tensor, read(tensor, tuple(lead)))
    if stored.outer_scale is not None:
        if math.prod(stored.outer_scale.shape) == 1:  # one for all experts
            outer = read(with_shape(stored.outer_scale), ()).float()
        else:
            outer = read(with_shape(stored.outer_scale, *sizes), tuple(lead)).float()
        if not (outer.isfinite().all() and (outer > 0).all()):
            raise CheckpointError(
                f"{stored.outer_scale} has NaN, infinity, 0 or a negative number; download it again"
            )
        outer = outer[..., None, None]
        scales = (
            scales / outer if stored.outer_scale.name.endswith("_global_scale") else scales * outer
        )
    if not scales.isfinite().all():
        raise CheckpointError(f"{stored.scales} has NaN or infinity; download it again")
    scales = scales.mT if is_groups_first else scales
    if stored_format.rows != 1:
        scales = scales.repeat_interleave(stored_format.rows or num_rows, -2)[..., :num_rows, :]
    return scales[..., rows, :]


def _decoded(tensor: TensorInfo, raw: Tensor) -> Tensor:
    """Convert scales to fp32. NaN codes of e8m0 and e4m3 become NaN."""
    if tensor.dtype == "F8_E4M3":
        return raw.view(torch.float8_e4m3fn).float()
    if raw.dtype == torch.uint8:
        # e8m0: 2 ** (byte - 127), so the byte is the exponent of a float. Byte 0 is 2 ** -127, a
        # subnormal float: half of the smallest normal one.
        bits = (raw.int() << 23).where(raw > 0, 1 << 22)
        return bits.view(torch.float32).where(raw < 255, torch.nan)
    return raw.float()


def _zeros(stored: StoredWeight, take: Index, shape: tuple[int, ...], read: Read) -> Tensor:
    """Read the zero points [..., n, C] of some rows of a weight [..., N, K]."""
    assert stored.zeros is not None
    stored_format = stored.format
    *lead, rows = take
    num_rows = shape[-2]
    words = read(with_shape(stored.zeros, *stored_format.zeros_shape(shape)), tuple(lead))
    zeros = _unpacked(
        words if stored_format.inputs_first else _transposed(words),
        stored_format.weights_per_element,
    )
    if stored_format.layout == "awq":
        zeros = _awq_order(zeros)
    if stored_format.layout == "gptq":  # stored minus 1
        zeros = zeros.int() + 1
    if stored_format.kind == "int4" and (zeros > 15).any():
        raise CheckpointError(
            f"{stored.zeros} has a zero point of 16, which does not fit into 4 bits; use another "
            "checkpoint"
        )
    return zeros.mT[..., :num_rows, :][..., rows, :].float()


def _unpacked(words: Tensor, per_word: int) -> Tensor:
    """Unpack 4-bit (8 per int32) or 8-bit (4 per int32) numbers along the last dimension.

    The lowest bits come first.
    """
    parts = words.view(torch.uint8)
    return parts if per_word == 4 else torch.stack((parts & 15, parts >> 4), -1).flatten(-2)


def _transposed(words: Tensor) -> Tensor:
    # `contiguous` would keep odd strides of dimensions of size 1, with which `view` fails.
    return words.mT.clone(memory_format=torch.contiguous_format)


def _awq_order(numbers: Tensor) -> Tensor:
    return torch.unflatten(numbers, -1, (-1, 8))[..., _AWQ_ORDER].flatten(-2)
