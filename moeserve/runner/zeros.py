"""Large tensors of zeros, most of which may never be used."""

from __future__ import annotations

import math
import mmap
from typing import Any

import torch
from torch import Tensor

from moeserve.errors import ConfigError

PORTABLE = 1  # of cudaHostRegister: for all contexts


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros; on the host they take memory only where they are touched (`torch.zeros` writes every page)."""
    count = math.prod(shape)
    if device.type != "cpu" or count == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros in page-locked host memory. Raises ConfigError if it cannot be locked.

    Registered, since torch's own allocator rounds page-locked memory up to powers of two: 64 GiB for 40.
    """
    memory = lazy_zeros(shape, dtype, torch.device("cpu"))
    runtime: Any = torch.cuda.cudart
    if memory.nbytes and int(code := runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)):
        raise ConfigError(
            f"{memory.nbytes >> 20:,} MiB of host memory cannot be locked for the GPU (CUDA error {int(code)}); lower "
            "cache.host_store_bytes, or raise the limit on locked memory (ulimit -l)"
        )
    return memory
