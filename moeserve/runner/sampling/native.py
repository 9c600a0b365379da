"""The sampler for CPUs. It reads only the part of a row that can matter, and draws in native code.

Rows without filters take one native call. Rows with top-k or min-p are narrowed to the few blocks
of LANES tokens with their largest logits. Top-p sorts only the tokens that its sum can reach. The
method depends only on the row itself, so its bits never depend on other rows.

r: rows. V: padded vocabulary. B: blocks of a narrowed row. W = B * LANES.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import moeserve.runner.sampling.noise as noise
from moeserve.ops import native_rows
from moeserve.runner.sampling.noise import LANES
from moeserve.runner.sampling.reference import ReferenceSampler, top_p_cutoff
from moeserve.runner.sampling.rows import Trait, row_keys
from moeserve.runner.sampling.rules import NEG_INF
from moeserve.runner.sampling.sampler import Masks
from moeserve.runner.tables import I64

HEAD_BLOCKS = 64  # blocks of a narrowed row
HEAD_TOKENS = 64  # tokens that are usually enough for top-p
# Traits that one native call for all rows does not support.
UNSUPPORTED = Trait.CHANGED & ~Trait.GRAMMAR | Trait.CUT | Trait.TOP_P
ROUNDING = 1e-4  # upper bound of rounding errors in sums of probabilities


class NativeSampler(ReferenceSampler):
    """Chooses the same tokens as `ReferenceSampler`, but faster."""

    def _mask(self, x_rV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
        native_rows.apply_bitmask(x_rV, rows_C, bits_CW)

    @staticmethod
    def _argmax(x_rV: Tensor) -> tuple[Tensor, Tensor]:
        return native_rows.argmax(x_rV)

    @staticmethod
    def _top_p_cutoff(probs_rV: Tensor, top_p_r: Tensor) -> Tensor:
        return top_p_cutoff_head(probs_rV, top_p_r)

    def _choose_simple_rows(
        self, logits_SV: Tensor, slots_S: I64, positions_S: I64, masks: Masks | None
    ) -> tuple[Tensor, Tensor, Tensor, I64]:
        # One call chooses for most requests, which have a temperature and perhaps a grammar.
        columns = self.rows.traits, self.rows.temperature, self.rows.seed
        tokens_S, peak_S, status_S = native_rows.draw(
            logits_SV,
            slots_S,
            positions_S,
            columns,
            self.gumbel.token_hash,
            UNSUPPORTED,
            Trait.RANDOM,
            masks,
        )
        return tokens_S, peak_S, status_S, np.flatnonzero(tokens_S.numpy() < 0)

    def _draw(self, x_rV: Tensor, slots_r: I64, positions_r: I64) -> Tensor:
        if not (self.rows.traits[slots_r[0]] & Trait.CUT and can_narrow(x_rV.shape[1])):
            return self._draw_from(x_rV, slots_r, positions_r)
        x_rW, blocks_rB, floor_r = narrow(x_rV)
        enough_r = self._is_enough(x_rW, floor_r, slots_r)
        tokens_r = self._draw_from(x_rW, slots_r, positions_r, blocks_rB)
        # Rows whose narrowed row does not contain all tokens that may be drawn.
        rows_left = np.flatnonzero(~enough_r)
        if len(rows_left):
            tokens_r[rows_left] = self._draw_from(
                x_rV[rows_left], slots_r[rows_left], positions_r[rows_left]
            )
        return tokens_r

    def _draw_from(
        self, x_rW: Tensor, slots_r: I64, positions_r: I64, blocks_rB: Tensor | None = None
    ) -> Tensor:
        """Return tokens drawn from whole rows, or from the given blocks of each row."""
        self._filter(x_rW, slots_r)
        low_r, high_r = self._upload(*row_keys(self.rows.seed[slots_r], positions_r))
        column_r = race(self.gumbel, x_rW, low_r, high_r, blocks_rB)
        if blocks_rB is None:
            return column_r
        column_r1 = column_r.unsqueeze(1)
        return (blocks_rB.gather(1, column_r1 // LANES) * LANES + column_r1 % LANES).squeeze(1)

    def _is_enough(self, x_rW: Tensor, floor_r: Tensor, slots_r: I64) -> NDArray[np.bool_]:
        """Return which of the narrowed rows contain all tokens that top-k or min-p would keep."""
        count_r = (x_rW > NEG_INF).sum(dim=-1).numpy()
        has_top_k_r = (self.rows.traits[slots_r] & Trait.TOP_K) != 0
        is_enough_r: NDArray[np.bool_] = has_top_k_r & (count_r >= self.rows.top_k[slots_r])
        return is_enough_r | (floor_r.numpy() < self.rows.log_min_p[slots_r])


def race(
    gumbel: noise.Gumbel,
    x_rV: Tensor,
    low_r: Tensor,
    high_r: Tensor,
    blocks_rB: Tensor | None = None,
) -> Tensor:
    """Return the column with the largest x + Gumbel noise of each row, int64.

    Equivalently, tokens race: each arrives after an exponential time divided by its probability,
    and the first one wins (Maddison et al., 2014, "A* Sampling"). Native code skips tokens that
    cannot win. If two tokens are about equally early, native code returns -1, and the row is
    computed with the exact noise here.

    Other arguments are as for `Gumbel`.
    """
    column_r = native_rows.race(x_rV, low_r, high_r, gumbel.token_hash, blocks_rB)
    for i in (column_r < 0).nonzero().flatten().tolist():
        row = slice(i, i + 1)
        scores = x_rV[row] + gumbel(
            low_r[row], high_r[row], None if blocks_rB is None else blocks_rB[row]
        )
        column_r[row] = native_rows.argmax(scores)[1]
    return column_r


def can_narrow(width: int) -> bool:
    """Whether rows are so wide that `narrow` makes sampling faster."""
    return width > 2 * HEAD_BLOCKS * LANES


def narrow(x_rV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x_rW, blocks_rB, floor_r): the few blocks of each row with its largest values.

    x_rW: all values of row i above floor_r[i], in order of token ids. All others are -inf.
    blocks_rB: the numbers of the blocks of LANES tokens.
    """
    rows, width = x_rV.shape
    count = width // LANES
    top = x_rV.view(rows, count, LANES).amax(dim=-1).topk(HEAD_BLOCKS, dim=-1)
    floor_r = top.values[:, -1]
    blocks_rB = top.indices.sort(dim=-1).values
    first_r = torch.arange(0, rows * count, count)
    x_rW = (
        x_rV.view(-1, LANES)
        .index_select(0, (blocks_rB + first_r.unsqueeze(1)).view(-1))
        .view(rows, -1)
    )
    return x_rW.masked_fill_(x_rW <= floor_r.unsqueeze(1), NEG_INF), blocks_rB, floor_r


def top_p_cutoff_head(probs_rV: Tensor, top_p_r: Tensor) -> Tensor:
    """Return the same as `top_p_cutoff`, but sort only the tokens that can matter.

    If the few most likely tokens of a row reach top_p, only these are sorted: the sums from the
    likeliest token on are the same, however many tokens follow. Otherwise, tokens below half of
    (1 - top_p) / V are omitted. Their sum is less than half of the probability that may be dropped,
    so top-p keeps none of these tokens.
    """
    width = probs_rV.shape[1]
    head_rW = narrow(probs_rV)[0].clamp_(min=0.0) if can_narrow(width) else probs_rV
    top_rK = head_rW.topk(min(HEAD_TOKENS, head_rW.shape[1]), dim=-1).values
    num_short_r = (top_rK.cumsum(dim=-1) < top_p_r.unsqueeze(1)).sum(dim=-1)
    cutoff_r = top_rK.gather(1, num_short_r.clamp(max=top_rK.shape[1] - 1).unsqueeze(1)).squeeze(1)
    for i in (num_short_r == top_rK.shape[1]).nonzero().flatten().tolist():
        max_dropped = 1 - float(top_p_r[i])  # probability that may be dropped
        probs_V = probs_rV[i]
        likely = probs_V
        if max_dropped > ROUNDING:
            likely = probs_V[probs_V >= max_dropped / (2 * width)]
        cutoff_r[i] = top_p_cutoff(
            (likely if len(likely) else probs_V).unsqueeze(0), top_p_r[i : i + 1]
        )
    return cutoff_r
