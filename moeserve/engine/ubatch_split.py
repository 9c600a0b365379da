"""Where a step is split into two micro-batches: between two requests if the halves are even enough, otherwise inside
one."""

from __future__ import annotations

import numpy as np

from moeserve.engine.plan import I32

UNEVEN = 0.15  # of all tokens, by which the micro-batches may differ before a request is split


def best_split(counts_R: I32) -> int:
    """Tokens of the first micro-batch; 0 when there is nothing to split. counts_R: tokens of each row, at least one.

    [1, 1, 1, 1] -> 2, [100] -> 50, [3, 90, 3] -> 48
    """
    total = int(counts_R.sum())
    if total < 2:
        return 0
    ends = np.cumsum(counts_R)[:-1]
    if len(ends):
        best = int(ends[np.abs(2 * ends - total).argmin()])
        if abs(2 * best - total) <= UNEVEN * total:
            return best
    return total // 2
