"""Pure functions that every backend shares: sorting rows by expert, and the owner's weighted sum."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.moe.routing import Routing

TERMS = 1 << 20  # fp32 elements that the weighted sum holds at a time


def group_rows(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, NDArray[np.int64]]:
    """The stable order that makes each expert's rows contiguous, and how many rows each expert has.

    order_P holds t * K + k of every routed pair; pairs with id -1 are left out.
    ids [[1], [0], [-1], [1]], 2 experts -> order [1, 0, 3], counts [1, 2]
    """
    flat_N = ids_TK.reshape(-1)
    if flat_N.device.type == "cpu":  # numpy sorts few small integers several times faster
        flat = flat_N.numpy().astype(np.int16)
        counts = np.bincount(flat + 1, minlength=num_experts + 1)
        order = torch.from_numpy(flat.argsort(kind="stable"))
    else:
        counts = torch.bincount(flat_N + 1, minlength=num_experts + 1).cpu().numpy()
        order = flat_N.argsort(stable=True)
    return order[counts[0] :], counts[1:]


def weighted_sum(y_PD: Tensor, order_P: Tensor, routing: Routing, out_TD: Tensor) -> Tensor:
    """out[t] = sum over k = 0..K-1, in this order and in fp32, of weights[t, k] * y[row of (t, k)]; one rounding.

    order_P as from `group_rows`; pairs that are missing from it add zero.
    """
    tokens, top_k = routing.ids_TK.shape
    place_N = torch.full((tokens * top_k,), -1, dtype=torch.int64, device=y_PD.device)
    place_N[order_P] = torch.arange(len(order_P), device=y_PD.device)
    complete = len(order_P) == tokens * top_k
    if not len(order_P):
        return out_TD.zero_()
    step = max(1, TERMS // (top_k * y_PD.shape[1]))
    for start in range(0, tokens, step):
        place_TK = place_N[start * top_k : (start + step) * top_k].view(-1, top_k)
        terms_TKD = y_PD.index_select(0, place_TK.view(-1).clamp(min=0)).view(*place_TK.shape, -1)
        terms_TKD = terms_TKD * routing.weights_TK[start : start + step, :, None]
        if not complete:
            terms_TKD.masked_fill_((place_TK < 0)[:, :, None], 0)
        total, *rest = terms_TKD.unbind(1)
        for term_TD in rest:
            total += term_TD
        out_TD[start : start + step] = total
    return out_TD
