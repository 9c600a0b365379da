"""Kernels of multi-head latent attention (MLA, DeepSeek-V2) and of sparse attention's indexer.

`latent_rope_cache` runs between the projections and attention, in the absorbed form (see
ops/latent.py): it writes the KV cache and prepares the queries. Sizes: T tokens (padding included),
H heads of this rank, n width of the non-rotary part of a query, p width of its rotary part,
e = n + p, L rank of the latents, C = L + p width of a cache entry.

`index_select` picks the tokens that sparse attention reads (DeepSeek-V3.2; reference in
ops/selected.py). Sizes: S queries, J index heads of width d, K selected tokens, R block tables of N
blocks, L positions.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels.qk_norm_rope_cache import normalised, rotated

if TYPE_CHECKING:
    from moeserve.ops.inputs import RopeCacheInputs
    from moeserve.ops.latent import LatentRule

KEYS = 64  # positions per program
LEAST = 16  # smallest dimension of an operand of `tl.dot`
LOWEST = tl.constexpr(-(1 << 63))  # sort key of masked positions


@triton.jit(do_not_specialize=["num_real"])
def latent_rope_cache_kernel(
    q_ptr, kv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, slot_mapping_ptr, absorbed_ptr, out_ptr,
    num_real, q_stride, kv_stride, absorbed_stride, scale, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Program (t, 0) writes the cache entry of token t, the others BLOCK_H query heads each."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    is_token = token < num_real
    columns = tl.arange(0, BLOCK_P)
    # Padding is not read, so its queries become zero.
    present = columns < tl.where(is_token, ROPE, 0)
    cos = tl.load(cos_ptr + token * ROPE + columns, mask=present, other=0.0)
    sin = tl.load(sin_ptr + token * ROPE + columns, mask=present, other=0.0)
    swapped = tl.where(columns < ROPE // 2, columns + ROPE // 2, columns - ROPE // 2)
    if part > 0:
        heads = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        there = (heads < HEADS)[:, None]
        q_ptrs = q_ptr + token * q_stride + heads[:, None] * (NOPE + ROPE)
        y = rotated(
            q_ptrs + NOPE,
            there & present[None, :],
            None,
            cos,
            sin,
            swapped,
            eps,
            D=ROPE,
            CLIP=None,
            NORM=False,
            NORM_LAST=False,
        )
        y = y * scale
        absorbed_columns = heads[:, None] * (RANK + ROPE) + RANK + columns[None, :]
        tl.store(
            absorbed_ptr + token * absorbed_stride + absorbed_columns,
            y.to(absorbed_ptr.dtype.element_ty),
            mask=there & (columns < ROPE)[None, :],
        )
        nope_columns = tl.arange(0, BLOCK_N)
        x = tl.load(
            q_ptrs + nope_columns[None, :],
            mask=there & (nope_columns < tl.where(is_token, NOPE, 0))[None, :],
            other=0.0,
        )
        out_ptrs = out_ptr + (token * HEADS + heads)[:, None] * NOPE + nope_columns[None, :]
        scaled = (x.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptrs, scaled, mask=there & (nope_columns < NOPE)[None, :])
    elif is_token:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        written = (tl.arange(0, 1) < tl.where(slot >= 0, 1, 0))[:, None]
        kv_entry_ptr = kv_ptr + token * kv_stride + tl.zeros((1, 1), tl.int64)
        cache_entry_ptr = cache_ptr + slot * (RANK + ROPE) + tl.zeros((1, 1), tl.int64)
        key = rotated(
            kv_entry_ptr + RANK,
            written & present[None, :],
            None,
            cos,
            sin,
            swapped,
            eps,
            D=ROPE,
            CLIP=None,
            NORM=False,
            NORM_LAST=False,
        )
        tl.store(
            cache_entry_ptr + RANK + columns[None, :],
            key.to(cache_ptr.dtype.element_ty),
            mask=written & present[None, :],
        )
        latent_columns = tl.arange(0, BLOCK_L)
        inside = written & (latent_columns < RANK)[None, :]
        latent = normalised(
            tl.load(kv_entry_ptr + latent_columns[None, :], mask=inside, other=0.0).to(tl.float32),
            eps,
            RANK,
        )
        latent *= tl.load(norm_ptr + latent_columns, mask=latent_columns < RANK, other=0.0)[None, :]
        tl.store(
            cache_entry_ptr + latent_columns[None, :],
            latent.to(cache_ptr.dtype.element_ty),
            mask=inside,
        )


def latent_rope_cache(
    q_THe: Tensor,
    kv_TC: Tensor,
    rule: "LatentRule",
    rope_cache: "RopeCacheInputs",
    latent_cache: Tensor,
    q_THC: Tensor,
) -> Tensor:
    """Write the cache entries and rotary queries of a step, and return the other query part.

    The KV slot of each token gets [rms_norm(latent) * norm | rotated key]. The last p columns of
    q_THC get the scaled, rotated part of the queries. The non-rotary part of the queries is scaled
    and returned, [T, H, n]. Everything is fp32 until one rounding. Queries of padding become zero.
    A slot below 0 is padding as well.

    q_THe: queries, rotary part last.
    kv_TC: latents, then the rotary part of the key. The tokens of q_THe, kv_TC and q_THC may have
        any stride.
    latent_cache: [blocks, block size, 1, C].

    Example: n 1, p 2, L 1, scale 2, rotation by 90 degrees; q [1, 1, 0], kv [3, 1, 0], norm 5 ->
    entry [5, 0, 1], q_THC [.., 0, 2] and the result [2]
    """
    cos_T1p, sin_T1p, slot_mapping_T = rope_cache
    norm_L = rule.norm_L
    tokens, heads, width = q_THe.shape
    rope = cos_T1p.shape[2]
    capacity = latent_cache.shape[3]
    rank = capacity - rope
    nope = width - rope
    assert q_THe.stride()[1:] == (width, 1), q_THe.stride()
    assert (*q_THC.shape, *q_THC.stride()[1:]) == (tokens, heads, capacity, capacity, 1), (
        q_THC.shape,
        q_THC.stride(),
    )
    assert kv_TC.shape == (tokens, capacity), (kv_TC.shape, latent_cache.shape)
    assert kv_TC.stride(1) == 1, kv_TC.stride()
    assert latent_cache.shape[2] == 1, latent_cache.shape
    assert norm_L.shape == (rank,), (norm_L.shape, rank)
    assert cos_T1p.numel() == sin_T1p.numel() == tokens * rope, (cos_T1p.shape, sin_T1p.shape)
    assert rope % 2 == 0, rope
    for contiguous in (cos_T1p, sin_T1p, slot_mapping_T, norm_L, latent_cache):
        assert contiguous.is_contiguous(), contiguous.stride()
    q_THn = q_THe.new_empty((tokens, heads, nope))
    block_n = triton.next_power_of_2(nope)
    block_h = max(1, min(2048 // block_n, triton.next_power_of_2(heads)))
    if tokens:
        latent_rope_cache_kernel[(tokens, 1 + triton.cdiv(heads, block_h))](
            q_THe, kv_TC, norm_L, cos_T1p, sin_T1p, latent_cache, slot_mapping_T, q_THC, q_THn,
            slot_mapping_T.shape[0],
            q_THe.stride(0), kv_TC.stride(0), q_THC.stride(0), rule.scale, rule.eps,
            HEADS=heads, NOPE=nope, ROPE=rope, RANK=rank, BLOCK_H=block_h, BLOCK_N=block_n,
            BLOCK_P=triton.next_power_of_2(max(rope, 1)), BLOCK_L=triton.next_power_of_2(rank),
            num_warps=4,
        )  # fmt: skip
    return q_THn


@triton.jit(do_not_specialize=["length", "table_stride"])
def order_kernel(
    q_ptr, weights_ptr, cache_ptr, blocks_ptr, rows_ptr, positions_ptr, out_ptr, length,
    table_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """One program computes the sort keys of BLOCK_L positions for one query.

    A key is an int64: positions with larger keys are selected first. Its high part is the score's
    bit pattern, with the bits of negative scores flipped so that integers order like the floats.
    Its low part is the negated position, so keys are unique and ties go to earlier positions.
    """
    query = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_L
    last = tl.load(positions_ptr + query)
    positions = first + tl.arange(0, BLOCK_L)
    order = tl.full((BLOCK_L,), LOWEST, tl.int64)
    if first <= last:
        table_ptr = blocks_ptr + tl.load(rows_ptr + query) * table_stride
        heads = tl.arange(0, BLOCK_J)
        d = tl.arange(0, BLOCK_D)
        block = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions <= last, other=0).to(
            tl.int64
        )
        k_ptrs = cache_ptr + (block * BLOCK_SIZE + positions % BLOCK_SIZE)[:, None] * D + d[None, :]
        k = tl.load(k_ptrs, mask=(positions <= last)[:, None] & (d < D)[None, :], other=0.0)
        q_ptrs = q_ptr + (query * HEADS + heads[None, :]) * D + d[:, None]
        q = tl.load(q_ptrs, mask=(heads < HEADS)[None, :] & (d < D)[:, None], other=0.0)
        weights = tl.load(weights_ptr + query * HEADS + heads, mask=heads < HEADS, other=0.0)[
            None, :
        ]
        dots = tl.dot(k, q, input_precision="ieee")
        gated = tl.where(dots < 0, 0.0, dots) * weights  # NaN stays NaN
        score = tl.sum(tl.where((heads < HEADS)[None, :], gated, 0.0), 1)
        score = tl.where(score == score, tl.where(score == 0, 0.0, score), float("inf"))
        bits = score.to(tl.int32, bitcast=True).to(tl.int64)
        order = tl.where(
            positions <= last, ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 31) - positions, LOWEST
        )
    tl.store(out_ptr + query * length + positions, order, mask=positions < length)


def index_select(
    q_SJd: Tensor, weights_SJ: Tensor, cache: Tensor, rows_S: Tensor, positions_S: Tensor,
    blocks_RN: Tensor,
    context: int, top_k: int, max_queries: int,
) -> Tensor:  # fmt: skip
    """Return the slots (block * block_size + offset) of the selected tokens, int64 [S, K].

    Slots are in ascending order of position. If a query sees fewer than K tokens, arbitrary slots
    follow the ones that it sees.

    weights_SJ: fp32, of the index heads.
    cache: index keys [blocks, block size, 1, d], of q's dtype.
    rows_S, positions_S: int64, the block table and the position of each query.
    context: L, at least `top_k` and the number of positions that any query sees.
    max_queries: queries computed at once, which bounds the memory.

    Example: d 1, q 1, weight 1, keys [5, 1, 7] in block 0, top_k 2 -> [0, 2]
    """
    _, heads, dim = q_SJd.shape
    size = cache.shape[1]
    assert cache.shape[2:] == (1, dim), (cache.shape, q_SJd.shape)
    assert (q_SJd.dtype, weights_SJ.dtype) == (cache.dtype, torch.float32), (
        q_SJd.dtype,
        cache.dtype,
        weights_SJ.dtype,
    )
    assert all(x.is_contiguous() for x in (q_SJd, weights_SJ, cache)), (
        q_SJd.stride(),
        cache.stride(),
    )
    block_j, block_d = (max(LEAST, triton.next_power_of_2(width)) for width in (heads, dim))
    parts = []
    for start in range(0, len(q_SJd), max_queries):
        part = slice(start, start + max_queries)
        q = q_SJd[part]
        rows = rows_S[part]
        order_SL = torch.empty((len(q), context), dtype=torch.int64, device=q.device)
        order_kernel[(len(q), triton.cdiv(context, KEYS))](
            q, weights_SJ[part], cache, blocks_RN, rows, positions_S[part], order_SL, context,
            blocks_RN.stride(0),
            HEADS=heads, D=dim, BLOCK_SIZE=size, BLOCK_J=block_j, BLOCK_D=block_d, BLOCK_L=KEYS,
            num_warps=4,
        )  # fmt: skip
        chosen_SK = order_SL.topk(top_k, sorted=False).indices.sort().values
        blocks_SK = blocks_RN.index_select(0, rows).gather(1, chosen_SK // size).long()
        parts.append(blocks_SK * size + chosen_SK % size)
    return torch.cat(parts)
