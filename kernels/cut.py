"""Top-k and top-p filters without sorting: a binary search for the cutoff.

A token's distance is (largest logit of the row - its logit) / temperature, and its weight is
exp(-distance). Both filters keep the tokens up to some distance, the cutoff:

- Top-k keeps up to the largest distance that fewer than k tokens are below.
- Top-p keeps up to the largest distance below which lies less than top_p of the total weight.

Distances are not negative, so they are ordered like their bits (the key). The search determines the
key of the cutoff two bits at a time. Weights are summed as integers, so the order of summation does
not matter. Tokens with equal logits are kept or dropped together.

S rows, V vocabulary, C candidates: the tokens that are close enough to matter, gathered first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROOM = 16_384  # candidates per row; if there are more, the search reads the whole row
GATHER_BLOCK = 2048  # tokens per program of `gather_kernel`
SEARCH_BLOCK = 4096  # tokens per iteration of `cut_kernel`
ONE = tl.constexpr(2.0**40)  # the weight of the most likely token, as an integer
NO_KEY = tl.constexpr(2**32 - 1)
INFINITE_KEY = tl.constexpr(0x7F800000)


@triton.jit
def distance(x, peak, temperature):
    """Return (peak - x) / temperature. peak: the row's largest logit."""
    return tl.abs(tl.div_rn(peak - x, temperature))


@triton.jit
def key_of(x, peak, temperature, farthest):
    """Return (bits of the distance, weight) of each logit; NO_KEY beyond `farthest`."""
    d = distance(x, peak, temperature)
    weight = (tl.exp(-d) * ONE).to(tl.int64)
    return tl.where(d <= farthest, d.to(tl.uint32, bitcast=True), NO_KEY), weight


@triton.jit
def kth_distance(d, k):
    """Return the k-th smallest distance of a block."""
    keys = d.to(tl.int32, bitcast=True)
    kth_key = tl.full((), 0, tl.int32)
    for i in range(31):
        trial = kth_key | (1 << (30 - i))
        kth_key = tl.where(tl.sum((keys < trial).to(tl.int32), axis=0) < k, trial, kth_key)
    return kth_key.to(tl.float32, bitcast=True)


@triton.jit
def near_enough(tile_peaks, peak, temperature, farthest, top_k, top_p, num_tiles, width):
    """Return an upper bound of the cutoff, so that few tokens have to be gathered.

    With top-k: each of the k best tiles has a token within the distance of the k-th best tile.
    Without top-k: tokens with less than (1 - top_p) / 2V of the total weight are together too light
    to be kept by top-p. The peaks of the tiles give a lower bound of the total weight.
    """
    near = tl.full((), float("inf"), tl.float32)
    d = distance(tile_peaks, peak, temperature)
    if top_k < width:
        if top_k <= num_tiles:
            near = kth_distance(d, top_k)
    elif top_p < 1:
        near = tl.log(
            2.0 * width / ((1 - top_p) * tl.sum(tl.where(d <= farthest, tl.exp(-d), 0.0), axis=0))
        )
    return near


@triton.jit
def gather_kernel(
    logits_ptr, peaks_ptr, temperature_ptr, farthest_ptr, near_ptr, candidates_ptr, count_ptr,
    weight_ptr,
    stride, width, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program appends the candidates among BLOCK tokens of a row, and adds up their weight.

    Candidates are in no particular order.
    """
    row = tl.program_id(0).to(tl.int64)
    near = tl.load(near_ptr + row)
    if near < 0:
        return
    peak = tl.load(peaks_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    farthest = tl.load(farthest_ptr + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + column, mask=column < width, other=float("-inf"))
    d = distance(x.to(tl.float32), peak, temperature)
    weight = tl.where(d <= farthest, (tl.exp(-d) * ONE).to(tl.int64), 0)
    tl.atomic_add(weight_ptr + row, tl.sum(weight, axis=0), sem="relaxed")
    is_near = d <= tl.minimum(near, farthest)
    increment = is_near.to(tl.int32)
    first = tl.atomic_add(count_ptr + row, tl.sum(increment, axis=0), sem="relaxed")
    place = first + tl.cumsum(increment, axis=0) - increment
    tl.store(candidates_ptr + row * ROOM + place, x, mask=is_near & (place < ROOM))


@triton.jit
def sums_before(
    x_ptr,
    n,
    peak,
    temperature,
    farthest,
    key1,
    key2,
    key3,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the number, or the weight, of tokens below each of three keys."""
    sum1 = tl.zeros((BLOCK,), tl.int64)
    sum2 = tl.zeros((BLOCK,), tl.int64)
    sum3 = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, n, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < n, other=float("-inf")).to(tl.float32)
        key, weight = key_of(x, peak, temperature, farthest)
        if not BY_WEIGHT:
            weight = (index < n).to(tl.int64)
        sum1 += tl.where(key < key1, weight, 0)
        sum2 += tl.where(key < key2, weight, 0)
        sum3 += tl.where(key < key3, weight, 0)
    return tl.sum(sum1, axis=0), tl.sum(sum2, axis=0), tl.sum(sum3, axis=0)


@triton.jit
def last_key(
    x_ptr, n, peak, temperature, farthest, limit, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the largest key such that the tokens below it are fewer than `limit`.

    BY_WEIGHT: such that they weigh less than `limit`.
    """
    largest = tl.full((), 0, tl.uint32)
    step = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        key1 = largest + step
        key2 = largest + 2 * step
        key3 = largest + 3 * step
        sum1, sum2, sum3 = sums_before(
            x_ptr, n, peak, temperature, farthest, key1, key2, key3, BY_WEIGHT, BLOCK
        )
        largest = tl.where(
            sum3 < limit, key3, tl.where(sum2 < limit, key2, tl.where(sum1 < limit, key1, largest))
        )
        step = step >> 2
    return largest


@triton.jit
def kept_key(
    x_ptr, n, peak, temperature, farthest, top_k, top_p, weight, width, BLOCK: tl.constexpr
):
    """Return the key of the cutoff: first of top-k, then of top-p on the remaining weight."""
    cutoff = tl.full((), NO_KEY, tl.uint32)
    if top_k < width:
        cutoff = last_key(x_ptr, n, peak, temperature, farthest, top_k.to(tl.int64), False, BLOCK)
        end = tl.minimum(cutoff, NO_KEY - 1) + 1
        weight, _, _ = sums_before(
            x_ptr, n, peak, temperature, farthest, end, end, end, True, BLOCK
        )
    if top_p < 1:
        limit = tl.ceil(weight.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        cutoff = tl.minimum(
            cutoff, last_key(x_ptr, n, peak, temperature, farthest, limit, True, BLOCK)
        )
    return cutoff


@triton.jit
def cut_kernel(
    logits_ptr, peaks_ptr, temperature_ptr, top_k_ptr, top_p_ptr, near_ptr, candidates_ptr,
    count_ptr, weight_ptr,
    farthest_ptr, stride, width, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program lowers `farthest` of one row to its cutoff."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(near_ptr + row) < 0:
        return
    peak = tl.load(peaks_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    farthest = tl.load(farthest_ptr + row)
    weight = tl.load(weight_ptr + row)
    count = tl.load(count_ptr + row)
    x_ptr = candidates_ptr + row * ROOM
    if count > ROOM:
        x_ptr = logits_ptr + row * stride
        count = width
    cutoff_key = kept_key(
        x_ptr, count, peak, temperature, farthest, top_k, top_p, weight, width, BLOCK
    )
    cutoff = tl.minimum(cutoff_key, INFINITE_KEY).to(tl.float32, bitcast=True)
    tl.store(farthest_ptr + row, tl.minimum(farthest, cutoff))


def cut(
    logits_SV: Tensor,
    peaks_S: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    near_S: Tensor,
    farthest_S: Tensor,
) -> None:
    """Lower `farthest_S` to the cutoffs of top-k and top-p, in place.

    near_S: from `near_enough`; negative in rows without top-k and top-p, which do not change.
    farthest_S: the largest distance that other filters keep.

    Examples with distances [0, 1, 1, 3] and farthest inf: top_k 2, top_p 1 -> 1; top_k off, top_p
    0.5 -> 0 (the weights are 1, .37, .37, .05).
    """
    rows, width = logits_SV.shape
    candidates_SC = logits_SV.new_empty((rows, ROOM))
    count_S = torch.zeros(rows, dtype=torch.int32, device=logits_SV.device)
    weight_S = torch.zeros(rows, dtype=torch.int64, device=logits_SV.device)
    gather_kernel[(rows, triton.cdiv(width, GATHER_BLOCK))](
        logits_SV, peaks_S, temperature_S, farthest_S, near_S, candidates_SC, count_S, weight_S,
        logits_SV.stride(0), width, ROOM=ROOM, BLOCK=GATHER_BLOCK, num_warps=4,
    )  # fmt: skip
    cut_kernel[(rows,)](
        logits_SV, peaks_S, temperature_S, top_k_S, top_p_S, near_S, candidates_SC, count_S,
        weight_S,
        farthest_S, logits_SV.stride(0), width, ROOM=ROOM, BLOCK=SEARCH_BLOCK, num_warps=16,
    )  # fmt: skip
