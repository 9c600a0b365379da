"""Split the queries of one step into work items of attention.

The plan is computed on the device, so the host does not wait and CUDA graphs can replay it.

R rows (requests), T tokens. A tile is a few adjacent queries of one row. A split is SPLIT absolute
positions of a context. A tile with a long context is cut: it has one item per split, whose sums
attention_sums.py adds in order. Any other tile is one item, which adds its splits itself, in the
same order. Cutting therefore never changes the result.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 512  # positions; a multiple of every kernel's KV tile
SPLIT_TILES = 8  # a row with more tiles fills the device without being cut
EVERYTHING = 1 << 30  # a window or chunk size that masks nothing
ANY = 1 << 30  # no limit on the new tokens of a row
FIELDS = 4  # of an item and of a merge, see `WorkList`


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of a step that the host knows. In a CUDA graph they hold for every replay."""

    rows: int
    tokens: int
    new_tokens: int  # of one row
    context: int  # of one row, new tokens included


@dataclass(frozen=True, slots=True)
class WorkList:
    """Items and merges of the rows that have `least` to `most` new tokens.

    items_I4: int32 (row, tile, split, slot) of each item; split and slot are -1 if the tile is not
        cut.
    merges_M4: int32 (row, tile, first slot, number of splits) of each cut tile.
    counts_2: the number of items and of merges.
    """

    items_I4: Tensor
    merges_M4: Tensor
    counts_2: Tensor


@triton.jit
def first_seen(position, window, chunk):
    """Return the first visible position, given a sliding window and chunked attention."""
    return tl.maximum(tl.maximum(position - window + 1, 0), position // chunk * chunk)


@triton.jit
def _tiles_and_splits(
    starts_ptr, offsets_ptr, row, inside, least, most, window, chunk, TILE, SPLIT, SPLIT_TILES
):
    """Return (tiles, first split, splits) of each row. 1 split: the row is not cut."""
    start = tl.load(starts_ptr + row, mask=inside, other=0)
    new = tl.load(offsets_ptr + row + 1, mask=inside, other=0) - tl.load(
        offsets_ptr + row, mask=inside, other=0
    )
    tiles = tl.where((new >= least) & (new <= most), (new + TILE - 1) // TILE, 0)
    begin = first_seen(start, window, chunk)
    first = begin // SPLIT
    splits = (start + new - 1) // SPLIT - first + 1
    is_cut = (start + new - begin > SPLIT) & (tiles <= SPLIT_TILES) & (tiles > 0)
    return tiles, first, tl.where(is_cut, splits, 1)


@triton.jit(do_not_specialize=["num_rows", "least", "most", "capacity", "window", "chunk"])
def plan_kernel(
    starts_ptr, offsets_ptr, items_ptr, merges_ptr, counts_ptr, num_rows, least, most, capacity,
    window, chunk,
    TILE: tl.constexpr, SPLIT: tl.constexpr, SPLIT_TILES: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes the items of one row.

    Each program counts the items of all earlier rows itself, to find where its own begin.
    """
    row = tl.program_id(0)
    rows = tl.arange(0, BLOCK_R)
    tiles, first, splits = _tiles_and_splits(
        starts_ptr,
        offsets_ptr,
        rows,
        rows < num_rows,
        least,
        most,
        window,
        chunk,
        TILE,
        SPLIT,
        SPLIT_TILES,
    )
    slots = tl.where(splits > 1, tiles * splits, 0)
    slots_end = tl.cumsum(slots, 0)
    # Rows for which no slots are left are not cut, which is slower with equal results.
    splits = tl.where(slots_end <= capacity, splits, 1)
    items = tiles * splits
    merges = tl.where(splits > 1, tiles, 0)
    if row == 0:
        tl.store(counts_ptr, tl.sum(items, 0))
        tl.store(counts_ptr + 1, tl.sum(merges, 0))

    is_own_row = rows == row
    tiles_here = tl.sum(tl.where(is_own_row, tiles, 0), 0)
    splits_here = tl.sum(tl.where(is_own_row, splits, 0), 0)
    first_here = tl.sum(tl.where(is_own_row, first, 0), 0)
    slot = tl.sum(tl.where(is_own_row, slots_end - slots, 0), 0)
    item_base = tl.sum(tl.where(rows < row, items, 0), 0)
    merge_base = tl.sum(tl.where(rows < row, merges, 0), 0)
    count = tiles_here * splits_here
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < count
        tile = tiles_here - 1 - i // splits_here  # last tile first: it has the longest context
        entry_ptrs = items_ptr + (item_base + i) * 4
        tl.store(entry_ptrs, row + tl.zeros_like(i), mask=inside)
        tl.store(entry_ptrs + 1, tile, mask=inside)
        tl.store(
            entry_ptrs + 2, tl.where(splits_here > 1, first_here + i % splits_here, -1), mask=inside
        )
        tl.store(
            entry_ptrs + 3,
            tl.where(splits_here > 1, slot + tile * splits_here + i % splits_here, -1),
            mask=inside,
        )
    tile = tl.arange(0, SPLIT_TILES)
    is_cut = tile < tl.where(splits_here > 1, tiles_here, 0)
    entry_ptrs = merges_ptr + (merge_base + tile) * 4
    tl.store(entry_ptrs, row + tl.zeros_like(tile), mask=is_cut)
    tl.store(entry_ptrs + 1, tile, mask=is_cut)
    tl.store(entry_ptrs + 2, slot + tile * splits_here, mask=is_cut)
    tl.store(entry_ptrs + 3, splits_here + tl.zeros_like(tile), mask=is_cut)


def most_splits(bounds: Bounds, reach: int, tile: int) -> int:
    """Return the largest number of splits of a cut row; 1: no row is cut.

    reach: an upper bound of the positions that a query sees.

    contexts up to 512: 1; up to 513: 2; reach 1000, one new token: 1000 positions touch up to 3
    """
    seen = min(bounds.context, reach + min(bounds.new_tokens, SPLIT_TILES * tile) - 1)
    if seen <= SPLIT:
        return 1
    return min(-(-bounds.context // SPLIT), -(-(seen - 1) // SPLIT) + 1)


def most_tiles(bounds: Bounds, tile: int) -> int:
    """Return the largest number of tiles that all rows together can have."""
    return min(
        bounds.tokens,
        bounds.tokens // tile + bounds.rows,
        bounds.rows * -(-bounds.new_tokens // tile),
    )


def most_slots(bounds: Bounds, reach: int, tile: int) -> int:
    """Return the largest number of slots (partial results) that cutting can use."""
    splits = most_splits(bounds, reach, tile)
    return 0 if splits == 1 else min(most_tiles(bounds, tile), bounds.rows * SPLIT_TILES) * splits


def list_work(
    starts_R: Tensor,
    offsets_R1: Tensor,
    bounds: Bounds,
    tile: int,
    window: int,
    chunk: int,
    capacity: int,
    least: int = 1,
    most: int = ANY,
) -> WorkList:
    """List the work of rows with `least` to `most` new tokens, in tiles of `tile` tokens.

    starts_R, offsets_R1: int32 on the device. Row i owns tokens offsets[i] .. offsets[i+1]-1, which
        begin at position starts[i].
    capacity: the number of slots.

    starts [600, 5], offsets [0, 1, 4], tile 2: items (0, 0, 0, 0), (0, 0, 1, 1), (1, 1, -1, -1),
    (1, 0, -1, -1) and the merge (0, 0, 0, 2)
    """
    rows = starts_R.shape[0]
    assert starts_R.dtype == offsets_R1.dtype == torch.int32, (starts_R.dtype, offsets_R1.dtype)
    assert offsets_R1.shape == (rows + 1,), (starts_R.shape, offsets_R1.shape)
    assert starts_R.is_contiguous(), starts_R.stride()
    assert offsets_R1.is_contiguous(), offsets_R1.stride()
    assert 0 < rows <= bounds.rows, (rows, bounds)
    slots = min(capacity, most_slots(bounds, min(window, chunk), tile))
    items = starts_R.new_empty((most_tiles(bounds, tile) + slots, FIELDS))
    merges = starts_R.new_empty((min(slots // 2, most_tiles(bounds, tile)), FIELDS))
    counts = starts_R.new_empty(2)
    plan_kernel[(rows,)](
        starts_R, offsets_R1, items, merges, counts, rows, least, most, slots, window, chunk,
        TILE=tile, SPLIT=SPLIT, SPLIT_TILES=SPLIT_TILES,
        BLOCK_R=max(256, triton.next_power_of_2(rows)), BLOCK=128,
        num_warps=4,
    )  # fmt: skip
    return WorkList(items_I4=items, merges_M4=merges, counts_2=counts)
