"""The attention block of a decoder: project, normalise, rotate, write to the cache, attend, project back.

T tokens (padded rows included), D model width, H heads, G KV heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.layers.inputs import LayerKV
from moeserve.loader.spec import ModelSpec
from moeserve.ops.attention import AttentionPlan
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What the attention blocks of one KV group share in one step."""

    cos_Td: Tensor
    sin_Td: Tensor
    cells_T: Tensor  # of the real tokens
    plan: AttentionPlan


class Attention:
    """Grouped-query attention over the paged cache.

    qkv: D -> (H + 2G) * d, queries first. head_norms: fp32 [H + G, d], or full_norms: fp32 weights of all query heads
    together and of all key heads together (OLMoE).
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        qkv: Linear,
        out: Linear,
        head_norms: Tensor | None = None,
        full_norms: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._ops = ops
        self._qkv = qkv
        self._out = out
        self._head_norms = head_norms
        self._full_norms = full_norms
        self._heads = spec.num_heads
        self._kv_heads = spec.num_kv_heads
        self._dim = spec.head_dim
        self._scale = spec.scale
        self._eps = spec.norm_eps
        self._clip = spec.clip_qkv

    def __call__(self, x_TD: Tensor, step: AttentionStep, kv: LayerKV) -> Tensor:
        ops = self._ops
        qkv = self._qkv(x_TD)
        qkv_THd = qkv.view(qkv.shape[0], -1, self._dim)
        both = self._heads + self._kv_heads
        qk_THd, v_TGd = self._normalise(qkv_THd[:, :both].float()), qkv_THd[:, both:]
        if self._clip is not None:
            qk_THd, v_TGd = qk_THd.clamp(-self._clip, self._clip), v_TGd.clamp(-self._clip, self._clip)
        rotated = ops.rotary(qk_THd, step.cos_Td, step.sin_Td)
        # The softmax scale goes into the queries while they are still fp32: one rounding instead of two.
        rotated[:, : self._heads] *= self._scale
        rotated = rotated.to(x_TD.dtype)
        real = step.plan.num_tokens
        ops.write_kv(rotated[:real, self._heads :], v_TGd[:real], kv.k, kv.v, step.cells_T)
        return self._out(ops.attention(rotated[:, : self._heads], kv.k, kv.v, step.plan))

    def _normalise(self, qk_THd: Tensor) -> Tensor:
        if self._head_norms is not None:
            return torch.rms_norm(qk_THd, (self._dim,), None, self._eps) * self._head_norms
        if self._full_norms is not None:
            parts = qk_THd[:, : self._heads], qk_THd[:, self._heads :]
            normed = [
                self._ops.rms_norm(part.flatten(1), weight, self._eps).view(part.shape)
                for part, weight in zip(parts, self._full_norms, strict=True)
            ]
            return torch.cat(normed, dim=1)
        return qk_THd
