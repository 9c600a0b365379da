"""Logprobs and rank of the sampled token, and the top logprobs, without computing all logprobs.

The n best tiles, ordered by their best tokens, contain the n most likely tokens. So only n tiles
are searched.

P rows, V vocabulary, B tiles of TILE tokens, n top tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
TILES = 16  # tiles per program
PLACES = 32  # least width of the block of top tokens, so that few kernels are compiled
LOW = tl.constexpr(0x7FFFFFFF)
REMOVED = tl.constexpr(-(2**63))  # the key of an entry that was taken or does not exist


@triton.jit
def tiles_kernel(
    logits_ptr, chosen_ptr, tile_peaks_ptr, peaks_ptr, sums_ptr, ranks_ptr, stride, width,
    num_tiles, num_parts,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program reads TILES tiles of a row (a part).

    It stores the peak of each tile. For the part, it stores the peak, the sum of exponentials and
    the number of tokens that are at least as likely as the chosen one.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tile = part * TILES + tl.arange(0, TILES)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = column < width
    x = tl.load(logits_ptr + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    chosen = tl.load(logits_ptr + row * stride + tl.load(chosen_ptr + row)).to(tl.float32)
    tile_peaks = tl.max(x, axis=1)
    peak = tl.max(tile_peaks, axis=0)
    floor = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(tile_peaks_ptr + row * num_tiles + tile, tile_peaks, mask=tile < num_tiles)
    tl.store(peaks_ptr + row * num_parts + part, peak)
    tl.store(sums_ptr + row * num_parts + part, tl.sum(tl.sum(tl.exp(x - floor), axis=1), axis=0))
    at_least = (x >= chosen) & inside
    tl.store(
        ranks_ptr + row * num_parts + part, tl.sum(tl.sum(at_least.to(tl.int32), axis=1), axis=0)
    )


@triton.jit
def key_of(x, index):
    """Return unique int64 keys that are ordered like (x, -index).

    A float's bits are ordered like an integer if the bits of negative floats are flipped.
    """
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & LOW)).to(tl.int64) << 32) | (index ^ LOW).to(tl.int64)


@triton.jit
def first_of(keys, n, PLACES: tl.constexpr):
    """Return the indices of the n largest keys [rows, columns] in order, padded with -1."""
    place = tl.arange(0, PLACES)
    indices = tl.full((PLACES,), -1, tl.int32)
    for i in range(n):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        index = tl.where(best == REMOVED, -1, (best & LOW).to(tl.int32) ^ LOW)
        indices = tl.where(place == i, index, indices)
        keys = tl.where(keys == best, REMOVED, keys)
    return indices


@triton.jit(do_not_specialize=["n"])
def rows_kernel(
    logits_ptr, chosen_ptr, tile_peaks_ptr, peaks_ptr, sums_ptr, ranks_ptr, ids_ptr, values_ptr,
    rank_ptr,
    stride, width, num_tiles, num_parts, n,
    TILE: tl.constexpr, TILE_BLOCK: tl.constexpr, PART_BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One program computes the results of one row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PART_BLOCK)
    has_part = part < num_parts
    peaks = tl.load(peaks_ptr + row * num_parts + part, mask=has_part, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_parts + part, mask=has_part, other=0.0)
    ranks = tl.load(ranks_ptr + row * num_parts + part, mask=has_part, other=0)
    peak = tl.max(peaks, axis=0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    log_sum = tl.log(tl.sum(sums * tl.exp(peaks - peak), axis=0))
    logits_ptr += row * stride
    ids_ptr += row * (n + 1)
    values_ptr += row * (n + 1)
    chosen = tl.load(chosen_ptr + row)
    tl.store(rank_ptr + row, tl.sum(ranks, axis=0).to(tl.int64))
    tl.store(ids_ptr, chosen)
    tl.store(values_ptr, tl.load(logits_ptr + chosen).to(tl.float32) - peak - log_sum)
    if n > 0:
        tile = tl.arange(0, TILE_BLOCK)
        tile_peaks = tl.load(
            tile_peaks_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf")
        )
        tile_keys = tl.where(tile < num_tiles, key_of(tile_peaks - peak - log_sum, tile), REMOVED)
        tiles = first_of(tile_keys[None, :], n, PLACES)
        column = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        inside = (tiles >= 0)[:, None] & (column < width)
        x = tl.load(logits_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
        keys = tl.where(inside, key_of(x - peak - log_sum, column), REMOVED)
        ids = first_of(keys, n, PLACES)
        place = tl.arange(0, PLACES)
        x = tl.load(logits_ptr + ids, mask=place < n, other=0.0).to(tl.float32)
        tl.store(ids_ptr + 1 + place, ids.to(tl.int64), mask=place < n)
        tl.store(values_ptr + 1 + place, x - peak - log_sum, mask=place < n)


def logprobs(logits_PV: Tensor, chosen_P: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ids, logprobs, rank) of each row.

    - ids int64 [P, 1 + n]: the chosen token, then the n most likely ones in order; ties by id.
    - logprobs float32 [P, 1 + n]: of these tokens.
    - rank int64 [P]: the number of tokens that are at least as likely as the chosen one.

    n is limited to V.

    Example: logits [[0, 0.693, 0.693, 0]], chosen [3], n 2 -> ids [[3, 1, 2]], logprobs [[-1.792,
    -1.099, -1.099]], rank [4]
    """
    rows, width = logits_PV.shape
    assert logits_PV.stride(1) == 1, logits_PV.stride()
    n = min(n, width)
    device = logits_PV.device
    num_tiles = triton.cdiv(width, TILE)
    num_parts = triton.cdiv(num_tiles, TILES)
    ids_PN = torch.empty((rows, 1 + n), dtype=torch.int64, device=device)
    values_PN = torch.empty((rows, 1 + n), dtype=torch.float32, device=device)
    rank_P = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return ids_PN, values_PN, rank_P
    tile_peaks = torch.empty((rows, num_tiles), dtype=torch.float32, device=device)
    peaks, sums = torch.empty((2, rows, num_parts), dtype=torch.float32, device=device)
    ranks = torch.empty((rows, num_parts), dtype=torch.int32, device=device)
    tiles_kernel[(rows, num_parts)](
        logits_PV, chosen_P, tile_peaks, peaks, sums, ranks, logits_PV.stride(0), width, num_tiles,
        num_parts,
        TILE=TILE, TILES=TILES, num_warps=8,
    )  # fmt: skip
    rows_kernel[(rows,)](
        logits_PV, chosen_P, tile_peaks, peaks, sums, ranks, ids_PN, values_PN, rank_P,
        logits_PV.stride(0), width, num_tiles, num_parts, n,
        TILE=TILE, TILE_BLOCK=triton.next_power_of_2(num_tiles),
        PART_BLOCK=triton.next_power_of_2(num_parts),
        PLACES=max(PLACES, triton.next_power_of_2(n)), num_warps=8,
    )  # fmt: skip
    return ids_PN, values_PN, rank_P
