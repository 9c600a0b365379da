"""Memory for rows on their way: buffers that a micro-batch lends to one exchange and takes back.

Fresh memory for every exchange would cost more than the copy into it: the kernel has to clear each page first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.moe.all2all.wire_format import ALIGNMENT


class Pool:
    """Byte buffers of one micro-batch; used by one thread at a time. Pages that nothing was written to take no
    memory."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [at least num_bytes], the smallest that fits, holding whatever was there before."""
        fits = [buffer for buffer in self._free if buffer.numel() >= num_bytes]
        if not fits:
            return torch.empty(max(ALIGNMENT, 1 << (num_bytes - 1).bit_length()), dtype=torch.uint8)
        best = min(fits, key=Tensor.numel)
        self._free = [buffer for buffer in self._free if buffer is not best]
        return best

    def give(self, buffer: Tensor) -> None:
        """Takes back what `take` returned."""
        self._free.append(buffer)
