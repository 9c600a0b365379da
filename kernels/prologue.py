"""What lies between attention's projection and attention itself: norms per head, clipping, rotation, the cache.

T tokens (padded rows included), H heads and G KV heads of this rank, d head width.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

SCALE_BYTES = 4  # behind an int8 head in its cell: its fp32 scale


@triton.jit
def _clipped(x, CLIP: tl.constexpr):
    """Within +-CLIP; NaN stays."""
    if CLIP is not None:
        x = tl.where(x > CLIP, CLIP, tl.where(x < -CLIP, -CLIP, x))
    return x


@triton.jit
def _rotated(at, inside, weights, cos, sin, swapped, eps, D: tl.constexpr, CLIP: tl.constexpr, NORM: tl.constexpr):
    """Heads [B, d] at their addresses: normalised, clipped, and each pair (i, i + d/2) turned. All in fp32."""
    columns = tl.arange(0, cos.shape[0])
    x = tl.load(at + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + swapped[None, :], mask=inside, other=0.0).to(tl.float32)  # the same lines, now in cache
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * inverse * tl.load(weights + columns[None, :], mask=inside, other=0.0)
        other = other * inverse * tl.load(weights + swapped[None, :], mask=inside, other=0.0)
    return _clipped(x, CLIP) * cos[None, :] + _clipped(other, CLIP) * sin[None, :]


@triton.jit
def _store_entries(y, cache_ptr, scales_ptr, cells, inside, D: tl.constexpr, CELL: tl.constexpr):
    """Heads [B, d] to their cells [B], rounded; int8 in multiples of each head's largest magnitude / 127."""
    to = cache_ptr + cells[:, None] * CELL + tl.arange(0, y.shape[1])[None, :]
    if scales_ptr is None:
        tl.store(to, y.to(cache_ptr.dtype.element_ty), mask=inside)
    else:
        bits = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # as whole numbers, NaN lies above infinity
        most = bits.to(tl.float32, bitcast=True)
        scale = tl.where(most < float("inf"), tl.div_rn(most, 127.0), float("nan"))
        share = tl.where((scale > 0)[:, None], tl.div_rn(y, tl.where(scale > 0, scale, 1.0)[:, None]), 0.0)
        whole = share + 12582912.0 - 12582912.0  # 1.5 * 2^23: sums of this size are whole numbers, ties to even
        whole = tl.minimum(tl.maximum(whole, -127.0), 127.0)  # a denormal scale is no exact share
        tl.store(to, whole.to(tl.int8), mask=inside)
        tl.store(scales_ptr + cells * (CELL // 4) + D // 4, scale, mask=tl.sum(inside.to(tl.int32), 1) > 0)


@triton.jit(do_not_specialize=["num_real"])
def prologue_kernel(
    qkv_ptr,
    qk_ptr,
    weights_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    slot_mapping_ptr,
    q_ptr,
    num_real,
    stride,
    qk_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    CELL: tl.constexpr,
    CLIP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_H query heads of a token, or as its last ones BLOCK_G keys and values."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    real = token < num_real
    swapped = tl.where(columns < D // 2, columns + D // 2, columns - D // 2)
    present = columns < tl.where(real, D, 0)  # padding is not read: its queries are zero
    cos = tl.load(cos_ptr + token * D + columns, mask=present, other=0.0)
    sin = tl.load(sin_ptr + token * D + columns, mask=present, other=0.0)
    NORM: tl.constexpr = weights_ptr is not None
    query_programs: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    part = tl.program_id(1)
    if part < query_programs:
        heads = part * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (heads < HEADS)[:, None] & present[None, :]
        at = qk_ptr + token * qk_stride + heads[:, None] * D
        weights = weights_ptr + heads[:, None] * D if NORM else None
        y = _rotated(at, inside, weights, cos, sin, swapped, eps, D, CLIP, NORM) * scale
        to = q_ptr + token * (HEADS * D) + heads[:, None] * D + columns[None, :]
        tl.store(to, y.to(q_ptr.dtype.element_ty), mask=(heads < HEADS)[:, None] & (columns < D)[None, :])
    elif real:
        heads = (part - query_programs) * BLOCK_G + tl.arange(0, BLOCK_G)
        cell = tl.load(slot_mapping_ptr + token).to(tl.int64)
        inside = (heads < tl.where(cell >= 0, KV_HEADS, 0))[:, None] & present[None, :]
        at = qk_ptr + token * qk_stride + (HEADS + heads)[:, None] * D
        weights = weights_ptr + (HEADS + heads)[:, None] * D if NORM else None
        k = _rotated(at, inside, weights, cos, sin, swapped, eps, D, CLIP, NORM)
        cells = cell * KV_HEADS + heads
        _store_entries(k, k_ptr, k_scales_ptr, cells, inside, D, CELL)
        at = qkv_ptr + token * stride + (HEADS + KV_HEADS + heads)[:, None] * D + columns[None, :]
        v = _clipped(tl.load(at, mask=inside, other=0.0).to(tl.float32), CLIP)
        _store_entries(v, v_ptr, v_scales_ptr, cells, inside, D, CELL)


def prologue(
    qkv_THd: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    cos_T1d: Tensor,
    sin_T1d: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    *,
    eps: float = 0.0,
    norms: Tensor | None = None,
    clip: float = math.inf,
    normed_THd: Tensor | None = None,
) -> Tensor:
    """Writes keys and values to their KV slots (block * block size + offset) and returns scaled queries [T, H, d].

    qkv_THd: [T, H + 2G, d], queries first; tokens may be further apart. cos and sin: fp32 [T, 1, d], sin negative in
    the first half. slot_mapping_T: int64, of the first tokens; the rest is padding, and so are slots below 0. norms:
    fp32 weights [H + G, d] of a norm per head, queries' first. clip: largest magnitude of norms and values.
    normed_THd: fp32 [T, H + G, d], queries and keys instead of qkv's. All in fp32 until one rounding.
    one head of width 2, scale 2: q [1, 0], k [1, 0], turned by 90 degrees -> q [0, 2], k [0, 1]
    """
    tokens, heads, d = qkv_THd.shape
    both = num_heads + num_kv_heads
    cell = d + SCALE_BYTES if k_cache.dtype == torch.int8 else d
    qk = qkv_THd if normed_THd is None else normed_THd
    assert heads == both + num_kv_heads, (qkv_THd.shape, num_heads, num_kv_heads)
    assert qkv_THd.stride()[1:] == qk.stride()[1:] == (d, 1), (qkv_THd.stride(), qk.stride())
    assert cos_T1d.numel() == sin_T1d.numel() == tokens * d, (cos_T1d.shape, sin_T1d.shape)
    assert d % 2 == 0, d
    for cache in (k_cache, v_cache):
        assert cache.shape[2:] == (num_kv_heads, cell), (cache.shape, num_kv_heads, cell)
        assert cache.is_contiguous(), cache.stride()
    for contiguous in (cos_T1d, sin_T1d, slot_mapping_T, norms):
        assert contiguous is None or contiguous.is_contiguous(), contiguous.stride()
    q = qkv_THd.new_empty((tokens, num_heads, d))
    block_d = triton.next_power_of_2(d)
    block_h, block_g = (min(2048 // block_d, triton.next_power_of_2(n)) for n in (num_heads, num_kv_heads))
    quantised = k_cache.dtype == torch.int8
    if tokens:
        prologue_kernel[(tokens, triton.cdiv(num_heads, block_h) + triton.cdiv(num_kv_heads, block_g))](
            qkv_THd,
            qk,
            norms,
            cos_T1d,
            sin_T1d,
            k_cache,
            v_cache,
            k_cache.view(torch.float32) if quantised else None,
            v_cache.view(torch.float32) if quantised else None,
            slot_mapping_T,
            q,
            slot_mapping_T.shape[0],
            qkv_THd.stride(0),
            qk.stride(0),
            scale,
            eps,
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            D=d,
            CELL=cell,
            CLIP=None if clip == math.inf else clip,
            BLOCK_H=block_h,
            BLOCK_G=block_g,
            BLOCK_D=block_d,
            num_warps=4,
        )
    return q
