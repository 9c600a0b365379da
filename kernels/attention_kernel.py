"""The kernel of attention over a paged cache: what a program does with one work item of attention_plan.py.

N positions of a KV tile, M query rows of a program: the h query heads of one KV head for some neighbouring tokens, so
that keys and values are read once for all of them. KV tiles have a fixed size and are counted from position 0, splits
too; a row's sums never depend on what else is in the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.attention_plan import EVERYTHING as ALL
from moeserve.kernels.attention_sums import LOG2E, LOWEST, fold, normalised, within, zero_padding

EVERYTHING = tl.constexpr(ALL)


@triton.jit
def _load_entries(ptr, scales_ptr, rows, D: tl.constexpr, D_PAD: tl.constexpr, ENTRY: tl.constexpr):
    """(elements [N, d], scales [N] or ones) of the KV entries at `rows`."""
    columns = tl.arange(0, D_PAD)
    at = ptr + rows[:, None] * ENTRY + columns[None, :]
    x = tl.load(at) if D == D_PAD else tl.load(at, mask=(columns < D)[None, :], other=0)
    if scales_ptr is None:
        scales = tl.full(rows.shape, 1.0, tl.float32)
    else:
        scales = tl.load(scales_ptr + rows * (ENTRY // 4) + D // 4)
    return x, scales


@triton.jit
def _attend_split(
    q, seen, table_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, group, low, high, sure, begin, end,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ENTRY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum over positions begin .. end-1 (multiples of BLOCK_N) that lie between low and high; no others are read.
    seen [M]: the last that a row sees. sure: where positions begin that some row does not see."""
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    values = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    for at in range(tl.maximum(begin, low // BLOCK_N * BLOCK_N), tl.minimum(end, high + 1), BLOCK_N):
        positions = at + tl.arange(0, BLOCK_N)
        near = tl.minimum(tl.maximum(positions, low), high)  # what lies elsewhere may be NaN
        block = tl.load(table_ptr + near // BLOCK_SIZE).to(tl.int32)
        rows = (block.to(tl.int64) * BLOCK_SIZE + near % BLOCK_SIZE) * KV_HEADS + group
        k, k_scales = _load_entries(k_ptr, k_scales_ptr, rows, D, D_PAD, ENTRY)
        v, v_scales = _load_entries(v_ptr, v_scales_ptr, rows, D, D_PAD, ENTRY)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if k_scales_ptr is not None:
            scores = scores * k_scales[None, :]
        if SOFT_CAP > 0:
            scores = SOFT_CAP * (1 - 2 / (tl.exp2(scores * (2 * LOG2E / SOFT_CAP)) + 1))
        if at + BLOCK_N > sure:
            visible = positions[None, :] <= seen[:, None]
            if WINDOW != EVERYTHING:
                visible = visible & (positions[None, :] > seen[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))

        most = tl.maximum(largest, tl.max(scores, 1) * LOG2E)
        base = tl.maximum(most, LOWEST)
        p = tl.exp2(tl.fma(scores, LOG2E, -base[:, None]))
        old = tl.exp2(largest - base)
        weight = tl.fma(weight, old, tl.sum(p, 1))
        if v_scales_ptr is not None:
            p = p * v_scales[None, :]
        values = tl.dot(p.to(q.dtype), v.to(q.dtype), values * old[:, None], input_precision="ieee")
        largest = most
    return largest, weight, values


@triton.jit
def _attend_item(
    item, group, q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr, values_ptr, stats_ptr,
    blocks_ptr, starts_ptr, offsets_ptr, items_ptr, q_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ENTRY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """One work item of one KV head: its token rows' results, or the sums of one split. FLAT: splits that are not cut
    run into each other, which is faster and rounds otherwise."""
    row = tl.load(items_ptr + item * 4).to(tl.int64)
    tile = tl.load(items_ptr + item * 4 + 1)
    split = tl.load(items_ptr + item * 4 + 2)
    slot = tl.load(items_ptr + item * 4 + 3).to(tl.int64)
    start = tl.load(starts_ptr + row)
    first_token = tl.load(offsets_ptr + row)
    new = tl.load(offsets_ptr + row + 1) - first_token
    m = tl.arange(0, BLOCK_M)
    step = tile * TILE + m // GROUP
    valid = (m < TILE * GROUP) & (step < new)
    heads = group * GROUP + m % GROUP
    columns = tl.arange(0, D_PAD)
    wanted = within(valid, columns, D)
    tokens = (first_token + step).to(tl.int64)
    q = tl.load(q_ptr + (tokens * q_stride + heads * D)[:, None] + columns[None, :], mask=wanted, other=0.0)
    seen = tl.where(valid, start + step, -1)
    low = tl.maximum(start + tile * TILE - WINDOW + 1, 0)
    high = start + tl.minimum(tile * TILE + TILE, new) - 1
    sure = start + tile * TILE + 1 if WINDOW == EVERYTHING else 0

    cut = slot >= 0
    parts_begin = tl.where(cut, split, low // SPLIT)
    parts_end = tl.where(cut, split, high // SPLIT) + 1
    if FLAT:
        largest, weight, values = _attend_split(
            q, seen, blocks_ptr + row * table_stride, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, group,
            low, high, sure, parts_begin * SPLIT, parts_end * SPLIT,
            KV_HEADS, D, D_PAD, ENTRY, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        values = tl.zeros((BLOCK_M, D_PAD), tl.float32)
        for part in range(parts_begin, parts_end):
            next_largest, next_weight, next_values = _attend_split(
                q, seen, blocks_ptr + row * table_stride, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, group,
                low, high, sure, part * SPLIT, part * SPLIT + SPLIT,
                KV_HEADS, D, D_PAD, ENTRY, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            largest, weight, values = fold(largest, weight, values, next_largest, next_weight, next_values)

    if cut:
        at_row = (slot * KV_HEADS + group) * BLOCK_M + m
        tl.store(stats_ptr + at_row * 2, largest, mask=valid)
        tl.store(stats_ptr + at_row * 2 + 1, weight, mask=valid)
        tl.store(values_ptr + at_row[:, None] * D + columns[None, :], values, mask=wanted)
    else:
        y = normalised(largest, weight, values, sinks_ptr, heads, valid)
        to = out_ptr + (tokens * (KV_HEADS * GROUP) + heads)[:, None] * D + columns[None, :]
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_stride"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr, values_ptr, stats_ptr, blocks_ptr, starts_ptr,
    offsets_ptr, items_ptr, counts_ptr, num_rows, num_tokens, q_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ENTRY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Programs share the items of all KV heads: how many there are, only the device knows."""
    zero_padding(out_ptr, offsets_ptr, num_rows, num_tokens, KV_HEADS * GROUP * D, 1024)
    for i in range(tl.program_id(0), tl.load(counts_ptr) * KV_HEADS, tl.num_programs(0)):
        _attend_item(
            i // KV_HEADS, i % KV_HEADS, q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr,
            values_ptr, stats_ptr, blocks_ptr, starts_ptr, offsets_ptr, items_ptr, q_stride, table_stride,
            KV_HEADS, GROUP, D, D_PAD, ENTRY, BLOCK_SIZE, WINDOW, SOFT_CAP, SPLIT, TILE, BLOCK_M, BLOCK_N,
            FLAT,
        )  # fmt: skip
