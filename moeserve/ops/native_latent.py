"""The native (C++) fused MLA layer, and its selection of tokens. CPU tensors only.

Shapes: T tokens, D model width, H heads of this rank, L rank of the latents, C width of a cache
entry.
"""

from typing import Any

import torch
from torch import Tensor

from moeserve.ops.inputs import HeadShape, RopeCacheInputs
from moeserve.ops.latent import LatentRule, PackHeads
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeAttentionMetadata, NativeHeads, NativeLinear
from moeserve.ops.native_rows import TYPES
from moeserve.ops.selected import MAX_QUERIES, Selection

_native: Any = native()
_empty = torch.empty


class LatentBlock:
    """A fused MLA layer (csrc/bindings/latent.cpp), with the bits of separate calls.

    It computes queries, latents, `latent_rope_cache`, the products per head, attention and, if
    given, the output product: x [T, D] -> [T, D], or [T, H * v] without the output product.

    narrow: the product to compressed queries, and the fp32 weights of their norm, which has the
        epsilon of `rule`.
    """

    __slots__ = ("_block", "_columns", "_dtype", "_keep", "_shape")

    def __init__(
        self,
        narrow: tuple[NativeLinear, Tensor] | None,
        queries: NativeLinear,
        latents: NativeLinear,
        up: NativeHeads,
        down: NativeHeads,
        out: NativeLinear | None,
        rule: LatentRule,
        dtype: torch.dtype,
    ) -> None:
        self._keep = narrow, queries, latents, up, down, out, rule  # the block reads their memory
        self._dtype = dtype
        entry = rule.rank + rule.rope_dim
        self._shape = HeadShape(rule.num_heads, 1, entry, rule.rank)
        assert queries.matrix.columns == rule.num_heads * (rule.nope_dim + rule.rope_dim), (
            queries.matrix,
            rule,
        )
        assert latents.matrix.columns == entry, (latents.matrix.columns, rule)
        self._columns = rule.num_heads * down.width if out is None else out.matrix.columns
        self._block = _native.LatentBlock(
            TYPES[dtype], narrow and narrow[0].matrix, narrow[1].data_ptr() if narrow else 0,
            queries.matrix,
            latents.matrix, up.matrices, down.matrices, None if out is None else out.matrix,
            rule.nope_dim,
            rule.rope_dim, rule.norm_L.data_ptr(), rule.eps, rule.scale,
        )  # fmt: skip

    def __call__(
        self,
        x_TD: Tensor,
        rope_cache: RopeCacheInputs,
        latent_cache: Tensor,
        plan: NativeAttentionMetadata,
    ) -> Tensor:
        """Run the block. For the arguments see `latent_rope_cache` and `attention`.

        All have x's dtype, and are contiguous, except for the stride between rows of x.
        """
        cos_T1p, sin_T1p, slot_mapping_T = rope_cache
        assert x_TD.dtype is latent_cache.dtype is self._dtype, (
            x_TD.dtype,
            latent_cache.dtype,
            self._dtype,
        )
        assert x_TD.stride(1) == 1, x_TD.stride()
        assert latent_cache.shape[1:] == (plan.block_size, 1, self._shape.dim), (
            latent_cache.shape,
            self._shape,
        )
        assert plan.shape == self._shape, (plan.shape, self._shape)
        rows = x_TD.shape[0]
        y = _empty((rows, self._columns), dtype=self._dtype)
        self._block.run(
            plan.pieces, x_TD.data_ptr(), x_TD.stride(0), rows, cos_T1p.data_ptr(),
            sin_T1p.data_ptr(),
            slot_mapping_T.data_ptr(), latent_cache.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        return y


def index_select(
    q_SJd: Tensor, weights_SJ: Tensor, cache: Tensor, selection: Selection, pack_heads: PackHeads
) -> Tensor:
    """Native `index_select` of ops/selected.py (csrc/kernels/index_scores.hpp)."""
    num_queries, heads, dim = q_SJd.shape
    assert cache.shape[2:] == (1, dim), (cache.shape, q_SJd.shape)
    assert cache.is_contiguous(), cache.stride()
    assert weights_SJ.shape == (num_queries, heads), (weights_SJ.shape, q_SJd.shape)
    q_SJd = q_SJd.float().contiguous()
    weights_SJ = weights_SJ.float().contiguous()
    out_SK = torch.empty((num_queries, selection.top_k), dtype=torch.int64)
    for request in selection.requests:
        first = request.rows.start
        count = len(request.rows)
        slots_L = request.slots_L
        assert slots_L.is_contiguous(), slots_L.stride()
        assert len(slots_L) == request.first + count, (slots_L.shape, request)
        scores_ML = torch.empty((min(MAX_QUERIES, count), len(slots_L)))
        _native.index_select(
            TYPES[cache.dtype], cache.data_ptr(), dim, slots_L.data_ptr(), request.first, count,
            heads,
            q_SJd[first:].data_ptr(), weights_SJ[first:].data_ptr(), selection.top_k,
            len(scores_ML),
            scores_ML.data_ptr(), out_SK[first:].data_ptr(),
        )  # fmt: skip
    return out_SK
