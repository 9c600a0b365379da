"""Pure functions that every backend shares: sorting rows by expert, and the owner's weighted sum."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.moe.routing import Routing


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
    if len(order_P) == tokens * top_k:
        home_ND = torch.empty((tokens * top_k, y_PD.shape[1]), dtype=y_PD.dtype, device=y_PD.device)
    else:
        home_ND = y_PD.new_zeros((tokens * top_k, y_PD.shape[1]))
    home_ND.index_copy_(0, order_P, y_PD)
    terms_TKD = home_ND.view(tokens, top_k, -1) * routing.weights_TK[:, :, None]
    first, *rest = terms_TKD.unbind(1)
    for term_TD in rest:
        first += term_TD
    return out_TD.copy_(first)
