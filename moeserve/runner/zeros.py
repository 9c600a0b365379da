"""Large tensors that start as zeros and of which most may never be used."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on the host take memory only where they are touched (`torch.zeros` writes every page)."""
    count = math.prod(shape)
    if device.type != "cpu" or count == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory that a GPU copies from and to by itself; it holds whatever was there before."""
    return torch.empty(shape, dtype=dtype, pin_memory=math.prod(shape) > 0)
