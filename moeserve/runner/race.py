"""Who wins a Gumbel race: the token with the largest logit + noise, where runner/noise.py defines the noise.

Native code leaves out all tokens that cannot win, and says of which rows it is not sure; those are done in full, so
that the winner is always the definition's. r rows, V padded vocabulary or the width of some of its blocks.
"""

from __future__ import annotations

from torch import Tensor

from moeserve.ops import native_rows
from moeserve.runner.filters import first_max
from moeserve.runner.noise import Gumbel


def winners(gumbel: Gumbel, x_rV: Tensor, low_r: Tensor, high_r: Tensor, blocks_rB: Tensor | None = None) -> Tensor:
    """Each row's column with the largest x + noise, int64. Uses up x_rV; the other arguments as for `log_race`."""
    if not x_rV.is_cpu or not native_rows.AVAILABLE:
        return slow_winners(gumbel, x_rV, low_r, high_r, blocks_rB)
    column_r = native_rows.race(x_rV, low_r, high_r, gumbel.token_hash, blocks_rB)
    for i in (column_r < 0).nonzero().flatten().tolist():
        row = slice(i, i + 1)
        blocks_1B = None if blocks_rB is None else blocks_rB[row]
        column_r[row] = slow_winners(gumbel, x_rV[row], low_r[row], high_r[row], blocks_1B)
    return column_r


def slow_winners(gumbel: Gumbel, x_rV: Tensor, low_r: Tensor, high_r: Tensor, blocks_rB: Tensor | None) -> Tensor:
    """The definition of `winners`."""
    x_rV -= gumbel.log_race(low_r, high_r, blocks_rB)
    return first_max(x_rV)[1]
