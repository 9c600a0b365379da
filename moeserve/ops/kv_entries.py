"""KV entries: how the keys or values of one head at one position lie in the cache.

T tokens, G KV heads, d head width. An entry of a floating-point cache is d elements. An int8 entry is d whole numbers
and the four bytes of their fp32 scale, so code that copies, moves or stores entries need not know of scales. The native
kernels have the same layout (csrc/kernels/rotary.hpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4


def entry_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` in one KV entry."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def to_entries(x_TGd: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds heads to entries [T, G, entry_width]; int8 in multiples of the head's largest magnitude / 127.

    [0.5, -1.27] -> [50, -127] and 0.01. A head that is not finite becomes zeros with the scale NaN: what attends to it
    is NaN, as without rounding.
    """
    if dtype != torch.int8:
        return x_TGd.to(dtype)
    x_TGd = x_TGd.float()
    largest_TG1 = x_TGd.abs().amax(-1, keepdim=True)
    scale_TG1 = torch.where(largest_TG1.isfinite(), largest_TG1 / 127, torch.nan)
    whole_TGd = torch.where(scale_TG1 > 0, (x_TGd / scale_TG1).round().clamp(-127, 127), 0.0)
    return torch.cat((whole_TGd.to(torch.int8), scale_TG1.view(torch.int8)), -1)


def from_entries(entries: Tensor) -> Tensor:
    """Returns int8 entries [..., d + 4] as fp32 [..., d], and entries of other types as they are."""
    if entries.dtype != torch.int8:
        return entries
    return entries[..., :-SCALE_BYTES] * entries[..., -SCALE_BYTES:].contiguous().view(torch.float32)
