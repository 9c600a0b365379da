"""The Triton kernels (kernels/) with the interfaces of the ops table.

Imported only where they serve: importing triton takes half a second. T tokens, H heads and G KV heads of this rank, d
head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.kernels import paged_attention
from moeserve.kernels.align import align_rows
from moeserve.kernels.attention_plan import Bounds
from moeserve.kernels.linear import linear
from moeserve.kernels.paged_attention import AttentionMetadata, AttentionShape
from moeserve.kernels.qk_norm_rope_cache import qk_norm_rope_cache as qk_norm_rope_cache_kernel
from moeserve.kernels.route import route
from moeserve.kernels.rows import add_rms_norm, embedding, rms_norm, silu_mul
from moeserve.ops.linear import Linear, plain_packer
from moeserve.ops.quantised import Quantised, Weight
from moeserve.ops.triton_weights import WEIGHT_ONLY

if TYPE_CHECKING:
    from moeserve.ops.inputs import GroupInputs, PlanAttention, StepInputs
    from moeserve.ops.qk_norm_rope_cache import HeadRule

__all__ = ["add_rms_norm", "attention", "embedding", "qk_norm_rope_cache", "rms_norm", "route", "silu_mul"]

BLOCKS_M = (16, 32, 64, 128)  # rows of a tile that launches may ask for
_pack_plain = plain_packer(1)


class TritonLinear:
    """y = x W^T + b by the kernel whose sums have one order for any number of rows.

    x [[1, 2]], weight [[3, 4]], bias [5] -> [[16]]
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight.contiguous(), bias

    def __call__(self, x_MK: Tensor) -> Tensor:
        return linear(x_MK, self.weight, self.bias)


class QuantisedLinear:
    """y = x W^T + b with a weight of 4 or 8 bits, widened in registers: a grouped product with one expert.

    x [M, 64] of ones, weight [1, 64] of int8 1 with scale 1/4, bias [5] -> [M, 1] of 21
    """

    __slots__ = ("_bias", "_num_outputs", "_weight")

    def __init__(self, weight: Quantised, bias: Tensor | None = None) -> None:
        self._weight, self._bias, self._num_outputs = WEIGHT_ONLY.lay(weight[None]), bias, weight.shape[0]
        for block_m in BLOCKS_M:
            align_rows(1, block_m, weight.values.device)  # its tables must not be made while a graph is recorded

    def __call__(self, x_MK: Tensor) -> Tensor:
        rows = x_MK.shape[0]
        config = WEIGHT_ONLY.launch(rows, self._weight, x_MK)
        to = align_rows(rows, config["block_m"], x_MK.device)
        y_MN = x_MK.new_empty((rows, self._num_outputs), dtype=x_MK.dtype if self._bias is None else torch.float32)
        WEIGHT_ONLY.down(x_MK, self._weight, to, config, y_MN)
        return y_MN if self._bias is None else (y_MN + self._bias).to(x_MK.dtype)


def pack_exact(weight: Weight, bias: Tensor | None) -> Linear:
    """Linear layers by Triton, batch-invariant. A tensor that is a part of a larger one is copied."""
    if isinstance(weight, Quantised):
        return QuantisedLinear(weight, bias)
    return TritonLinear(weight.clone() if weight.untyped_storage().nbytes() > weight.nbytes else weight, bias)


def pack_fast(weight: Weight, bias: Tensor | None) -> Linear:
    """Linear layers by torch, and by Triton where weights are quantised."""
    return QuantisedLinear(weight, bias) if isinstance(weight, Quantised) else _pack_plain(weight, bias)


def qk_norm_rope_cache(
    qkv_THd: Tensor,
    rule: HeadRule,
    cos_T1d: Tensor,
    sin_T1d: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    normed_THd: Tensor | None = None,
) -> Tensor:
    """See ops/qk_norm_rope_cache.py."""
    return qk_norm_rope_cache_kernel(
        qkv_THd, rule.num_heads, rule.num_kv_heads, rule.scale, cos_T1d, sin_T1d, k_cache, v_cache, slot_mapping_T,
        eps=rule.eps, norms=rule.norms, clip=rule.clip, normed_THd=normed_THd,
    )  # fmt: skip


def planner(dtype: torch.dtype, exact: bool) -> PlanAttention:
    """Returns `plan_attention` for queries of `dtype`. exact: bits depend on nothing but query and context."""

    def plan_attention(
        group: GroupInputs, step: StepInputs, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> AttentionMetadata:
        """See `PlanAttention`."""
        starts_R, offsets_R1 = step.rows_on_device
        counts_R = step.offsets_R1[1:] - step.offsets_R1[:-1]
        bounds = Bounds(
            rows=len(counts_R),
            tokens=int(step.offsets_R1[-1]),
            new_tokens=int(counts_R.max()),
            context=int((step.starts_R + counts_R).max()),
        )
        shape = AttentionShape(num_heads, num_kv_heads, head_dim, group.block_size, dtype, group.window)
        return paged_attention.plan_attention(group.blocks_RN, starts_R, offsets_R1, shape, bounds, invariant=exact)

    return plan_attention


def attention(
    q_THd: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionMetadata, out: Tensor | None = None
) -> Tensor:
    """Attends to the paged cache; see kernels/paged_attention.py."""
    return paged_attention.attention(q_THd, k_cache, v_cache, plan, out=out)
