"""Rows as deep_ep takes and returns them: filled up to a width that its kernels have, bfloat16 or fp8 with scales.

T rows of D elements, W >= D elements that travel, b = W / 128 blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.moe.all2all.wire_format import BLOCK, Fp8Wire

Packed = Tensor | tuple[Tensor, Tensor]  # fp8 [T, W] with fp32 scales [T, b]


def widen(x_TD: Tensor, width: int) -> Tensor:
    """Returns x contiguous with zeros behind every row, [T, W]; any number of leading dimensions."""
    missing = width - x_TD.shape[-1]
    return torch.nn.functional.pad(x_TD, (0, missing)) if missing else x_TD.contiguous()


def pack_fp8(x_TW: Tensor) -> Packed:
    """Returns elements and scales, with the bits of `Fp8Wire`."""
    width = x_TW.shape[1]
    rows_TB = Fp8Wire().encode(x_TW)
    data_TW = rows_TB[:, :width].contiguous().view(torch.float8_e4m3fn)
    scale_Tb = rows_TB[:, width : width + 4 * (width // BLOCK)].contiguous().view(torch.float32)
    return data_TW, scale_Tb


def unpack(rows: Packed, width: int) -> Tensor:
    """Returns [T, D] bfloat16, contiguous; bfloat16 rows of this very width are not copied."""
    if isinstance(rows, Tensor):
        return rows[:, :width].contiguous()
    data_TW, scale_Tb = rows
    blocks_TbB = data_TW.float().view(data_TW.shape[0], -1, BLOCK) * scale_Tb[:, :, None]
    return blocks_TbB.flatten(1)[:, :width].to(torch.bfloat16).contiguous()
