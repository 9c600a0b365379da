"""A decoder layer's two halves in one native call each, or all layers in one (csrc/bindings/layer.cpp): same bits as
call after call.

Between small calls the interpreter takes longer than they do, and its own code has left the caches while weights
streamed through them. T tokens, D model width, H heads and G KV heads of this rank, d head width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.ops.native import native
from moeserve.ops.native_attention import NativePlan
from moeserve.ops.native_linear import NativeLinear, native_type
from moeserve.ops.prologue import HeadRule

_native: Any = native()
_empty = torch.empty


class AttentionBlock:
    """Projection, prologue, attention and, if given, the product behind it: x [T, D] -> [T, D], or [T, H * d]."""

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
        cells_T: Tensor,
        plan: NativePlan,
    ) -> Tensor:
        """Arguments as `prologue` and `attention` take them, all contiguous; x and both caches of one dtype."""
        assert x_TD.dtype is k_cache.dtype is self._dtype, (x_TD.dtype, k_cache.dtype, self._dtype)
        assert plan.shape == (*self._shape, k_cache.shape[1]), (plan.shape, self._shape, k_cache.shape)
        rows = x_TD.shape[0]
        y = _empty((rows, self._columns), dtype=self._dtype)
        self._block.run(
            plan.pieces, x_TD.data_ptr(), x_TD.stride(0), rows, cos_T1d.data_ptr(), sin_T1d.data_ptr(),
            cells_T.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        return y


class ExpertsBlock:
    """Router, experts and weighted sum of rows that stay on their rank: x [T, D] -> [T, D]."""

    __slots__ = ("_block", "_keep", "_num_experts")

    def __init__(self, router: NativeLinear, top_k: int, score: str, renormalize: bool, dtype: torch.dtype) -> None:
        self._keep = router
        self._num_experts = router.matrix.columns
        self._block = _native.ExpertsBlock(
            native_type(dtype), router.matrix, top_k, score == "softmax_selected", renormalize
        )

    def __call__(self, x_TD: Tensor, packed: Any) -> tuple[Tensor, NDArray[np.int64]]:
        """(result, rows of each expert). packed: what `NativeExperts.pack` made, expert e in slot e."""
        assert x_TD.dtype is packed.dtype, (x_TD.dtype, packed.dtype)
        assert x_TD.is_contiguous(), x_TD.stride()
        out_TD = _empty(x_TD.shape, dtype=x_TD.dtype)
        counts_E = np.empty(self._num_experts, np.int64)
        self._block.run(packed.slots, counts_E, x_TD.data_ptr(), x_TD.shape[0], out_TD.data_ptr())
        return out_TD, counts_E


@dataclass(frozen=True, slots=True)
class StackLayer:
    """Both halves of a layer, the norm between them, and the KV group whose plan and cells it takes."""

    attention: AttentionBlock  # with the product behind it
    norm_D: Tensor
    experts: ExpertsBlock
    group: int


class LayerStack:
    """Layers of experts whose rows all stay on their rank, in one call: for small steps the interpreter's share of the
    time, and its lock is free meanwhile. last_norm_D: what follows the last layer."""

    def __init__(self, layers: Sequence[StackLayer], norms: Sequence[Tensor], eps: float, dtype: torch.dtype) -> None:
        self._keep = layers, norms  # whose memory the stack reads
        self._shape = len(layers), layers[0].experts._num_experts
        self._stack = _native.LayerStack(native_type(dtype), eps)
        for layer, next_norm in zip(layers, norms, strict=True):
            self._stack.add(
                layer.attention._block, layer.group, layer.norm_D.data_ptr(), layer.experts._block, next_norm.data_ptr()
            )

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor,
        cos_T1d: Tensor,
        sin_T1d: Tensor,
        steps: Sequence[tuple[NativePlan, Tensor]],
        caches: Sequence[tuple[Tensor, Tensor]],
        packed: Sequence[Any],
    ) -> NDArray[np.int64]:
        """Turns x, the first norm's result, into the last one's, and returns the rows of each expert [layers, E].

        residual_TD is used up. steps: plan and cells of each KV group. caches: keys and values of each layer. All
        contiguous, as for both blocks.
        """
        y_TD = _empty(x_TD.shape, dtype=x_TD.dtype)
        counts_LE = np.empty(self._shape, np.int64)
        self._stack.run(
            [(plan.pieces, cells_T.data_ptr()) for plan, cells_T in steps],
            cos_T1d.data_ptr(),
            sin_T1d.data_ptr(),
            [(k.data_ptr(), v.data_ptr()) for k, v in caches],
            [each.slots for each in packed],
            counts_LE,
            x_TD.data_ptr(),
            residual_TD.data_ptr(),
            y_TD.data_ptr(),
            x_TD.shape[0],
        )
        return counts_LE
