"""`index_select` of ops/selected.py in native code (csrc/kernels/index_scores.hpp, csrc/core/top_k.cpp), with the same
signature and meaning; CPU tensors only.
"""

from typing import Any

import torch
from torch import Tensor

from moeserve.ops.latent import PackHeads
from moeserve.ops.native import native
from moeserve.ops.native_rows import TYPES
from moeserve.ops.selected import QUERIES, Selection

_native: Any = native()


def index_select(
    q_SJd: Tensor, weights_SJ: Tensor, cache: Tensor, selection: Selection, pack_heads: PackHeads
) -> Tensor:
    """Returns the cache rows of the chosen tokens, int64 [S, K]; see ops/selected.py."""
    num_queries, heads, dim = q_SJd.shape
    assert cache.shape[2:] == (1, dim), (cache.shape, q_SJd.shape)
    assert cache.is_contiguous(), cache.stride()
    assert weights_SJ.shape == (num_queries, heads), (weights_SJ.shape, q_SJd.shape)
    q_SJd, weights_SJ = q_SJd.float().contiguous(), weights_SJ.float().contiguous()
    out_SK = torch.empty((num_queries, selection.top_k), dtype=torch.int64)
    for request in selection.requests:
        first, count, slots_L = request.rows.start, len(request.rows), request.slots_L
        assert slots_L.is_contiguous(), slots_L.stride()
        assert len(slots_L) == request.first + count, (slots_L.shape, request)
        scores_ML = torch.empty((min(QUERIES, count), len(slots_L)))
        _native.index_select(
            TYPES[cache.dtype], cache.data_ptr(), dim, slots_L.data_ptr(), request.first, count, heads,
            q_SJd[first:].data_ptr(), weights_SJ[first:].data_ptr(), selection.top_k, len(scores_ML),
            scores_ML.data_ptr(), out_SK[first:].data_ptr(),
        )  # fmt: skip
    return out_SK
