"""The attention kernel over a paged KV cache (flash decoding with a fixed split size).

A program computes work items that attention_plan.py lists. Its M query rows are the query heads of
one group, which share a KV head, for a few adjacent tokens; so keys and values are loaded once for
all of them. It loops over KV tiles of N positions.

KV tiles and splits have a fixed size and start at position 0. `_attend_split` computes the
(max, sum, values) of one split; ops/attention.py calls a split a cut. The sums of a query row never
depend on the other rows of its tile, so results are batch-invariant.
"""

import triton
import triton.language as tl

from moeserve.kernels.attention_plan import EVERYTHING as ALL
from moeserve.kernels.attention_plan import first_seen
from moeserve.kernels.attention_sums import (
    LOG2E,
    LOWEST,
    fold,
    normalised,
    padded,
    within,
    zero_padding,
)

EVERYTHING = tl.constexpr(ALL)
SCALE_BYTES = tl.constexpr(4)  # the fp32 scale that follows the int8 values of a head in its entry


@triton.constexpr_function
def first_part(D, V_D, SHARED):
    """Return the width of the first of two products that a wide key is split into.

    Block widths are powers of two, so one product over 192 elements would compute 256. If the
    values are the first elements of the keys (SHARED), the first part is the values. Otherwise it
    is the largest power of two, if the rest is a valid product. Otherwise there is one part.

    192 -> 128; 80 -> 64; 24 -> 24; 576 whose first 512 are the values -> 512
    """
    power = triton.next_power_of_2(D + 1) // 2
    if SHARED:
        return V_D
    return power if D % 16 == 0 else D


@triton.jit
def _load_columns(row_ptrs, WIDTH: tl.constexpr):
    """Load [N, WIDTH] from the addresses `row_ptrs` [N], padded to a power of two."""
    columns = tl.arange(0, padded(WIDTH))
    ptrs = row_ptrs[:, None] + columns[None, :]
    return (
        tl.load(ptrs)
        if columns.shape[0] == WIDTH
        else tl.load(ptrs, mask=(columns < WIDTH)[None, :], other=0)
    )


@triton.jit
def _load_queries(row_ptrs, valid, WIDTH: tl.constexpr):
    """Load [M, WIDTH] from the addresses `row_ptrs` [M], padded. Invalid rows become zero."""
    columns = tl.arange(0, padded(WIDTH))
    return tl.load(
        row_ptrs[:, None] + columns[None, :], mask=within(valid, columns, WIDTH), other=0.0
    )


@triton.jit
def _attend_split(
    q, q_rest, seen, table_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, kv_head, low, high,
    first_hidden, begin, end,
    KV_HEADS: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (largest, weight, values) of the positions begin .. end-1 between `low` and `high`.

    begin, end: multiples of BLOCK_N.
    low, high: bounds of the positions that any row sees; no others are read.
    seen: [M], the last position that each row sees.
    first_hidden: the first position that some row may not see. Tiles before it need no mask.
    """
    FIRST: tl.constexpr = first_part(D, V_D, v_ptr is None)
    PAST: tl.constexpr = 0 if k_scales_ptr is None else SCALE_BYTES  # bytes after the values
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    values = tl.zeros((BLOCK_M, padded(V_D)), tl.float32)
    for tile_start in range(
        tl.maximum(begin, low // BLOCK_N * BLOCK_N), tl.minimum(end, high + 1), BLOCK_N
    ):
        positions = tile_start + tl.arange(0, BLOCK_N)
        near = tl.minimum(tl.maximum(positions, low), high)  # other positions may hold NaN
        block = tl.load(table_ptr + near // BLOCK_SIZE).to(tl.int32)
        rows = (block.to(tl.int64) * BLOCK_SIZE + near % BLOCK_SIZE) * KV_HEADS + kv_head
        k = _load_columns(k_ptr + rows * (D + PAST), FIRST).to(q.dtype)
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # The rest comes first: of two consecutive products of 64 rows, Triton lets all warps repeat
        # the first one, and this is the smaller one.
        if q_rest is not None:
            k_rest = _load_columns(k_ptr + rows * (D + PAST) + FIRST, D - FIRST).to(q.dtype)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        v = k if v_ptr is None else _load_columns(v_ptr + rows * (V_D + PAST), V_D).to(q.dtype)
        if k_scales_ptr is not None:
            scores = scores * tl.load(k_scales_ptr + rows * ((D + PAST) // 4) + D // 4)[None, :]
        if SOFT_CAP > 0:
            scores = SOFT_CAP * (1 - 2 / (tl.exp2(scores * (2 * LOG2E / SOFT_CAP)) + 1))
        if tile_start + BLOCK_N > first_hidden:
            visible = positions[None, :] <= seen[:, None]
            if WINDOW != EVERYTHING or CHUNK != EVERYTHING:
                visible = visible & (positions[None, :] >= first_seen(seen, WINDOW, CHUNK)[:, None])
            scores = tl.where(visible, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1) * LOG2E)
        base = tl.maximum(new_largest, LOWEST)
        p = tl.exp2(tl.fma(scores, LOG2E, -base[:, None]))
        old_factor = tl.exp2(largest - base)
        weight = tl.fma(weight, old_factor, tl.sum(p, 1))
        if v_scales_ptr is not None:
            p = p * tl.load(v_scales_ptr + rows * ((V_D + PAST) // 4) + V_D // 4)[None, :]
        values = tl.dot(p.to(q.dtype), v, values * old_factor[:, None], input_precision="ieee")
        largest = new_largest
    return largest, weight, values


@triton.jit
def _attend_item(
    item, group, q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr, values_ptr,
    stats_ptr,
    blocks_ptr, starts_ptr, offsets_ptr, items_ptr, q_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    V_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Compute one work item for one group of heads.

    The result is either the output of the item's tokens, or the partial sums of one split.
    FLAT: accumulate over split borders if the tile is not cut. This is faster, but rounds
    differently from adding the splits.
    """
    row = tl.load(items_ptr + item * 4).to(tl.int64)
    tile = tl.load(items_ptr + item * 4 + 1)
    split = tl.load(items_ptr + item * 4 + 2)
    slot = tl.load(items_ptr + item * 4 + 3).to(tl.int64)
    start = tl.load(starts_ptr + row)
    first_token = tl.load(offsets_ptr + row)
    new = tl.load(offsets_ptr + row + 1) - first_token
    m = tl.arange(0, BLOCK_M)
    step = tile * TILE + m // HEADS
    valid = (m < TILE * HEADS) & (step < new)
    heads = group * HEADS + m % HEADS
    tokens = (first_token + step).to(tl.int64)
    FIRST: tl.constexpr = first_part(D, V_D, v_ptr is None)
    query_ptrs = q_ptr + tokens * q_stride + heads * D
    q = _load_queries(query_ptrs, valid, FIRST)
    q_rest = _load_queries(query_ptrs + FIRST, valid, D - FIRST) if FIRST < D else None
    kv_head = group // (GROUPS // KV_HEADS)
    seen = tl.where(valid, start + step, -1)
    low = first_seen(start + tile * TILE, WINDOW, CHUNK)
    high = start + tl.minimum(tile * TILE + TILE, new) - 1
    first_hidden = start + tile * TILE + 1 if WINDOW == EVERYTHING and CHUNK == EVERYTHING else 0

    is_cut = slot >= 0
    parts_begin = tl.where(is_cut, split, low // SPLIT)
    parts_end = tl.where(is_cut, split, high // SPLIT) + 1
    if FLAT:
        largest, weight, values = _attend_split(
            q, q_rest, seen, blocks_ptr + row * table_stride, k_ptr, v_ptr, k_scales_ptr,
            v_scales_ptr, kv_head,
            low, high, first_hidden, parts_begin * SPLIT, parts_end * SPLIT,
            KV_HEADS, D, V_D, BLOCK_SIZE, WINDOW, CHUNK, SOFT_CAP, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        values = tl.zeros((BLOCK_M, padded(V_D)), tl.float32)
        for part in range(parts_begin, parts_end):
            next_largest, next_weight, next_values = _attend_split(
                q, q_rest, seen, blocks_ptr + row * table_stride, k_ptr, v_ptr, k_scales_ptr,
                v_scales_ptr, kv_head,
                low, high, first_hidden, part * SPLIT, part * SPLIT + SPLIT,
                KV_HEADS, D, V_D, BLOCK_SIZE, WINDOW, CHUNK, SOFT_CAP, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            largest, weight, values = fold(
                largest, weight, values, next_largest, next_weight, next_values
            )

    columns = tl.arange(0, padded(V_D))
    stored = within(valid, columns, V_D)
    if is_cut:
        part_rows = (slot * GROUPS + group) * BLOCK_M + m
        tl.store(stats_ptr + part_rows * 2, largest, mask=valid)
        tl.store(stats_ptr + part_rows * 2 + 1, weight, mask=valid)
        tl.store(values_ptr + part_rows[:, None] * V_D + columns[None, :], values, mask=stored)
    else:
        y = normalised(largest, weight, values, sinks_ptr, heads, valid)
        out_ptrs = out_ptr + (tokens * (GROUPS * HEADS) + heads)[:, None] * V_D + columns[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_stride"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr, values_ptr, stats_ptr,
    blocks_ptr, starts_ptr,
    offsets_ptr, items_ptr, counts_ptr, num_rows, num_tokens, q_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    V_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Persistent programs share the items of all groups, because only the device knows the count.

    HEADS: query heads of one group. v_ptr None: the values are the first V_D elements of the keys.
    """
    zero_padding(out_ptr, offsets_ptr, num_rows, num_tokens, GROUPS * HEADS * V_D, 1024)
    for i in range(tl.program_id(0), tl.load(counts_ptr) * GROUPS, tl.num_programs(0)):
        _attend_item(
            i // GROUPS, i % GROUPS, q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr,
            out_ptr,
            values_ptr, stats_ptr, blocks_ptr, starts_ptr, offsets_ptr, items_ptr, q_stride,
            table_stride,
            KV_HEADS, GROUPS, HEADS, D, V_D, BLOCK_SIZE, WINDOW, CHUNK, SOFT_CAP, SPLIT, TILE,
            BLOCK_M, BLOCK_N,
            FLAT,
        )  # fmt: skip
