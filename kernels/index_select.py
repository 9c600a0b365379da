"""The choice of an index selector over paged keys; moeserve/ops/selected.py specifies it.

S queries, J index heads, d their width, K tokens that are chosen, N blocks per row, L positions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 64  # positions of a program
LEAST = 16  # the side of a product's operand, at least
LOWEST = tl.constexpr(-(1 << 63))  # of positions that a query does not see


@triton.jit(do_not_specialize=["length", "table_stride"])
def order_kernel(
    q_ptr, weights_ptr, cache_ptr, blocks_ptr, rows_ptr, positions_ptr, out_ptr, length, table_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L positions and one query. It stores integers that are the larger the sooner a position is
    chosen: a score's bits order as an integer, once negative ones flip; the position below makes all different."""
    query, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_L
    last = tl.load(positions_ptr + query)
    at = first + tl.arange(0, BLOCK_L)
    order = tl.full((BLOCK_L,), LOWEST, tl.int64)
    if first <= last:
        table_ptr = blocks_ptr + tl.load(rows_ptr + query) * table_stride
        heads, d = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_D)
        block = tl.load(table_ptr + at // BLOCK_SIZE, mask=at <= last, other=0).to(tl.int64)
        k_ptrs = cache_ptr + (block * BLOCK_SIZE + at % BLOCK_SIZE)[:, None] * D + d[None, :]
        k = tl.load(k_ptrs, mask=(at <= last)[:, None] & (d < D)[None, :], other=0.0)
        q_ptrs = q_ptr + (query * HEADS + heads[None, :]) * D + d[:, None]
        q = tl.load(q_ptrs, mask=(heads < HEADS)[None, :] & (d < D)[:, None], other=0.0)
        weights = tl.load(weights_ptr + query * HEADS + heads, mask=heads < HEADS, other=0.0)[None, :]
        dots = tl.dot(k, q, input_precision="ieee")
        gated = tl.where(dots < 0, 0.0, dots) * weights  # NaN stays NaN
        score = tl.sum(tl.where((heads < HEADS)[None, :], gated, 0.0), 1)
        score = tl.where(score == score, tl.where(score == 0, 0.0, score), float("inf"))
        bits = score.to(tl.int32, bitcast=True).to(tl.int64)
        order = tl.where(at <= last, ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 31) - at, LOWEST)
    tl.store(out_ptr + query * length + at, order, mask=at < length)


def index_select(
    q_SJd: Tensor, weights_SJ: Tensor, cache: Tensor, rows_S: Tensor, positions_S: Tensor, blocks_RN: Tensor,
    context: int, top_k: int, most: int,
) -> Tensor:  # fmt: skip
    """Returns the cache rows (block * block_size + offset) of the chosen tokens, int64 [S, K], by ascending position.

    cache: of keys, of q's dtype [blocks, block size, 1, d]. weights: fp32. rows_S, positions_S: int64, of the queries.
    context: L, at least what each sees, and top_k; behind all tokens of a query that sees fewer, there are any. most:
    queries at once.
    d 1, q 1, weight 1, keys [5, 1, 7] in block 0, top_k 2 -> [0, 2]
    """
    (_, heads, dim), size = q_SJd.shape, cache.shape[1]
    assert cache.shape[2:] == (1, dim), (cache.shape, q_SJd.shape)
    assert (q_SJd.dtype, weights_SJ.dtype) == (cache.dtype, torch.float32), (q_SJd.dtype, cache.dtype, weights_SJ.dtype)
    assert all(x.is_contiguous() for x in (q_SJd, weights_SJ, cache)), (q_SJd.stride(), cache.stride())
    block_j, block_d = (max(LEAST, triton.next_power_of_2(width)) for width in (heads, dim))
    parts = []
    for start in range(0, len(q_SJd), most):
        part = slice(start, start + most)
        q, rows = q_SJd[part], rows_S[part]
        order_SL = torch.empty((len(q), context), dtype=torch.int64, device=q.device)
        order_kernel[(len(q), triton.cdiv(context, KEYS))](
            q, weights_SJ[part], cache, blocks_RN, rows, positions_S[part], order_SL, context, blocks_RN.stride(0),
            HEADS=heads, D=dim, BLOCK_SIZE=size, BLOCK_J=block_j, BLOCK_D=block_d, BLOCK_L=KEYS, num_warps=4,
        )  # fmt: skip
        chosen_SK = order_SL.topk(top_k, sorted=False).indices.sort().values
        blocks_SK = blocks_RN.index_select(0, rows).gather(1, chosen_SK // size).long()
        parts.append(blocks_SK * size + chosen_SK % size)
    return torch.cat(parts)
