"""QK-norm, rotary embedding and KV write: all that lies between attention's projection and attention itself.

T tokens (padded rows included), H heads and G KV heads of this rank, d head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.ops.elementwise import rotary, write_kv


@dataclass(frozen=True, slots=True)
class HeadRule:
    """The treatment of the heads of one attention block.

    scale: of the softmax. norms: fp32 weights [H + G, d] of a norm per head, queries first. clip: the largest magnitude
    that normed heads and values may have; infinity for no limit.
    """

    num_heads: int
    num_kv_heads: int
    scale: float
    eps: float
    norms: Tensor | None = None
    clip: float = math.inf


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
    """Norms, clips and rotates heads, writes keys and values to the KV cache, and returns scaled queries [T, H, d].

    qkv_THd: [T, H + 2G, d], queries first. slot_mapping_T: of the first tokens; the rest is padding. normed_THd: fp32
    [T, H + G, d], contiguous: queries and keys in place of qkv's. cos and sin as `rotary` takes them. All in fp32 until
    one rounding.
    """
    both = rule.num_heads + rule.num_kv_heads
    qk_THd = qkv_THd[:, :both].float() if normed_THd is None else normed_THd
    v_TGd = qkv_THd[:, both:]
    if rule.norms is not None:
        qk_THd = torch.rms_norm(qk_THd, qk_THd.shape[2:], None, rule.eps) * rule.norms
    if rule.clip < math.inf:
        qk_THd, v_TGd = qk_THd.clamp(-rule.clip, rule.clip), v_TGd.float().clamp(-rule.clip, rule.clip)
    rotated_THd = rotary(qk_THd, cos_T1d, sin_T1d)
    # The softmax scale goes into the queries while they are still fp32: one rounding instead of two.
    rotated_THd[:, : rule.num_heads] *= rule.scale
    real = slot_mapping_T.shape[0]
    write_kv(rotated_THd[:real, rule.num_heads :], v_TGd[:real], k_cache, v_cache, slot_mapping_T)
    return rotated_THd[:, : rule.num_heads].to(qkv_THd.dtype)
