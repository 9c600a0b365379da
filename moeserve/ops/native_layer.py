"""A decoder layer's two halves in one native call each (csrc/bindings/layer.cpp), with the bits of separate calls.

Small calls take less time than the interpreter between them, whose own code has left the caches while weights streamed
through. T tokens, D model width, H heads and G KV heads of this rank, d head width, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.ops.kv_entries import entry_width
from moeserve.ops.native import native
from moeserve.ops.native_attention import NativeAttentionMetadata
from moeserve.ops.native_linear import NativeLinear, native_type
from moeserve.ops.native_rows import KV_TYPES
from moeserve.ops.qk_norm_rope_cache import HeadRule

_native: Any = native()
_empty = torch.empty


class AttentionBlock:
    """The QKV product, `qk_norm_rope_cache`, attention and, if given, the output product in one call.

    x [T, D] -> [T, D], or [T, H * d] without the output product.
    """

    __slots__ = ("_block", "_columns", "_dtype", "_keep", "_shape")

    def __init__(
        self, qkv: NativeLinear, out: NativeLinear | None, rule: HeadRule, dim: int, dtype: torch.dtype
    ) -> None:
        self._keep = qkv, out, rule  # whose memory the block reads
        self._dtype = dtype
        self._shape = rule.num_heads, rule.num_kv_heads, dim
        self._columns = rule.num_heads * dim if out is None else out.matrix.columns
        self._block = _native.AttentionBlock(
            native_type(dtype), qkv.matrix, None if out is None else out.matrix, rule.num_heads, rule.num_kv_heads, dim,
            0 if rule.norms is None else rule.norms.data_ptr(), rule.eps, rule.clip, rule.scale,
        )  # fmt: skip

    def __call__(
        self,
        x_TD: Tensor,
        cos_T1d: Tensor,
        sin_T1d: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping_T: Tensor,
        plan: NativeAttentionMetadata,
    ) -> Tensor:
        """Takes what `qk_norm_rope_cache` and `attention` take, all contiguous; both caches of x's dtype or int8."""
        assert x_TD.dtype is self._dtype, (x_TD.dtype, self._dtype)
        assert k_cache.dtype in (self._dtype, torch.int8), (k_cache.dtype, self._dtype)
        assert k_cache.shape[3] == entry_width(self._shape[2], k_cache.dtype), k_cache.shape
        assert plan.shape == (*self._shape, k_cache.shape[1]), (plan.shape, self._shape, k_cache.shape)
        rows = x_TD.shape[0]
        y = _empty((rows, self._columns), dtype=self._dtype)
        self._block.run(
            plan.pieces, x_TD.data_ptr(), x_TD.stride(0), rows, cos_T1d.data_ptr(), sin_T1d.data_ptr(),
            slot_mapping_T.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), KV_TYPES[k_cache.dtype], y.data_ptr(),
        )  # fmt: skip
        return y


class ExpertsBlock:
    """Router, experts and weighted sum of tokens that stay on their rank, in one call: x [T, D] -> [T, D]."""

    __slots__ = ("_block", "_keep", "_num_experts")

    def __init__(self, router: NativeLinear, top_k: int, score: str, renormalize: bool, dtype: torch.dtype) -> None:
        self._keep = router
        self._num_experts = router.matrix.columns
        self._block = _native.ExpertsBlock(
            native_type(dtype), router.matrix, top_k, score == "softmax_selected", renormalize
        )

    def __call__(self, x_TD: Tensor, packed: Any, num_tokens: int | Tensor) -> tuple[Tensor, NDArray[np.int64]]:
        """Returns the sums [T, D] and the rows of each expert. Rows from num_tokens on are padding and become zero.

        packed: what `NativeExperts.pack` made; expert e is local expert e.
        """
        assert isinstance(num_tokens, int), num_tokens
        assert x_TD.dtype is packed.dtype, (x_TD.dtype, packed.dtype)
        assert x_TD.is_contiguous(), x_TD.stride()
        experts = packed.bytes_eB
        out_TD = _empty(x_TD.shape, dtype=x_TD.dtype)
        counts_E = np.empty(self._num_experts, np.int64)
        self._block.run(
            packed.gate_up, packed.down, experts.data_ptr(), experts.shape[1], counts_E, x_TD.data_ptr(), num_tokens,
            out_TD.data_ptr(),
        )  # fmt: skip
        if num_tokens < len(out_TD):
            out_TD[num_tokens:] = 0
        return out_TD, counts_E
