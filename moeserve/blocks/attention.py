"""The attention block of a decoder: project, normalise, rotate, write to the cache, attend, project back.

T tokens (padded rows included), D model width, H heads and G KV heads of this rank, d head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.linear import ColumnLinear
from moeserve.comm.tensor import TensorParallel
from moeserve.loader.spec import Heads, ModelSpec
from moeserve.ops.elementwise import HeadRule
from moeserve.ops.inputs import Cut, LayerKV
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The inputs of one step that the attention blocks of one KV group share."""

    cos_T1d: Tensor  # as ops/elementwise.py's `rotary` takes them
    sin_T1d: Tensor
    slot_mapping_T: Tensor  # of the real tokens
    plan: Any  # what `ops.plan_attention` made, or, where `cut` is, what will make it
    cut: Cut | None = None

    def attend(self, ops: Ops, q_THd: Tensor, kv: LayerKV) -> Tensor:
        """Returns the attention to the cache, [T, H * d]."""
        if self.cut is None:
            return ops.attention(q_THd, kv.k, kv.v, self.plan)
        return self.cut(q_THd, self.plan, lambda q, plan, out: ops.attention(q, kv.k, kv.v, plan, out=out))


@dataclass(eq=False, repr=False)
class Attention:
    """Grouped-query attention of this rank's heads over its paged cache; head outputs are gathered before `out`.

    qkv: D -> (H + 2G) * d, queries first. head_norms: fp32 [H + G, d], a norm per head. full_norms: fp32 weights of the
    norms over all query heads of the model together and over all its key heads together (OLMoE).
    """

    spec: ModelSpec
    ops: Ops
    heads: Heads
    tp: TensorParallel
    qkv: Linear
    out: ColumnLinear
    head_norms: Tensor | None = None
    full_norms: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        spec, ops, heads = self.spec, self.ops, self.heads
        self._attend = ops.opaque(AttentionStep.attend)  # which may end one recording and begin another
        clip = math.inf if spec.clip_qkv is None else spec.clip_qkv
        self._rule = HeadRule(heads.count, heads.count_kv, spec.scale, spec.norm_eps, self.head_norms, clip)
        self._block = None
        if ops.attention_block is not None and self.full_norms is None:
            last = self.out.part if self.tp.size == 1 else None
            self._block = ops.attention_block(self.qkv, last, self._rule, spec.head_dim, ops.dtype)

    def __call__(self, x_TD: Tensor, step: AttentionStep, kv: LayerKV, channel: int) -> Tensor:
        """Returns the attention block's output [T, D]; writes the new keys and values to `kv` first."""
        if self._block is not None:
            y = self._block(x_TD, step.cos_T1d, step.sin_T1d, kv.k, kv.v, step.slot_mapping_T, step.plan)
            return y if self.tp.size == 1 else self.out(self.tp.gather_columns(y, channel), channel)
        qkv = self.qkv(x_TD)
        normed = None
        if self.full_norms is not None:
            qkv_THd = qkv.view(qkv.shape[0], -1, self.spec.head_dim)
            normed = self._normalise_fully(qkv_THd, self.full_norms, channel)
        q_THd = self.ops.qk_norm_rope_cache(
            qkv, self._rule, step.cos_T1d, step.sin_T1d, kv.k, kv.v, step.slot_mapping_T, normed
        )
        attended = self._attend(step, self.ops, q_THd, kv)
        return self.out(self.tp.gather_columns(attended, channel), channel)

    def _normalise_fully(self, qkv_THd: Tensor, weights: tuple[Tensor, Tensor], channel: int) -> Tensor:
        """Queries and keys in fp32, after norms over all ranks' heads: those are gathered, since a sum of the ranks'
        sums would round differently."""
        size, rank, heads = self.tp.size, self.tp.rank, self._rule.num_heads
        holders = max(1, size // self.spec.num_kv_heads)  # ranks that have the same keys
        gathered = self.tp.gather_columns(qkv_THd[:, : heads + self._rule.num_kv_heads].flatten(1), channel)
        all_TRHd = gathered.view(len(gathered), size, -1, self.spec.head_dim)
        parts = all_TRHd[:, :, :heads], all_TRHd[:, ::holders, heads:]
        mine = []
        for part, weight, place in zip(parts, weights, (rank, rank // holders), strict=True):
            normed = self.ops.rms_norm(part.flatten(1).float(), weight, self._rule.eps)
            mine.append(normed.view(part.shape)[:, place])
        return torch.cat(mine, dim=1)
