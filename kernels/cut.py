"""Top-k and top-p by search, without sorting: how far from its likeliest token a row may draw.

A token's distance is (the row's largest logit - its own) / temperature; exp(-distance) is its
weight. Distances are not negative, so they order as their bits do, and both filters keep what is no
farther than some key: top-k the last key that fewer than k tokens lie before, top-p the last one
before which lies less than top_p of the weight. Such a key is found two bits at a time. Weights are
summed as integers, so the order of a sum does not matter. Equal logits stay or go together.

S rows, V vocabulary, C candidates: tokens that are near enough to matter, gathered first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROOM = 16_384  # candidates of a row; the search reads rows with more of them whole
GATHERED = 2048  # tokens of a program that gathers
SEARCHED = 4096  # of a step of the search
ONE = tl.constexpr(2.0**40)  # the likeliest token's weight, as an integer
NO_KEY = tl.constexpr(2**32 - 1)
INFINITE_KEY = tl.constexpr(0x7F800000)


@triton.jit
def distance(x, peak, temperature):
    """Return how far logits lie below the row's peak, in units of the temperature."""
    return tl.abs(tl.div_rn(peak - x, temperature))


@triton.jit
def key_of(x, peak, temperature, farthest):
    """Return (the distance's bits, or NO_KEY beyond the farthest; the weight) of each logit."""
    d = distance(x, peak, temperature)
    weight = (tl.exp(-d) * ONE).to(tl.int64)
    return tl.where(d <= farthest, d.to(tl.uint32, bitcast=True), NO_KEY), weight


@triton.jit
def kth_distance(d, k):
    """Return the k-th smallest of distances in registers."""
    keys = d.to(tl.int32, bitcast=True)
    found = tl.full((), 0, tl.int32)
    for i in range(31):
        trial = found | (1 << (30 - i))
        found = tl.where(tl.sum((keys < trial).to(tl.int32), axis=0) < k, trial, found)
    return found.to(tl.float32, bitcast=True)


@triton.jit
def near_enough(tile_peaks, peak, temperature, farthest, top_k, top_p, num_tiles, width):
    """Return a distance within which everything lies that top-k or top-p can keep.

    Each of the k best tiles has a token within the k-th best tile's distance. And if top-k is off,
    the tokens lighter than (1 - top_p) / 2V of the whole are together too light to be needed; the
    tiles' best are part of the whole.
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
    """One program: BLOCK tokens of a row. Appends those that are near enough, in any order, and
    adds up all weight.
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
    one = is_near.to(tl.int32)
    first = tl.atomic_add(count_ptr + row, tl.sum(one, axis=0), sem="relaxed")
    place = first + tl.cumsum(one, axis=0) - one
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
    """Return how many of n tokens, or how much of their weight, lie before each of three keys."""
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
    """Return the last key before which less than `limit` lies."""
    found = tl.full((), 0, tl.uint32)
    step = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        one = found + step
        two = found + 2 * step
        three = found + 3 * step
        sum1, sum2, sum3 = sums_before(
            x_ptr, n, peak, temperature, farthest, one, two, three, BY_WEIGHT, BLOCK
        )
        found = tl.where(
            sum3 < limit, three, tl.where(sum2 < limit, two, tl.where(sum1 < limit, one, found))
        )
        step = step >> 2
    return found


@triton.jit
def kept_key(
    x_ptr, n, peak, temperature, farthest, top_k, top_p, weight, width, BLOCK: tl.constexpr
):
    """Return the last key that top-k keeps, and then top-p of the weight that is left."""
    found = tl.full((), NO_KEY, tl.uint32)
    if top_k < width:
        found = last_key(x_ptr, n, peak, temperature, farthest, top_k.to(tl.int64), False, BLOCK)
        end = tl.minimum(found, NO_KEY - 1) + 1
        weight, _, _ = sums_before(
            x_ptr, n, peak, temperature, farthest, end, end, end, True, BLOCK
        )
    if top_p < 1:
        limit = tl.ceil(weight.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        found = tl.minimum(
            found, last_key(x_ptr, n, peak, temperature, farthest, limit, True, BLOCK)
        )
    return found


@triton.jit
def cut_kernel(
    logits_ptr, peaks_ptr, temperature_ptr, top_k_ptr, top_p_ptr, near_ptr, candidates_ptr,
    count_ptr, weight_ptr,
    farthest_ptr, stride, width, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one row. Brings its farthest distance nearer."""
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
    found = kept_key(x_ptr, count, peak, temperature, farthest, top_k, top_p, weight, width, BLOCK)
    kept = tl.minimum(found, INFINITE_KEY).to(tl.float32, bitcast=True)
    tl.store(farthest_ptr + row, tl.minimum(farthest, kept))


def cut(
    logits_SV: Tensor,
    peaks_S: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    near_S: Tensor,
    farthest_S: Tensor,
) -> None:
    """Lower farthest_S to the distance of the last token that top-k and top-p leave of those
    within it.

    near_S: from `near_enough`; negative in rows that have neither, which stay as they are.
    distances [0, 1, 1, 3], top_k 2, top_p 1, farthest inf -> 1; top_k off, top_p 0.5 -> 0 (of
    weights 1, .37, .37, .05)
    """
    rows, width = logits_SV.shape
    candidates_SC = logits_SV.new_empty((rows, ROOM))
    count_S = torch.zeros(rows, dtype=torch.int32, device=logits_SV.device)
    weight_S = torch.zeros(rows, dtype=torch.int64, device=logits_SV.device)
    gather_kernel[(rows, triton.cdiv(width, GATHERED))](
        logits_SV, peaks_S, temperature_S, farthest_S, near_S, candidates_SC, count_S, weight_S,
        logits_SV.stride(0), width, ROOM=ROOM, BLOCK=GATHERED, num_warps=4,
    )  # fmt: skip
    cut_kernel[(rows,)](
        logits_SV, peaks_S, temperature_S, top_k_S, top_p_S, near_S, candidates_SC, count_S,
        weight_S,
        farthest_S, logits_SV.stride(0), width, ROOM=ROOM, BLOCK=SEARCHED, num_warps=16,
    )  # fmt: skip
