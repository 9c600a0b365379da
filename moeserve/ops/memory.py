"""A setting of the C library that keeps freed memory, so that temporary tensors cost no page faults."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_IN_HEAP = 32 << 20  # glibc accepts no more
KEPT_FREE = 256 << 20


def keep_freed_memory() -> bool:
    """Tells glibc to serve tensors up to 32 MiB from the heap and to keep up to 256 MiB of free heap.

    By default glibc maps and unmaps each larger tensor: an RMS norm over 512 tokens then takes ten times as long.
    Applies to the whole process; returns False where the C library has no such setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP) and mallopt(M_TRIM_THRESHOLD, KEPT_FREE))
