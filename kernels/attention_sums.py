"""Merge partial softmax sums of attention (the second half of flash decoding).

The sum over some positions is (largest, weight, values), with scores in base 2: weight is the sum
of 2^(score - largest), and values is the sum of the values with these weights. `fold` adds two such
sums, and `merge_kernel` adds the splits of a cut tile.

G groups of heads, M query rows of a tile: all heads of its first token, then of the next one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def padded(width):
    """Round up to a valid block width. 80 -> 128; 1 -> 16, the smallest that `tl.dot` takes"""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def within(rows, columns, WIDTH: tl.constexpr):
    """Return a 2-D mask from a row mask and the number of columns."""
    mask = rows[:, None]
    if columns.shape[0] != WIDTH:
        mask = mask & (columns < WIDTH)[None, :]
    return mask


@triton.jit
def fold(largest, weight, values, next_largest, next_weight, next_values):
    """Add the sums of two ranges of positions. largest and weight are [M], values [M, d].

    Each step is one explicit operation, so every kernel rounds in the same way.
    """
    new_largest = tl.maximum(largest, next_largest)
    base = tl.maximum(new_largest, LOWEST)
    old_factor = tl.exp2(largest - base)
    next_factor = tl.exp2(next_largest - base)
    weight = tl.fma(next_weight, next_factor, weight * old_factor)
    return (
        new_largest,
        weight,
        tl.fma(next_values, next_factor[:, None], values * old_factor[:, None]),
    )


@triton.jit
def normalised(largest, weight, values, sinks_ptr, heads, valid):
    """Return values / weight. A head's sink is one more score, which adds weight but no value."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=valid, other=0.0) * LOG2E
        new_largest = tl.maximum(largest, sink)
        old_factor = tl.exp2(largest - new_largest)
        weight = tl.fma(weight, old_factor, tl.exp2(sink - new_largest))
        values = values * old_factor[:, None]
    # The weight is 0 in rows of the tile that are no query.
    return values / tl.where(weight == 0, 1.0, weight)[:, None]


@triton.jit
def zero_padding(
    out_ptr, offsets_ptr, num_rows, num_tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Write zeros to padding tokens, which no row owns. All programs share the work."""
    for token in range(
        tl.load(offsets_ptr + num_rows) + tl.program_id(0), num_tokens, tl.num_programs(0)
    ):
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
            tl.store(
                out_ptr + tl.cast(token, tl.int64) * WIDTH + columns, zeros, mask=columns < WIDTH
            )


@triton.jit
def merge_kernel(
    values_ptr, stats_ptr, sinks_ptr, out_ptr, offsets_ptr, merges_ptr, counts_ptr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One program merges ROWS query rows of a cut tile. HEADS: query heads of one group."""
    merge = tl.program_id(0)
    if merge >= tl.load(counts_ptr + 1):
        return
    group = tl.program_id(1) // (BLOCK_M // ROWS)
    first = tl.program_id(1) % (BLOCK_M // ROWS) * ROWS
    row = tl.load(merges_ptr + merge * 4)
    tile = tl.load(merges_ptr + merge * 4 + 1)
    slot = tl.load(merges_ptr + merge * 4 + 2).to(tl.int64)
    count = tl.load(merges_ptr + merge * 4 + 3)
    tile_token = tl.load(offsets_ptr + row) + tile * TILE
    num_rows = tl.minimum(tl.load(offsets_ptr + row + 1) - tile_token, TILE) * HEADS
    if first >= num_rows:
        return
    m = first + tl.arange(0, ROWS)
    valid = m < num_rows
    token = tile_token + m // HEADS
    splits = tl.where(valid, count, 0)
    columns = tl.arange(0, padded(D))

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, padded(D)), tl.float32)
    for first_split in range(0, count, UNROLL):
        # Unrolled to load several splits at once. Splits after the last one add nothing.
        for i in tl.static_range(UNROLL):
            part_rows = ((slot + first_split + i) * GROUPS + group) * BLOCK_M + m
            exists = splits > first_split + i
            next_largest = tl.load(stats_ptr + part_rows * 2, mask=exists, other=float("-inf"))
            next_weight = tl.load(stats_ptr + part_rows * 2 + 1, mask=exists, other=0.0)
            values_ptrs = values_ptr + part_rows[:, None] * D + columns[None, :]
            next_values = tl.load(values_ptrs, mask=within(exists, columns, D), other=0.0)
            largest, weight, values = fold(
                largest, weight, values, next_largest, next_weight, next_values
            )
    heads = group * HEADS + m % HEADS
    y = normalised(largest, weight, values, sinks_ptr, heads, valid)
    out_ptrs = (
        out_ptr + (token.to(tl.int64) * (GROUPS * HEADS) + heads)[:, None] * D + columns[None, :]
    )
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=within(valid, columns, D))


def row_floats(width: int) -> int:
    """Return the size of one query row's sum, in fp32 numbers."""
    return width + 2


def split_space(space: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return flat views of values [rows, width] and stats [rows, 2] inside a workspace."""
    assert space.dtype == torch.float32, space.dtype
    assert space.numel() >= rows * row_floats(width), (space.shape, rows, width)
    return space[: rows * width], space[rows * width :]
