"""Sums of attention: how those of two stretches of a context become one, and the kernel that adds a
cut tile's splits.

A sum is (largest score, weight, values): scores in powers of two, the weight the sum of 2^(score -
largest), values weighted by the same. G groups of heads that a tile's items share, M query rows of
a tile: those of one token, head by head, then the next token's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def padded(width):
    """Columns of a block that holds `width` of them. 80 -> 128; 1 -> 16, the least that products
    take
    """
    return max(16, triton.next_power_of_2(width))


@triton.jit
def within(rows, columns, WIDTH: tl.constexpr):
    """The mask of a block whose rows are wanted where `rows` says so, and whose columns end at
    WIDTH.
    """
    mask = rows[:, None]
    if columns.shape[0] != WIDTH:
        mask = mask & (columns < WIDTH)[None, :]
    return mask


@triton.jit
def fold(largest, weight, values, next_largest, next_weight, next_values):
    """The sum of what came before and of the next stretch, for rows [M] and values [M, d].

    Each step is one explicit operation, so that every kernel rounds alike.
    """
    most = tl.maximum(largest, next_largest)
    base = tl.maximum(most, LOWEST)
    old = tl.exp2(largest - base)
    fresh = tl.exp2(next_largest - base)
    weight = tl.fma(next_weight, fresh, weight * old)
    return most, weight, tl.fma(next_values, fresh[:, None], values * old[:, None])


@triton.jit
def normalised(largest, weight, values, sinks_ptr, heads, valid):
    """values / weight, where each head's sink, if there are any, is a score that gives no value."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=valid, other=0.0) * LOG2E
        most = tl.maximum(largest, sink)
        old = tl.exp2(largest - most)
        weight = tl.fma(weight, old, tl.exp2(sink - most))
        values = values * old[:, None]
    return (
        values / tl.where(weight == 0, 1.0, weight)[:, None]
    )  # 0: a row of the tile that is no query


@triton.jit
def zero_padding(
    out_ptr, offsets_ptr, num_rows, num_tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Tokens that no row owns, shared by all programs."""
    for token in range(
        tl.load(offsets_ptr + num_rows) + tl.program_id(0), num_tokens, tl.num_programs(0)
    ):
        for at in range(0, WIDTH, BLOCK):
            columns = at + tl.arange(0, BLOCK)
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
    """One program: ROWS query rows of a cut tile. HEADS: of one group."""
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
    for at in range(0, count, UNROLL):
        for i in tl.static_range(
            UNROLL
        ):  # loads of several splits at once; those beyond the last add nothing
            at_row = ((slot + at + i) * GROUPS + group) * BLOCK_M + m
            real = splits > at + i
            next_largest = tl.load(stats_ptr + at_row * 2, mask=real, other=float("-inf"))
            next_weight = tl.load(stats_ptr + at_row * 2 + 1, mask=real, other=0.0)
            at_values = values_ptr + at_row[:, None] * D + columns[None, :]
            next_values = tl.load(at_values, mask=within(real, columns, D), other=0.0)
            largest, weight, values = fold(
                largest, weight, values, next_largest, next_weight, next_values
            )
    heads = group * HEADS + m % HEADS
    y = normalised(largest, weight, values, sinks_ptr, heads, valid)
    to = out_ptr + (token.to(tl.int64) * (GROUPS * HEADS) + heads)[:, None] * D + columns[None, :]
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=within(valid, columns, D))


def row_floats(width: int) -> int:
    """fp32 numbers that hold the sum of one query row."""
    return width + 2


def split_space(space: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """(values [rows, width], stats [rows, 2]) inside a work space; without rows, anything."""
    assert space.dtype == torch.float32, space.dtype
    assert space.numel() >= rows * row_floats(width), (space.shape, rows, width)
    return space[: rows * width], space[rows * width :]
