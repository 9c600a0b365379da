"""Pure functions that the backends share: sort rows by expert, and sum results with weights.

A pair is one (token, k) choice of the router; its number is t * K + k.

T: tokens. K: experts per token. D: model width. e: experts. N: pairs. P: pairs with an expert.
M: pairs of some consecutive tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.moe.routing import Routing
from moeserve.ops import native_rows

MAX_TERMS = 1 << 20  # the most fp32 elements that `weighted_sum_plainly` has in memory at a time


@dataclass(frozen=True, slots=True)
class Grouping:
    """The rows of all pairs, sorted by expert."""

    order_P: Tensor  # the pair of each row
    place_N: Tensor  # the row of each pair; -1 for pairs without an expert
    counts_e: NDArray[np.int64]  # the number of rows of each expert


def group_rows(ids_TK: Tensor, num_experts: int) -> Grouping:
    """Do the same as `group_rows_plainly`, in native code if it is available."""
    if native_rows.AVAILABLE and ids_TK.is_cpu:
        return Grouping(*native_rows.group_pairs(ids_TK.int().contiguous(), num_experts))
    return group_rows_plainly(ids_TK, num_experts)


def group_rows_plainly(ids_TK: Tensor, num_experts: int) -> Grouping:
    """Sort pairs by expert. The sort is stable, and pairs with id -1 are omitted.

    ids [[1], [0], [-1], [1]], 2 experts -> order [1, 0, 3], place [1, 0, -1, 2], counts [1, 2]
    """
    flat_N = ids_TK.reshape(-1)
    # In NumPy, because there are few integers and the host needs the counts. For int16, NumPy's
    # stable sort is a radix sort.
    ids = flat_N.cpu().numpy().astype(np.int16)
    counts = np.bincount(ids + 1, minlength=num_experts + 1)
    order = ids.argsort(kind="stable")[counts[0] :]
    place = np.full(len(ids), -1)
    place[order] = np.arange(len(order))
    order_P, place_N = (torch.from_numpy(x).to(flat_N.device) for x in (order, place))
    return Grouping(order_P, place_N, counts[1:])


def grouped_rows(x_TD: Tensor, rows: Grouping, top_k: int) -> Tensor:
    """Return the activation of each sorted pair's token, [P, D]."""
    if native_rows.AVAILABLE and x_TD.is_cpu:
        return native_rows.rows_of_pairs(x_TD, rows.order_P, top_k)
    return x_TD.index_select(0, rows.order_P // top_k)


def weighted_sum(y_PD: Tensor, rows: Grouping, routing: Routing, out_TD: Tensor) -> Tensor:
    """Do the same as `weighted_sum_plainly`, bit for bit, in native code if it is available."""
    if native_rows.AVAILABLE and y_PD.is_cpu and out_TD.is_contiguous():
        return native_rows.sum_pairs(y_PD, rows.place_N, routing.weights_TK.contiguous(), out_TD)
    return weighted_sum_plainly(y_PD, rows, routing, out_TD)


def weighted_sum_plainly(y_PD: Tensor, rows: Grouping, routing: Routing, out_TD: Tensor) -> Tensor:
    """Compute out[t] = sum over k of weights[t, k] * y[place of (t, k)].

    The sum is in the order k = 0..K-1, in fp32, and rounded once. Pairs without an expert add zero.
    y may have more rows than `rows`.
    """
    tokens, top_k = routing.ids_TK.shape
    if not len(rows.order_P):
        return out_TD.zero_()
    all_have_experts = len(rows.order_P) == len(rows.place_N)
    step = max(1, MAX_TERMS // (top_k * y_PD.shape[1]))
    for start in range(0, tokens, step):
        place_M = rows.place_N[start * top_k : (start + step) * top_k]
        y_MD = y_PD.index_select(0, place_M if all_have_experts else place_M.clamp(min=0))
        if not all_have_experts:
            y_MD.masked_fill_((place_M < 0)[:, None], 0)
        terms_TKD = (
            y_MD.view(-1, top_k, y_PD.shape[1]) * routing.weights_TK[start : start + step, :, None]
        )
        total_TD, *later_terms = terms_TKD.unbind(1)
        for term_TD in later_terms:
            total_TD += term_TD
        out_TD[start : start + step] = total_TD
    return out_TD
