"""Paged attention by the native kernels: the meaning of ops/attention.py, for any context length without copies.

One function serves prefill and decode; its bits depend on query and context alone (csrc/kernels/attention.hpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.ops.inputs import entry_width
from moeserve.ops.native import native
from moeserve.ops.native_rows import KV_TYPES

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class NativeAttentionMetadata:
    """The attention metadata of one step; keeps the tables alive that `pieces` points to."""

    num_tokens: int
    pieces: Any  # _native.AttentionPlan
    blocks_RN: Tensor
    shape: tuple[int, int, int, int]  # H, G, d, block size


def serves(head_dim: int) -> bool:
    """Returns whether the kernels know heads of this width."""
    return head_dim % 8 == 0 and 8 <= head_dim <= MAX_HEAD_DIM


def plan_attention(
    blocks_RN: Tensor,
    block_size: int,
    window: int | None,
    starts_R: NDArray[np.int32],
    offsets_R1: NDArray[np.int32],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> NativeAttentionMetadata:
    """Cuts attention into pieces; arguments as in ops/attention.py. blocks_RN: int64, contiguous."""
    assert blocks_RN.dtype == torch.int64, blocks_RN.dtype
    assert blocks_RN.is_contiguous(), blocks_RN.stride()
    pieces = _module().AttentionPlan(
        blocks_RN.data_ptr(), blocks_RN.shape[1], block_size, window, starts_R, offsets_R1, num_heads, num_kv_heads,
        head_dim,
    )  # fmt: skip
    return NativeAttentionMetadata(
        pieces.num_tokens, pieces, blocks_RN, (num_heads, num_kv_heads, head_dim, block_size)
    )


def attention(
    q_THd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: NativeAttentionMetadata,
    *,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attends to the paged cache: [T', H * d] of q's dtype, zero in rows beyond the metadata's tokens. All sums in
    fp32.

    q_THd: already scaled; heads of a token lie side by side, tokens may be further apart. soft_cap: scores become
    soft_cap * tanh(score / soft_cap); 0 leaves them. sinks_H: fp32, one score per head that takes weight and gives no
    value.
    """
    num_rows, num_heads, d = q_THd.shape
    assert (num_heads, k_cache.shape[2], d, k_cache.shape[1]) == plan.shape, (q_THd.shape, k_cache.shape, plan.shape)
    assert q_THd.stride()[1:] == (d, 1), q_THd.stride()
    assert k_cache.is_contiguous(), k_cache.stride()
    assert v_cache.is_contiguous(), v_cache.stride()
    assert k_cache.dtype == v_cache.dtype, (k_cache.dtype, v_cache.dtype)
    assert k_cache.shape[3] == v_cache.shape[3] == entry_width(d, k_cache.dtype), (k_cache.shape, v_cache.shape)
    if sinks_H is not None:
        assert sinks_H.dtype == torch.float32, sinks_H.dtype
        assert sinks_H.is_contiguous(), sinks_H.stride()
        assert sinks_H.shape == (num_heads,), sinks_H.shape
    out = torch.empty((num_rows, num_heads * d), dtype=q_THd.dtype)
    plan.pieces.run(
        q_THd.data_ptr(), q_THd.stride(0), KV_TYPES[q_THd.dtype], k_cache.data_ptr(), v_cache.data_ptr(),
        KV_TYPES[k_cache.dtype], out.data_ptr(), num_rows, soft_cap, 0 if sinks_H is None else sinks_H.data_ptr(),
    )  # fmt: skip
    return out


def _module() -> Any:
    module = native()
    assert module is not None, "the native module was not built"
    return module
