"""A millisecond at start that checks what the sampler relies on: noise whose bits do not depend on the batch."""

from __future__ import annotations

import numpy as np
import torch

from moeserve.runner import noise


def sampler_is_invariant(vocab_size: int = 50_000) -> bool:
    """Whether rows of noise have the same bits alone and among others, with the thread count that is set."""
    rows = 4
    gumbel = noise.Gumbel(vocab_size, torch.device("cpu"))
    keys = noise.row_keys(np.arange(rows, dtype=np.uint64), np.arange(rows))
    low, high = (torch.from_numpy(key) for key in keys)
    together = gumbel(low, high)
    return all(torch.equal(gumbel(low[i : i + 1], high[i : i + 1])[0], together[i]) for i in range(rows))
