"""Alignment of routing choices for a grouped GEMM, and the weighted sum of expert outputs.

`align` sorts (token, k) pairs by expert and splits them into tiles of rows (vLLM:
moe_align_block_size). `combine` adds the weighted outputs of a token's experts in routing order.

T tokens, K experts per token, N = T * K (token, k) pairs, e local experts, C chunks of pairs,
Z tiles, D width.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW = 4096  # the most pairs that `few_kernel` sorts in a single launch
CHUNK = 1024  # pairs per program if there are more than FEW
MOST_ROWS = 1 << 16  # rows of the cached tables; larger inputs get larger tables
COLUMNS = 32  # experts per program of `scan_kernel`


@dataclass(frozen=True, slots=True)
class Alignment:
    """Pairs sorted by expert, in tiles of rows.

    All tensors are int32 on the device, so the host never waits for them.

    order_N: the pair t * K + k of each sorted row (a stable sort). Undefined after the last end.
        None if the rows were sorted before.
    counts_e: the number of rows of each expert.
    ends_e: the end of each expert's rows.
    expert_Z: the expert of each tile of block_m rows, in the order of rows. -1 marks unused tiles.
    row_Z: the first row of each tile.
    room: the argument of `align_groups`.
    """

    block_m: int
    order_N: Tensor | None
    counts_e: Tensor
    ends_e: Tensor
    expert_Z: Tensor
    row_Z: Tensor
    room: int = 0


@triton.jit
def _describe(
    expert, counts, counts_ptr, ends_ptr, expert_ptr, row_ptr, num_experts, num_tiles, block_m,
    EXPERTS: tl.constexpr,
    ROOM: tl.constexpr = 0,
):  # fmt: skip
    """Write the table entries of one expert. The program after the last expert marks unused tiles.

    An expert's rows follow the rows of the experts before it. With ROOM, each expert has ROOM rows.
    """
    experts = tl.arange(0, EXPERTS)
    tiles = tl.cdiv(counts, block_m)
    first = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    start = expert * ROOM if ROOM else tl.sum(tl.where(experts < expert, counts, 0), 0)
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    end = tl.where(expert < num_experts, first + tl.cdiv(count, block_m), num_tiles)
    mark = tl.where(expert < num_experts, expert, -1)
    for tile in range(first, end, EXPERTS):
        tl.store(
            expert_ptr + tile + experts, mark + tl.zeros_like(experts), mask=tile + experts < end
        )
        tl.store(
            row_ptr + tile + experts,
            start + (tile - first + experts) * block_m,
            mask=tile + experts < end,
        )
    if expert < num_experts:
        tl.store(counts_ptr + expert, count)
        tl.store(ends_ptr + expert, start + count)
    return start


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def few_kernel(
    ids_ptr, order_ptr, counts_ptr, ends_ptr, expert_ptr, row_ptr, num_pairs, num_experts,
    num_tiles, block_m,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """One program per expert reads all ids and stores its pairs; one more marks unused tiles."""
    expert = tl.program_id(0)
    pairs = tl.arange(0, PAIRS)
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    ids = tl.where(ids < num_experts, ids, -1)
    counts = tl.histogram(ids, EXPERTS, mask=ids >= 0)
    start = _describe(
        expert,
        counts,
        counts_ptr,
        ends_ptr,
        expert_ptr,
        row_ptr,
        num_experts,
        num_tiles,
        block_m,
        EXPERTS=EXPERTS,
    )
    is_own = ids == expert
    tl.store(order_ptr + start + tl.cumsum(is_own.to(tl.int32), 0) - 1, pairs, mask=is_own)


@triton.jit
def _chunk(ids_ptr, chunk, num_pairs, num_experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the ids of a chunk (EXPERTS for pairs without an expert) and the count of each id."""
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    valid = (ids >= 0) & (ids < num_experts)
    return tl.where(valid, ids, EXPERTS), tl.histogram(ids, EXPERTS, mask=valid)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    ids_ptr, counts_ptr, num_pairs, num_experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr
):
    """One program counts the pairs of one chunk for each expert."""
    chunk = tl.program_id(0)
    _, counts = _chunk(ids_ptr, chunk, num_pairs, num_experts, CHUNK, EXPERTS)
    tl.store(counts_ptr + chunk * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["num_chunks"])
def scan_kernel(counts_ptr, totals_ptr, num_chunks, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr):
    """One program computes the exclusive prefix sum over chunks for COLUMNS experts."""
    experts = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, num_chunks, 64):
        chunks = start + tl.arange(0, 64)
        places = counts_ptr + chunks[:, None] * EXPERTS + experts[None, :]
        counts = tl.load(places, mask=chunks[:, None] < num_chunks, other=0)
        tl.store(
            places,
            total[None, :] + tl.cumsum(counts, 0) - counts,
            mask=chunks[:, None] < num_chunks,
        )
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + experts, total)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "num_chunks"])
def place_kernel(
    ids_ptr, before_ptr, totals_ptr, order_ptr, counts_ptr, ends_ptr, expert_ptr, row_ptr,
    num_pairs, num_chunks,
    num_experts, num_tiles, block_m, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The first programs sort one chunk of pairs each; the others describe one expert each."""
    program = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    totals = tl.load(totals_ptr + experts)
    if program < num_chunks:
        ids, counts = _chunk(ids_ptr, program, num_pairs, num_experts, CHUNK, EXPERTS)
        places = tl.arange(0, CHUNK)
        keys = tl.sort(ids * CHUNK + places)
        ids = keys // CHUNK
        before = tl.load(before_ptr + program * EXPERTS + experts)
        shift = (tl.cumsum(totals, 0) - totals) + before - (tl.cumsum(counts, 0) - counts)
        valid = ids < EXPERTS
        rows = places + tl.gather(shift, tl.where(valid, ids, 0), 0)
        tl.store(order_ptr + rows, program * CHUNK + keys % CHUNK, mask=valid)
    else:
        expert = program - num_chunks
        _describe(
            expert,
            totals,
            counts_ptr,
            ends_ptr,
            expert_ptr,
            row_ptr,
            num_experts,
            num_tiles,
            block_m,
            EXPERTS,
        )


@triton.jit(do_not_specialize=["num_tiles"])
def groups_kernel(
    given_ptr, counts_ptr, ends_ptr, expert_ptr, row_ptr, num_experts, num_tiles, block_m,
    EXPERTS: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """One program per expert, for sorted rows. The last program marks unused tiles.

    The input has the ends of the experts' rows, or their counts if each expert has ROOM rows.
    """
    experts = tl.arange(0, EXPERTS)
    expert = tl.program_id(0)
    counts = tl.load(given_ptr + experts, mask=experts < num_experts, other=0)
    if not ROOM:
        counts -= tl.load(
            given_ptr + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0
        )
    _describe(
        expert,
        counts,
        counts_ptr,
        ends_ptr,
        expert_ptr,
        row_ptr,
        num_experts,
        num_tiles,
        block_m,
        EXPERTS,
        ROOM,
    )


def tile_bound(num_rows: int, num_experts: int, block_m: int) -> int:
    """Return the largest possible number of tiles.

    5 rows, 3 experts, tiles of 4 -> 3, for example with counts [3, 1, 1]
    """
    return min(num_rows, (num_rows + min(num_rows, num_experts) * (block_m - 1)) // block_m)


def _empty(
    order_N: Tensor | None,
    like: Tensor,
    num_rows: int,
    num_experts: int,
    block_m: int,
    room: int = 0,
) -> Alignment:
    num_tiles = tile_bound(num_rows, num_experts, block_m)
    # Allocate each table separately. Views of one buffer would differ in alignment, and Triton
    # compiles a kernel again for each alignment.
    sizes = (num_experts, num_experts, num_tiles, num_tiles)
    counts_e, ends_e, expert_Z, row_Z = (like.new_empty(size) for size in sizes)
    return Alignment(block_m, order_N, counts_e, ends_e, expert_Z, row_Z, room)


def align(ids_TK: Tensor, num_experts: int, block_m: int) -> Alignment:
    """Sort pairs by expert and cut each expert's rows into tiles.

    Ids outside 0..num_experts-1 belong to no expert. Up to 4,096 pairs take one launch, more take
    three.

    ids [[1], [0], [-1], [1]], 2 experts, tiles of 1 -> order [1, 0, 3], counts [1, 2], ends [1, 3],
    tiles: experts [0, 1, 1, -1], first rows [0, 1, 2]
    """
    assert ids_TK.dtype == torch.int32, ids_TK.dtype
    assert ids_TK.is_contiguous(), ids_TK.stride()
    pairs = ids_TK.numel()
    experts = max(32, triton.next_power_of_2(num_experts))
    alignment = _empty(torch.empty_like(ids_TK).flatten(), ids_TK, pairs, num_experts, block_m)
    tables = (
        alignment.order_N,
        alignment.counts_e,
        alignment.ends_e,
        alignment.expert_Z,
        alignment.row_Z,
    )
    num_tiles = len(alignment.expert_Z)
    if pairs <= FEW:
        room = max(64, triton.next_power_of_2(pairs))
        few_kernel[(num_experts + 1,)](
            ids_TK,
            *tables,
            pairs,
            num_experts,
            num_tiles,
            block_m,
            PAIRS=room,
            EXPERTS=experts,
            num_warps=4,
        )
        return alignment
    chunks = triton.cdiv(pairs, CHUNK)
    before_Ce = ids_TK.new_empty((chunks, experts))
    totals_e = ids_TK.new_empty(experts)
    count_kernel[(chunks,)](
        ids_TK, before_Ce, pairs, num_experts, CHUNK=CHUNK, EXPERTS=experts, num_warps=4
    )
    scan_kernel[(experts // COLUMNS,)](
        before_Ce, totals_e, chunks, COLUMNS=COLUMNS, EXPERTS=experts, num_warps=4
    )
    place_kernel[(chunks + num_experts + 1,)](
        ids_TK, before_Ce, totals_e, *tables, pairs, chunks, num_experts, num_tiles, block_m,
        CHUNK=CHUNK, EXPERTS=experts, num_warps=4,
    )  # fmt: skip
    return alignment


def align_groups(ends_e: Tensor, num_rows: int, block_m: int, room: int = 0) -> Alignment:
    """Align rows that are already sorted by expert.

    ends_e: int32 on the device, the end of each expert's rows; with `room`, their counts.
    num_rows: an upper bound of the number of rows.
    room: the number of rows allocated for each expert; 0 if the experts' rows are contiguous.

    ends [1, 3], 4 rows, tiles of 2 -> counts [1, 2], tiles: experts [0, 1, -1], first rows [0, 1]
    ends [1, 3], 4 rows, tiles of 2, room 8 -> ends [1, 11], tiles: experts [0, 1, 1], first rows
    [0, 8, 10]
    """
    assert ends_e.dtype == torch.int32, ends_e.dtype
    num_experts = len(ends_e)
    alignment = _empty(None, ends_e, num_rows, num_experts, block_m, room)
    groups_kernel[(num_experts + 1,)](
        ends_e, alignment.counts_e, alignment.ends_e, alignment.expert_Z, alignment.row_Z,
        num_experts, len(alignment.expert_Z), block_m,
        EXPERTS=max(32, triton.next_power_of_2(num_experts)), ROOM=room, num_warps=1,
    )  # fmt: skip
    return alignment


def align_rows(num_rows: int, block_m: int, device: torch.device) -> Alignment:
    """Align all rows as one expert, for a dense product.

    The tables are views of cached ones, so nothing is launched.

    3 rows, tiles of 2 -> ends [3], tiles: experts [0, 0], first rows [0, 2]
    """
    most = max(MOST_ROWS, triton.next_power_of_2(num_rows))
    end_1 = _table(most + 1, step=1, columns=4, device=device)[num_rows, :1]
    num_tiles = triton.cdiv(num_rows, block_m)
    max_tiles = triton.cdiv(most, block_m)
    return Alignment(
        block_m=block_m,
        order_N=None,
        counts_e=end_1,
        ends_e=end_1,
        expert_Z=_table(max_tiles, step=0, columns=1, device=device)[:num_tiles, 0],
        row_Z=_table(max_tiles, step=block_m, columns=1, device=device)[:num_tiles, 0],
    )


@cache
def _table(rows: int, step: int, columns: int, device: torch.device) -> Tensor:
    """Return a table whose row i is i * step in each of `columns` columns.

    Four columns align every row to 16 bytes. Triton would compile again for another alignment.
    """
    numbers = torch.arange(rows, dtype=torch.int32, device=device) * step
    return numbers[:, None].expand(-1, columns).contiguous()


@triton.jit
def combine_kernel(
    y_ptr, weights_ptr, ids_ptr, out_ptr, out_stride, width, K: tl.constexpr, BLOCK: tl.constexpr
):
    """One program computes BLOCK outputs of a token. Products and partial sums are rounded to fp32.

    Four outputs per thread leave enough registers to load all K rows before the first addition.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        is_there = tl.load(ids_ptr + pair) >= 0
        readable = columns < tl.where(is_there, width, 0)
        y = tl.load(y_ptr + pair * width + columns, mask=readable, other=0.0).to(tl.float32)
        term = y * tl.where(is_there, tl.load(weights_ptr + pair), 0.0)
        total = term if k == 0 else total + term  # not 0 + term: that would turn -0 into 0
    tl.store(
        out_ptr + token * out_stride + columns,
        total.to(out_ptr.dtype.element_ty),
        mask=columns < width,
    )


def combine(
    y_TKD: Tensor, weights_TK: Tensor, ids_TK: Tensor, out_TD: Tensor | None = None
) -> Tensor:
    """Return the sum over k = 0..K-1, in this order, of weights[t, k] * y[t, k] in fp32.

    The result is rounded once at the end. Pairs with id -1 contribute zero: their y and weight are
    not used, whatever they are. Multiplication and addition round separately, never fused, as in
    the native CPU sum, so the bits are equal.

    y [[[1, 2], [3, 4]]], weights [[0.5, 2]], ids [[7, 0]] -> [[6.5, 9]]
    y [[[1, 2], [3, 4]]], weights [[0.5, 2]], ids [[7, -1]] -> [[0.5, 1]]
    """
    tokens, top_k, width = y_TKD.shape
    assert y_TKD.is_contiguous(), y_TKD.stride()
    assert weights_TK.shape == ids_TK.shape == (tokens, top_k), (weights_TK.shape, ids_TK.shape)
    assert weights_TK.is_contiguous(), weights_TK.stride()
    assert ids_TK.is_contiguous(), ids_TK.stride()
    assert weights_TK.dtype == torch.float32, weights_TK.dtype
    out = y_TKD.new_empty((tokens, width)) if out_TD is None else out_TD
    assert out.stride(1) == 1, out.stride()
    # With few tokens, smaller blocks give more programs to fill the device.
    block = 512 if tokens >= 64 else 256
    if tokens:
        combine_kernel[(tokens, triton.cdiv(width, block))](
            y_TKD, weights_TK, ids_TK, out, out.stride(0), width,
            K=top_k, BLOCK=block, num_warps=block // 128, enable_fp_fusion=False,
        )  # fmt: skip
    return out
