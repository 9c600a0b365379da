"""Which tokens may be drawn: min-p, top-k, top-p, and the one rule for ties of an argmax.

r rows, V padded vocabulary. Rows are shifted so that their maximum is 0, and divided by the temperature. A row's
result depends on that row alone. Ties at a cut are kept, so no result depends on an order of equal logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.ops import native_rows
from moeserve.runner.noise import LANES

NEG_INF = float("-inf")
HEAD_BLOCKS = 64  # blocks of LANES tokens that a row is narrowed to
HEAD_TOKENS = 64  # tokens that a top-p is usually reached with
ROUNDING = 1e-4  # of sums of probabilities, generously


def first_max(x_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum of each row and its lowest index; NaN counts as largest.

    In blocks of LANES, because torch's vectorised `amax` is several times faster than its `argmax`.
    """
    rows, width = x_SV.shape
    if native_rows.AVAILABLE and x_SV.is_cpu and x_SV.dtype is torch.float32 and rows:
        return native_rows.argmax(x_SV)
    if width % LANES or rows == 0:
        return x_SV.max(dim=-1)
    blocks_SBL = x_SV.view(rows, width // LANES, LANES)
    peak_S, block_S = blocks_SBL.amax(dim=-1).max(dim=-1)
    winner_SL = blocks_SBL[torch.arange(rows, device=x_SV.device), block_S]
    return peak_S, block_S * LANES + winner_SL.argmax(dim=-1)


def narrow(x_rV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The few blocks of each row that hold its largest values: (x_rW, blocks_rB, floor_r), W = B * LANES.

    Every value above floor_r[i] of row i is there, in order of its id; all others are -inf. blocks_rB: which blocks
    of LANES tokens they come from. Worth it where a filter would drop the rest anyway. Rows must be wider than W.
    """
    rows, width = x_rV.shape
    count = width // LANES
    top = x_rV.view(rows, count, LANES).amax(dim=-1).topk(HEAD_BLOCKS, dim=-1)
    floor_r = top.values[:, -1]
    blocks_rB = top.indices.sort(dim=-1).values
    first_r = torch.arange(0, rows * count, count, device=x_rV.device)
    x_rW = x_rV.view(-1, LANES).index_select(0, (blocks_rB + first_r.unsqueeze(1)).view(-1)).view(rows, -1)
    return x_rW.masked_fill_(x_rW <= floor_r.unsqueeze(1), NEG_INF), blocks_rB, floor_r


def can_narrow(width: int) -> bool:
    return width > 2 * HEAD_BLOCKS * LANES


def keep_min_p(x_rV: Tensor, log_min_p_r: Tensor) -> None:
    """Drops tokens less likely than min_p times the likeliest. log_min_p_r: -inf where min-p is off."""
    x_rV.masked_fill_(x_rV < log_min_p_r.unsqueeze(1), NEG_INF)


def keep_top_k(x_rV: Tensor, k_r: Tensor, largest_k: int) -> None:
    """Drops tokens below the k-th largest logit of their row; equal ones stay. k_r: int64 >= 1; V where top-k is off.

    largest_k: the largest k of those rows that have one.
    """
    largest_k = min(largest_k, x_rV.shape[1])
    top_rK = x_rV.topk(largest_k, dim=-1).values
    kth_r = top_rK.gather(1, (k_r - 1).clamp_(max=largest_k - 1).unsqueeze(1))
    kth_r = kth_r.masked_fill(k_r.unsqueeze(1) > largest_k, NEG_INF)
    x_rV.masked_fill_(x_rV < kth_r, NEG_INF)


def top_p_cutoff_sorted(probs_rV: Tensor, top_p_r: Tensor) -> Tensor:
    """The smallest probability that stays in each row: tokens from the likeliest on until their sum reaches top_p.

    probs [[0.2, 0.5, 0.3]], top_p [0.6] -> [0.3]
    """
    sorted_rV = probs_rV.sort(dim=-1, descending=True).values
    num_short_r = (sorted_rV.cumsum(dim=-1) < top_p_r.unsqueeze(1)).sum(dim=-1)
    return sorted_rV.gather(1, num_short_r.clamp_(max=probs_rV.shape[1] - 1).unsqueeze(1)).squeeze(1)


def top_p_cutoff_head(probs_rV: Tensor, top_p_r: Tensor) -> Tensor:
    """As `top_p_cutoff_sorted`, but sorts only what can matter: waits for the device, so it suits the CPU.

    First the largest few of each row, if they reach top_p; sums from the largest on are the same however many follow.
    """
    head_rW = narrow(probs_rV)[0].clamp_(min=0.0) if can_narrow(probs_rV.shape[1]) else probs_rV
    top_rK = head_rW.topk(min(HEAD_TOKENS, head_rW.shape[1]), dim=-1).values
    num_short_r = (top_rK.cumsum(dim=-1) < top_p_r.unsqueeze(1)).sum(dim=-1)
    cutoff_r = top_rK.gather(1, num_short_r.clamp(max=top_rK.shape[1] - 1).unsqueeze(1)).squeeze(1)
    for i in (num_short_r == top_rK.shape[1]).nonzero().flatten().tolist():
        cutoff_r[i] = _top_p_cutoff_likely(probs_rV[i], top_p_r[i : i + 1])
    return cutoff_r


def _top_p_cutoff_likely(probs_V: Tensor, top_p: Tensor) -> Tensor:
    """One row, without the tokens below half of (1 - top_p) / V: they sum to less than half of what may be dropped, so
    none of them stays."""
    rest = 1 - float(top_p)
    likely = probs_V[probs_V >= rest / (2 * len(probs_V))] if rest > ROUNDING else probs_V
    return top_p_cutoff_sorted((likely if len(likely) else probs_V).unsqueeze(0), top_p)


def keep_top_p(x_rV: Tensor, top_p_r: Tensor, *, host_may_wait: bool) -> None:
    """Drops the least likely tokens of each row that are not needed to reach its top_p (1: off); ties stay."""
    probs_rV = torch.softmax(x_rV, dim=-1)
    cutoff = top_p_cutoff_head if host_may_wait else top_p_cutoff_sorted
    # A top_p of 1 asks for nothing; its sums would stop anywhere near 1.
    cutoff_r = torch.where(top_p_r < 1, cutoff(probs_rV, top_p_r.where(top_p_r < 1, 0.0)), -1.0)
    x_rV.masked_fill_(probs_rV < cutoff_r.unsqueeze(1), NEG_INF)
