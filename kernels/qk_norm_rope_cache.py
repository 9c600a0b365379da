"""QK-norm, rotary embedding and KV cache write: all steps between QKV projection and attention.

T tokens (padding included), H heads and G KV heads of this rank, d width of queries and keys, v
width of values.
"""

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from moeserve.ops.elementwise import HeadRule
    from moeserve.ops.inputs import LayerCache, RopeCacheInputs

SCALE_BYTES = 4  # the fp32 scale that follows the int8 values of a head in its entry


@triton.jit
def _clipped(x, CLIP: tl.constexpr):
    """Clip x to +-CLIP. NaN stays NaN."""
    if CLIP is not None:
        x = tl.where(x > CLIP, CLIP, tl.where(x < -CLIP, -CLIP, x))
    return x


@triton.jit
def normalised(x, eps, D: tl.constexpr):
    """Return heads [B, d] divided by their root mean square."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]


@triton.jit
def rotated(
    head_ptrs, inside, weights, cos, sin, swapped, eps,
    D: tl.constexpr, CLIP: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr,
):  # fmt: skip
    """Load heads [B, d], normalize them (NORM), clip them and rotate each pair (i, i + d/2).

    NORM_LAST: normalize after the rotation. All in fp32.
    """
    columns = tl.arange(0, cos.shape[0])
    x = tl.load(head_ptrs + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    # These loads hit the cache, because they read the same lines.
    other = tl.load(head_ptrs + swapped[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM and not NORM_LAST:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * inverse * tl.load(weights + columns[None, :], mask=inside, other=0.0)
        other = other * inverse * tl.load(weights + swapped[None, :], mask=inside, other=0.0)
    y = _clipped(x, CLIP) * cos[None, :] + _clipped(other, CLIP) * sin[None, :]
    if NORM and NORM_LAST:
        y = normalised(y, eps, D) * tl.load(weights + columns[None, :], mask=inside, other=0.0)
    return y


@triton.jit
def _store_entries(y, cache_ptr, scales_ptr, entries, inside, D: tl.constexpr, ENTRY: tl.constexpr):
    """Store heads [B, d] to the KV entries [B], rounded.

    For int8, the scale of a head is its largest magnitude / 127.
    """
    entry_ptrs = cache_ptr + entries[:, None] * ENTRY + tl.arange(0, y.shape[1])[None, :]
    if scales_ptr is None:
        tl.store(entry_ptrs, y.to(cache_ptr.dtype.element_ty), mask=inside)
    else:
        # The maximum of the bits as integers: NaN is above infinity, so it is not lost.
        bits = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        largest = bits.to(tl.float32, bitcast=True)
        scale = tl.where(largest < float("inf"), tl.div_rn(largest, 127.0), float("nan"))
        share = tl.where(
            (scale > 0)[:, None], tl.div_rn(y, tl.where(scale > 0, scale, 1.0)[:, None]), 0.0
        )
        # Round to the nearest integer, ties to even: floats near 1.5 * 2^23 are integers.
        whole = share + 12582912.0 - 12582912.0
        whole = tl.minimum(tl.maximum(whole, -127.0), 127.0)  # a denormal scale is inexact
        tl.store(entry_ptrs, whole.to(tl.int8), mask=inside)
        tl.store(
            scales_ptr + entries * (ENTRY // 4) + D // 4,
            scale,
            mask=tl.sum(inside.to(tl.int32), 1) > 0,
        )


@triton.jit(do_not_specialize=["num_real"])
def qk_norm_rope_cache_kernel(
    qkv_ptr, qk_ptr, weights_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
    slot_mapping_ptr, q_ptr,
    num_real, stride, qk_stride, scale, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr,
    PAST: tl.constexpr,
    CLIP: tl.constexpr, NORM_LAST: tl.constexpr, NORM_VALUES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_H query heads of a token; the last ones BLOCK_G keys and values.

    PAST: bytes of an entry after its elements.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    is_token = token < num_real
    swapped = tl.where(columns < D // 2, columns + D // 2, columns - D // 2)
    present = columns < tl.where(is_token, D, 0)  # padding is not read, so its queries become zero
    cos = tl.load(cos_ptr + token * D + columns, mask=present, other=0.0)
    sin = tl.load(sin_ptr + token * D + columns, mask=present, other=0.0)
    NORM: tl.constexpr = weights_ptr is not None
    query_programs: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    part = tl.program_id(1)
    if part < query_programs:
        heads = part * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (heads < HEADS)[:, None] & present[None, :]
        head_ptrs = qk_ptr + token * qk_stride + heads[:, None] * D
        weights = weights_ptr + heads[:, None] * D if NORM else None
        y = (
            rotated(head_ptrs, inside, weights, cos, sin, swapped, eps, D, CLIP, NORM, NORM_LAST)
            * scale
        )
        out_ptrs = q_ptr + token * (HEADS * D) + heads[:, None] * D + columns[None, :]
        tl.store(
            out_ptrs,
            y.to(q_ptr.dtype.element_ty),
            mask=(heads < HEADS)[:, None] & (columns < D)[None, :],
        )
    elif is_token:
        heads = (part - query_programs) * BLOCK_G + tl.arange(0, BLOCK_G)
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        written = heads < tl.where(slot >= 0, KV_HEADS, 0)
        inside = written[:, None] & present[None, :]
        head_ptrs = qk_ptr + token * qk_stride + (HEADS + heads)[:, None] * D
        weights = weights_ptr + (HEADS + heads)[:, None] * D if NORM else None
        k = rotated(head_ptrs, inside, weights, cos, sin, swapped, eps, D, CLIP, NORM, NORM_LAST)
        entries = slot * KV_HEADS + heads
        _store_entries(k, k_ptr, k_scales_ptr, entries, inside, D, D + PAST)
        v_columns = tl.arange(0, BLOCK_V)
        v_inside = written[:, None] & (v_columns < V_D)[None, :]
        value_ptrs = (
            qkv_ptr
            + token * stride
            + (HEADS + KV_HEADS) * D
            + heads[:, None] * V_D
            + v_columns[None, :]
        )
        v = tl.load(value_ptrs, mask=v_inside, other=0.0).to(tl.float32)
        if NORM_VALUES:
            v = normalised(v, eps, V_D)
        _store_entries(_clipped(v, CLIP), v_ptr, v_scales_ptr, entries, v_inside, V_D, V_D + PAST)


def qk_norm_rope_cache(
    qkv_TN: Tensor,
    rule: "HeadRule",
    rope_cache: "RopeCacheInputs",
    cache: "LayerCache",
    normed_THd: Tensor | None = None,
) -> Tensor:
    """Write keys and values to their KV slots, and return the scaled queries [T, H, d].

    A KV slot is block * block size + offset; slots below 0 are padding. Everything is fp32 until
    one rounding.

    qkv_TN: [T, (H + G) * d + G * v], queries first, values last. Tokens may have any stride.
    normed_THd: fp32 [T, H + G, d], queries and keys to use instead of those in `qkv_TN`.

    Example: one head of width 2, scale 2, rotation by 90 degrees; q [1, 0], k [1, 0] -> q [0, 2],
    k [0, 1]
    """
    cos_T1d, sin_T1d, slot_mapping_T = rope_cache
    k_cache, v_cache = cache
    tokens, width = qkv_TN.shape
    heads = rule.num_heads
    kv_heads = rule.num_kv_heads
    d = cos_T1d.shape[2]
    num_qk_heads = heads + kv_heads
    past = SCALE_BYTES if k_cache.dtype == torch.int8 else 0
    v_d = v_cache.shape[3] - past
    qk = qkv_TN if normed_THd is None else normed_THd
    assert width == num_qk_heads * d + kv_heads * v_d, (qkv_TN.shape, heads, kv_heads, d, v_d)
    assert qk is qkv_TN or (*qk.shape[1:], *qk.stride()[1:]) == (num_qk_heads, d, d, 1), (
        qk.shape,
        qk.stride(),
    )
    assert qkv_TN.stride(1) == 1, qkv_TN.stride()
    assert cos_T1d.numel() == sin_T1d.numel() == tokens * d, (cos_T1d.shape, sin_T1d.shape)
    assert d % 2 == 0, d
    for part, dim in ((k_cache, d), (v_cache, v_d)):
        assert part.shape[2:] == (kv_heads, dim + past), (part.shape, kv_heads, dim)
        assert part.is_contiguous(), part.stride()
    for contiguous in (cos_T1d, sin_T1d, slot_mapping_T, rule.norms):
        assert contiguous is None or contiguous.is_contiguous(), contiguous.stride()
    q = qkv_TN.new_empty((tokens, heads, d))
    block_d = triton.next_power_of_2(d)
    block_v = triton.next_power_of_2(v_d)
    block_h, block_g = (min(2048 // block_d, triton.next_power_of_2(n)) for n in (heads, kv_heads))
    if tokens:
        parts = triton.cdiv(heads, block_h) + triton.cdiv(kv_heads, block_g)
        qk_norm_rope_cache_kernel[(tokens, parts)](
            qkv_TN, qk, rule.norms, cos_T1d, sin_T1d, k_cache, v_cache,
            k_cache.view(torch.float32) if past else None,
            v_cache.view(torch.float32) if past else None, slot_mapping_T, q,
            slot_mapping_T.shape[0],
            qkv_TN.stride(0), qk.stride(0), rule.scale, rule.eps,
            HEADS=heads, KV_HEADS=kv_heads, D=d, V_D=v_d, PAST=past,
            CLIP=None if rule.clip == math.inf else rule.clip,
            NORM_LAST=rule.norm_last, NORM_VALUES=rule.norm_values, BLOCK_H=block_h,
            BLOCK_G=block_g,
            BLOCK_D=block_d, BLOCK_V=block_v, num_warps=4,
        )  # fmt: skip
    return q
