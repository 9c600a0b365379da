"""Pure functions that every backend shares: sorting rows by expert, and the owner's weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.moe.routing import Routing

TERMS = 1 << 20  # fp32 elements that the weighted sum holds at a time


@dataclass(frozen=True, slots=True)
class Grouping:
    """Where each (token, k) pair goes. order_P: pair t * K + k of every grouped row; place_N: row of every pair, or -1
    where it goes nowhere; counts_e: rows of each expert, on the host."""

    order_P: Tensor
    place_N: Tensor
    counts_e: NDArray[np.int64]


def group_rows(ids_TK: Tensor, num_experts: int) -> Grouping:
    """The stable order that makes each expert's rows contiguous; pairs with id -1 are left out.

    ids [[1], [0], [-1], [1]], 2 experts -> order [1, 0, 3], place [1, 0, -1, 2], counts [1, 2]
    """
    flat_N = ids_TK.reshape(-1)
    # NumPy: this is a handful of small integers, and the host needs the counts. Radix sort, as ids fit 16 bits.
    ids = flat_N.cpu().numpy().astype(np.int16)
    counts = np.bincount(ids + 1, minlength=num_experts + 1)
    order = ids.argsort(kind="stable")[counts[0] :]
    place = np.full(len(ids), -1)
    place[order] = np.arange(len(order))
    order_P, place_N = (torch.from_numpy(x).to(flat_N.device) for x in (order, place))
    return Grouping(order_P, place_N, counts[1:])


def weighted_sum(y_PD: Tensor, rows: Grouping, routing: Routing, out_TD: Tensor) -> Tensor:
    """out[t] = sum over k = 0..K-1, in this order and in fp32, of weights[t, k] * y[place of (t, k)]; one rounding.

    Pairs that went nowhere add zero. y may have more rows than were grouped.
    """
    tokens, top_k = routing.ids_TK.shape
    if not len(rows.order_P):
        return out_TD.zero_()
    complete = len(rows.order_P) == len(rows.place_N)
    step = max(1, TERMS // (top_k * y_PD.shape[1]))
    for start in range(0, tokens, step):
        place_M = rows.place_N[start * top_k : (start + step) * top_k]
        found_MD = y_PD.index_select(0, place_M if complete else place_M.clamp(min=0))
        if not complete:
            found_MD.masked_fill_((place_M < 0)[:, None], 0)
        terms_TKD = found_MD.view(-1, top_k, y_PD.shape[1]) * routing.weights_TK[start : start + step, :, None]
        total_TD, *rest = terms_TKD.unbind(1)
        for term_TD in rest:
            total_TD += term_TD
        out_TD[start : start + step] = total_TD
    return out_TD
