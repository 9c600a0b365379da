"""Norms, rotary embedding, activations and look-ups: everything that is neither a matrix product nor attention.

T tokens (padded rows included), D width, H heads and G KV heads of this rank, d head width (v of values), I expert
width. Sums run in
fp32 inside one row. torch's vectorised loops compute the last few elements of a range with scalar code, which may round
exp() otherwise; `row_pieces` keeps every row whole, so that a row's bits depend neither on its place in the batch nor
on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.ops.inputs import to_entries

TORCH_GRAIN = 32_768  # elements; torch gives a thread no less than this in an elementwise loop
LANES = 64  # torch's vectorised loops work on this many elements at a time, or on half or a quarter of them


@dataclass(frozen=True, slots=True)
class HeadRule:
    """The treatment of the heads of one attention block.

    scale: of the softmax. norms: fp32 weights [H + G, d] of a norm per head, queries first. clip: the largest magnitude
    that normed heads and values may have; infinity for no limit. v_dim: of values; None: d. norm_last: norms come after
    the rotation (Hunyuan). norm_values: values have an RMS norm per head without weights (Gemma 4).
    """

    num_heads: int
    num_kv_heads: int
    scale: float
    eps: float
    norms: Tensor | None = None
    clip: float = math.inf
    v_dim: int | None = None
    norm_last: bool = False
    norm_values: bool = False


def row_pieces(rows: int, width: int, threads: int) -> Iterator[slice]:
    """Yields parts of `rows` that torch, which splits a part evenly by elements over its threads, splits between rows.

    5 rows of 32,768 with 2 threads -> slice(0, 4), slice(4, 5)
    """
    start = 0
    while start < rows:
        size = rows - start if width <= TORCH_GRAIN else 1  # a row that is always split is split the same always
        while size > 1 and size % min(threads, -(-size * width // TORCH_GRAIN)):
            size -= 1
        yield slice(start, start + size)
        start += size


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, rounded once to x's dtype; weight fp32.

    x [3, 4] (weight 1, eps 0) -> [0.8485, 1.1314]
    """
    return F.rms_norm(x_TD.float(), weight_D.shape, weight_D, eps).to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual): the step between two blocks of a pre-norm decoder.

    Implementations may overwrite the arguments with the results.
    """
    total_TD = x_TD + residual_TD
    return rms_norm(total_TD, weight_D, eps), total_TD


def rotary(x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Rotates the pairs (i, i + d/2) of each head by the token's angles, in fp32; cos and sin fp32 [T, 1, d].

    sin carries the sign: minus in the first half. Source: RoFormer (Su et al. 2021), in GPT-NeoX's half layout.
    x [1, 0], angle 90 degrees -> [0, 1]
    """
    first, second = x_THd.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return (x_THd * cos_Td).add_(swapped.mul_(sin_Td))


def silu_mul(gate_up_MI: Tensor, threads: int) -> Tensor:
    """silu(first half) * second half of the last dimension (SwiGLU, Shazeer 2020).

    [1, 2] -> [1 / (1 + e^-1) * 2] = [1.4621]
    """
    gate, up = gate_up_MI.chunk(2, dim=-1)
    width = gate.shape[1]
    if extra := -width % LANES:
        # No column may meet the scalar tail, which another division of the columns would put elsewhere.
        gate = F.pad(gate, (0, extra))
    if threads == 1 or gate.numel() <= TORCH_GRAIN:
        return F.silu(gate)[:, :width].mul_(up).contiguous()
    out = torch.empty_like(up)
    for rows in row_pieces(gate.shape[0], gate.shape[1], threads):
        for start in range(0, width, TORCH_GRAIN):
            columns = slice(start, start + TORCH_GRAIN)
            up_part = up[rows, columns]
            torch.mul(F.silu(gate[rows, columns])[:, : up_part.shape[1]], up_part, out=out[rows, columns])
    return out


def sigmoid_gate(logits_TL: Tensor, threads: int) -> Tensor:
    """sigmoid of the first of LANES columns, fp32 [T, 1]; a single column would run in torch's scalar code."""
    wide = logits_TL.float()
    out = torch.empty_like(wide)
    for rows in row_pieces(wide.shape[0], wide.shape[1], threads):
        torch.sigmoid(wide[rows], out=out[rows])
    return out[:, :1]


def plain_sigmoid_gate(logits_TL: Tensor) -> Tensor:
    """sigmoid of the first column, fp32 [T, 1], for GPUs and generated code, which treat all columns alike."""
    return logits_TL[:, :1].float().sigmoid()


def embedding(ids_T: Tensor, weight_VD: Tensor) -> Tensor:
    """The rows `ids_T` of the embedding table."""
    return weight_VD.index_select(0, ids_T)


def write_kv(k_TGd: Tensor, v_TGv: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
    """Writes new keys and values to their KV slots (block * block_size + offset) of a layer's cache."""
    for x_TGd, cache in ((k_TGd, k_cache), (v_TGv, v_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping_T, to_entries(x_TGd, cache.dtype))


def qk_norm_rope_cache(
    qkv_TN: Tensor,
    rule: HeadRule,
    cos_T1d: Tensor,
    sin_T1d: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    normed_THd: Tensor | None = None,
) -> Tensor:
    """Norms, clips and rotates heads, writes keys and values to the KV cache, and returns scaled queries [T, H, d].

    qkv_TN: [T, (H + G) * d + G * v], queries first, values last. slot_mapping_T: of the first tokens; the rest is
    padding. normed_THd: fp32 [T, H + G, d], contiguous: queries and keys in place of qkv's. cos and sin as `rotary`
    takes them. All in fp32 until one rounding.
    """
    heads, both, dim, real = rule.num_heads, rule.num_heads + rule.num_kv_heads, cos_T1d.shape[2], len(slot_mapping_T)
    qk_THd = qkv_TN[:, : both * dim].view(-1, both, dim).float() if normed_THd is None else normed_THd
    v_TGv = qkv_TN[:real, both * dim :].view(real, rule.num_kv_heads, rule.v_dim or dim)
    if rule.norms is not None and not rule.norm_last:
        qk_THd = torch.rms_norm(qk_THd, (dim,), None, rule.eps) * rule.norms
    if rule.norm_values:
        v_TGv = torch.rms_norm(v_TGv.float(), v_TGv.shape[2:], None, rule.eps)
    if rule.clip < math.inf:
        qk_THd, v_TGv = qk_THd.clamp(-rule.clip, rule.clip), v_TGv.float().clamp(-rule.clip, rule.clip)
    rotated_THd = rotary(qk_THd, cos_T1d, sin_T1d)
    if rule.norms is not None and rule.norm_last:
        rotated_THd = torch.rms_norm(rotated_THd, (dim,), None, rule.eps).mul_(rule.norms)
    # The softmax scale goes into the queries while they are still fp32: one rounding instead of two.
    rotated_THd[:, :heads] *= rule.scale
    write_kv(rotated_THd[:real, heads:], v_TGv, k_cache, v_cache, slot_mapping_T)
    return rotated_THd[:, :heads].to(qkv_TN.dtype)


def route(logits_TE: Tensor, top_k: int, score: str, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The top_k experts of each token and their weights: (ids int32 [T, K], weights fp32 [T, K]), best first.

    Scores in fp32; equal scores go to the lowest expert id. score `softmax`: over all experts, then top-k;
    `softmax_selected`: top-k of the logits, then softmax over those.
    logits [0, ln 3, 0], top_k 2, softmax -> ids [1, 0], weights [0.6, 0.2]
    """
    scores = logits_TE.float()
    if score == "softmax":
        scores = scores.softmax(-1)
    # Unique integer keys in the order of (score, -id): a float's bits order as an integer, once negative ones flip.
    bits = (scores + 0.0).view(torch.int32).long()
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 16
    keys -= torch.arange(scores.shape[-1], device=scores.device)
    ids_TK = keys.topk(top_k, dim=-1).indices
    weights_TK = scores.gather(-1, ids_TK)
    if score == "softmax_selected":
        weights_TK = weights_TK.softmax(-1)
    if renormalize:
        total_T1 = weights_TK[:, :1].clone()
        for k in range(1, top_k):  # in this order, whatever torch's sums do
            total_T1 += weights_TK[:, k : k + 1]
        weights_TK = weights_TK / total_T1
    return ids_TK.int(), weights_TK
