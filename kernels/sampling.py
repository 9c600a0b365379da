"""Sampling: greedy, or random among the tokens that min-p, top-k and top-p keep.

Random sampling uses the Gumbel-max trick in the form of a race: each token arrives after an
exponential time divided by its probability, and the first one wins (Maddison et al., 2014, "A*
Sampling"). The kernels compute logarithms of these times, which are negated Gumbel noise minus the
logits. Distances are those of cut.py. The partition of a row into programs depends only on V, and
rows do not interact, so a row's token depends on nothing but the row.

`apply_bitmask` applies grammar masks before. runner/sampling/reference.py is the specification.

Sizes: S rows, V vocabulary, B tiles of TILE tokens, P parts of RACE_BLOCK tokens; C masked rows, W
words of 32 tokens.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels.cut import cut, distance, near_enough

TILE = 512
TILES = 4  # tiles per program of `tile_peaks_kernel`
RACE_BLOCK = 2048  # tokens per program of `race_kernel`
MASK_BLOCK = 4096  # tokens per program of `bitmask_kernel`
# Status of a row.
FINE = tl.constexpr(0)
NOT_FINITE = tl.constexpr(1)
NOTHING_ALLOWED = tl.constexpr(2)
NO_ID = tl.constexpr(2**31 - 1)
# Bounds of `log_time`.
EARLIEST = -22.2
LATEST = 2.8
HOPELESS = LATEST - EARLIEST  # a token at this distance never arrives before the most likely one
SCALE = tl.constexpr(2.0**-31 * (1 - 2.0**-23))  # maps 31 bits into (0, 1), see `log_time`
SMALL = tl.constexpr(1 / 16)  # below this, `log_time` uses a series


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The sampling parameters of each row, on the device."""

    temperature_S: Tensor  # float32; 0 for greedy sampling, whatever the other parameters are
    log_min_p_S: Tensor  # float32; -inf for off
    top_k_S: Tensor  # int32, at least 1; V or more for off
    top_p_S: Tensor  # float32; 1 for off
    low_S: Tensor  # int32, lower half of a random key made from seed and position
    high_S: Tensor  # int32, upper half


@triton.jit
def tile_peaks_kernel(
    logits_ptr,
    peaks_ptr,
    ids_ptr,
    stride,
    width,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program finds the largest logit of each of TILES tiles, and the first token with it.

    NaN counts as infinity.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(logits_ptr + row * stride + column, mask=column < width, other=float("-inf")).to(
        tl.float32
    )
    x = tl.where(x == x, x, float("inf"))
    peak = tl.max(x, axis=1)
    first = tl.min(tl.where(x == peak[:, None], column, NO_ID), axis=1)
    tl.store(peaks_ptr + row * num_tiles + tile, peak, mask=tile < num_tiles)
    tl.store(ids_ptr + row * num_tiles + tile, first, mask=tile < num_tiles)


@triton.jit
def row_kernel(
    tile_peaks_ptr, ids_ptr, raw_peaks_ptr, temperature_ptr, log_min_p_ptr, top_k_ptr, top_p_ptr,
    tokens_ptr, status_ptr, peaks_ptr, farthest_ptr, near_ptr, num_tiles, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes a row's peak, most likely token, status, and bounds of the distance.

    farthest: the cutoff of min-p; negative if the row is not sampled at random.
    near: a bound of the cutoff of top-k and top-p; negative if both are off.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    tile_peaks = tl.load(
        tile_peaks_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf")
    )
    ids = tl.load(ids_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=NO_ID)
    peak = tl.max(tile_peaks, axis=0)
    raw_peak = tl.load(raw_peaks_ptr + row) if raw_peaks_ptr is not None else peak
    infinite = (tl.abs(raw_peak) == float("inf")) | (raw_peak != raw_peak) | (peak == float("inf"))
    status = tl.where(infinite, NOT_FINITE, tl.where(peak == float("-inf"), NOTHING_ALLOWED, FINE))
    likeliest = tl.min(tl.where(tile_peaks == peak, ids, NO_ID), axis=0)
    tl.store(tokens_ptr + row, tl.where(status == FINE, likeliest, 0))
    tl.store(status_ptr + row, status.to(status_ptr.dtype.element_ty))
    tl.store(peaks_ptr + row, peak)
    temperature = tl.load(temperature_ptr + row)
    farthest = tl.full((), -1.0, tl.float32)
    near = tl.full((), -1.0, tl.float32)
    if (status == FINE) & (temperature > 0):
        farthest = -tl.load(log_min_p_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        if (top_k < width) | (top_p < 1):
            near = near_enough(
                tile_peaks, peak, temperature, farthest, top_k, top_p, num_tiles, width
            )
    tl.store(farthest_ptr + row, farthest)
    tl.store(near_ptr + row, near)


@triton.jit
def hash_of(ids):
    """Return a uint32 hash of token ids: murmur3's finalizer of id * 2^32 / golden ratio."""
    x = (ids + 1).to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def log_time(ids, low, high):
    """Return the logarithms of the tokens' arrival times if all had weight 1.

    31 bits of a hash become a uniform number u from 2^-32 to just below 1. Winners have small u,
    where float32 is most precise.

    low, high: uint32, the row's random key.
    """
    x = (hash_of(ids) ^ low) * 0x85EBCA6B
    x = (x ^ (x >> 16) ^ high) * 0xC2B2AE35
    x = (x ^ (x >> 15)) * 0x7FEB352D
    u = ((x >> 1).to(tl.int32).to(tl.float32) + 0.5) * SCALE
    # -log(1 - u). For small u use the series, because 1 - u would lose digits of u.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return tl.log(tl.where(u < SMALL, series, -tl.log(1 - u)))


@triton.jit
def race_kernel(
    logits_ptr, peaks_ptr, temperature_ptr, farthest_ptr, low_ptr, high_ptr, times_ptr, ids_ptr,
    stride, width, num_parts, HOPELESS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds the first to arrive of BLOCK tokens of a row, and its time (logarithm)."""
    row = tl.program_id(0).to(tl.int64)
    farthest = tl.load(farthest_ptr + row)
    if farthest < 0:
        return
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + column, mask=column < width, other=float("-inf")).to(
        tl.float32
    )
    d = distance(x, tl.load(peaks_ptr + row), tl.load(temperature_ptr + row))
    takes_part = d <= tl.minimum(farthest, HOPELESS)
    first_time = tl.full((), float("inf"), tl.float32)
    first = tl.full((), NO_ID, tl.int32)
    if tl.max(takes_part.to(tl.int32), axis=0) > 0:
        low = tl.load(low_ptr + row).to(tl.uint32, bitcast=True)
        high = tl.load(high_ptr + row).to(tl.uint32, bitcast=True)
        time = tl.where(takes_part, d + log_time(column, low, high), float("inf"))
        first_time = tl.min(time, axis=0)
        first = tl.min(tl.where(time == first_time, column, NO_ID), axis=0)
    tl.store(times_ptr + row * num_parts + part, first_time)
    tl.store(ids_ptr + row * num_parts + part, first)


@triton.jit
def winner_kernel(times_ptr, ids_ptr, farthest_ptr, tokens_ptr, num_parts, BLOCK: tl.constexpr):
    """One program stores the winner of a row, if the row is sampled at random."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(farthest_ptr + row) < 0:
        return
    part = tl.arange(0, BLOCK)
    time = tl.load(times_ptr + row * num_parts + part, mask=part < num_parts, other=float("inf"))
    ids = tl.load(ids_ptr + row * num_parts + part, mask=part < num_parts, other=NO_ID)
    tl.store(tokens_ptr + row, tl.min(tl.where(time == tl.min(time, axis=0), ids, NO_ID), axis=0))


def sample(
    logits_SV: Tensor,
    rows: SamplingTensors,
    raw_peaks_S: Tensor | None = None,
    *,
    draws: bool = True,
    cuts: bool = True,
) -> tuple[Tensor, Tensor]:
    """Sample a token of each row. Return (tokens int32 [S], status uint8 [S]).

    The status is FINE, NOT_FINITE or NOTHING_ALLOWED; the token is 0 unless it is FINE. Tokens with
    equal logits are kept or dropped together. The lowest id wins a tie.

    raw_peaks_S: each row's largest logit before penalties and masks, NaN if any logit is; None if
        nothing has changed the logits.
    draws: whether any row has a temperature above 0.
    cuts: whether any of those has top-k or top-p.

    Example: logits [[0, 2, 2], [1, -inf, -inf]], temperature 0 -> tokens [1, 0], status [0, 0]
    """
    num_rows, width = logits_SV.shape
    assert logits_SV.stride(1) == 1, logits_SV.stride()
    device = logits_SV.device

    def _new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tokens_S = _new(num_rows, dtype=torch.int32)
    status_S = _new(num_rows, dtype=torch.uint8)
    if not num_rows:
        return tokens_S, status_S
    num_tiles = triton.cdiv(width, TILE)
    num_parts = triton.cdiv(width, RACE_BLOCK)
    tile_peaks_SB = _new(num_rows, num_tiles)
    ids_SB = _new(num_rows, num_tiles, dtype=torch.int32)
    peaks_S = _new(num_rows)
    farthest_S = _new(num_rows)
    near_S = _new(num_rows)
    tile_peaks_kernel[(num_rows, triton.cdiv(num_tiles, TILES))](
        logits_SV,
        tile_peaks_SB,
        ids_SB,
        logits_SV.stride(0),
        width,
        num_tiles,
        TILE=TILE,
        TILES=TILES,
        num_warps=4,
    )
    row_kernel[(num_rows,)](
        tile_peaks_SB, ids_SB, raw_peaks_S, rows.temperature_S, rows.log_min_p_S, rows.top_k_S,
        rows.top_p_S,
        tokens_S, status_S, peaks_S, farthest_S, near_S, num_tiles, width,
        BLOCK=triton.next_power_of_2(num_tiles), num_warps=4,
    )  # fmt: skip
    if draws and cuts:
        cut(logits_SV, peaks_S, rows.temperature_S, rows.top_k_S, rows.top_p_S, near_S, farthest_S)
    if draws:
        times_SP = _new(num_rows, num_parts)
        ids_SP = _new(num_rows, num_parts, dtype=torch.int32)
        race_kernel[(num_rows, num_parts)](
            logits_SV, peaks_S, rows.temperature_S, farthest_S, rows.low_S, rows.high_S, times_SP,
            ids_SP,
            logits_SV.stride(0), width, num_parts, HOPELESS=HOPELESS, BLOCK=RACE_BLOCK, num_warps=4,
        )  # fmt: skip
        winner_kernel[(num_rows,)](
            times_SP,
            ids_SP,
            farthest_S,
            tokens_S,
            num_parts,
            BLOCK=triton.next_power_of_2(num_parts),
            num_warps=4,
        )
    return tokens_S, status_S


@triton.jit(do_not_specialize=["stride"])
def bitmask_kernel(x_ptr, rows_ptr, bits_ptr, stride, width, words, BLOCK: tl.constexpr):
    """One program masks BLOCK tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits_ptr + row * words + token // 32, mask=token < width, other=-1)
    is_banned = ((word >> (token % 32)) & 1) == 0
    logit_ptrs = x_ptr + tl.load(rows_ptr + row) * stride + token
    tl.store(logit_ptrs, tl.full((BLOCK,), float("-inf"), x_ptr.dtype.element_ty), mask=is_banned)


def apply_bitmask(x_rV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
    """Set the tokens whose bit is 0 to -inf in the given rows (int64), in place."""
    count, words = bits_CW.shape
    width = x_rV.shape[1]
    assert words * 32 >= width, (words, width)
    assert x_rV.stride(1) == 1, x_rV.stride()
    assert bits_CW.is_contiguous(), bits_CW.stride()
    grid = count, triton.cdiv(width, MASK_BLOCK)
    bitmask_kernel[grid](
        x_rV, rows_C, bits_CW, x_rV.stride(0), width, words, BLOCK=MASK_BLOCK, num_warps=4
    )
