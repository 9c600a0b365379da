"""Paged attention in plain torch, for prefill and decode, with batch-invariant results.

Shapes: T tokens, R rows (requests), H heads, G KV heads, h = H / G, d and v widths of a key and of
a value, L context padded to tiles. A work item has B query blocks of m queries with about the same
context length; q is the number of query rows per KV head.

The order of every sum depends on positions only, not on the batch:

- A context is divided into cuts of CONTEXT_CUT positions, counted from position 0, and cuts into
  tiles of TILE positions.
- `attention_partial` computes (max, sum, values) of a cut: the largest score, the sum of
  exp(score - max), and the values weighted by exp(score - max). Values are summed within tiles,
  then tiles are added in order. A position that a query does not see adds exact zeros, and a cut
  that it does not see is (-inf, 0, 0).
- `merge_partials` merges a cut into the cuts before it. The result is values / sum.

The native and Triton kernels have the same two steps under the same names, with their own cut
sizes. Cuts may be computed in any order, but must be merged in order of positions. The workspace is
limited to about `MAX_SCORES` scores and `MAX_CONTEXT_ELEMENTS` cache elements, whatever the context
lengths.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.ops.elementwise import TORCH_GRAIN, exp
from moeserve.ops.inputs import GroupInputs, HeadShape, StepInputs, entry_width, from_entries

TILE = 64  # positions
CONTEXT_CUT = 512  # positions; a multiple of TILE
QUERY_BLOCK = 64  # queries
MAX_SCORES = 1 << 20  # of a work item
MAX_CONTEXT_ELEMENTS = 1 << 21  # of the cache, in a work item
UNBOUNDED = 1 << 40  # tokens in the window or chunk if there is none
LOWEST = torch.finfo(torch.float32).min
# torch splits the sums of fp32 products with more inputs, at places that depend on the row count.
MAX_SUM_INPUTS = 128
# torch computes bfloat16 products with fewer multiplications with another kernel.
MIN_PRODUCT = 4096


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A work item: B query blocks of m queries, each over L positions from the start of a tile.

    Blocks with fewer than m queries repeat their last query.
    """

    size: tuple[int, int, int]  # B, m, L
    tokens: Tensor  # [B * m]: the token of each query
    # int64: the cache row, of blocks * block_size * G, of each position's first head; 0: not used
    rows_BL: Tensor
    hidden_from: int  # queries see all columns before this one
    hidden_Bml: Tensor  # whether a query does not see a column, from `hidden_from` on
    cuts: tuple[tuple[int, int], ...]  # the columns of each cut


@dataclass(frozen=True, slots=True)
class TorchAttentionMetadata:
    """The attention metadata of one step, shared by all layers of one KV group."""

    shape: HeadShape
    num_tokens: int
    heads_G1: Tensor  # 0 .. G-1
    items: tuple[WorkItem, ...]


def plan_attention(
    group: GroupInputs, step: StepInputs, shape: HeadShape
) -> TorchAttentionMetadata:
    """Group the queries of a step into work items; see `PlanAttention`."""
    offsets = step.offsets_R1.tolist()
    kv_width = shape.num_kv_heads * max(shape.dim, shape.v_dim)
    # (m, tiles, tiles between the start of the cut and of the block) -> the query blocks of that
    # shape: (row, first token, number of queries, first position)
    blocks_of: dict[tuple[int, int, int], list[tuple[int, int, int, int]]] = {}
    for row, start in enumerate(step.starts_R.tolist()):
        first, end = offsets[row : row + 2]
        for token in range(first, end, QUERY_BLOCK):
            count = min(QUERY_BLOCK, end - token)
            position = start + token - first
            first_tile = int(_first_seen(position, group)) // TILE
            tiles = _rounded_tiles(-(-(position + count) // TILE) - first_tile)
            m = 1 if count == 1 else -(-count // 8) * 8
            # The cuts of all blocks of an item must be in the same columns.
            key = (m, tiles, first_tile % (CONTEXT_CUT // TILE))
            blocks_of.setdefault(key, []).append((row, token, count, position))
    items = []
    for (m, tiles, offset), blocks in sorted(blocks_of.items()):
        length = tiles * TILE
        # The part of the limits that one block takes: scores of all heads, or keys or values
        share = max(
            shape.num_heads * m * length / MAX_SCORES, kv_width * length / MAX_CONTEXT_ELEMENTS
        )
        batch = max(1, int(1 / share))
        for start in range(0, len(blocks), batch):
            items.append(
                _build_item(
                    np.array(blocks[start : start + batch], np.int64).T,
                    m,
                    length,
                    cuts=cuts_of(offset * TILE, length),
                    group=group,
                    num_kv_heads=shape.num_kv_heads,
                )
            )
    heads_G1 = torch.arange(shape.num_kv_heads, device=group.blocks_RN.device)[:, None]
    return TorchAttentionMetadata(shape, offsets[-1], heads_G1, tuple(items))


def _first_seen(positions: NDArray[np.int64] | int, group: GroupInputs) -> NDArray[np.int64]:
    """Return the first position that the query at each of `positions` sees."""
    window = group.window or UNBOUNDED
    chunk = group.chunk or UNBOUNDED
    first: NDArray[np.int64] = np.maximum(
        np.asarray(positions) - window + 1, np.asarray(positions) // chunk * chunk
    )
    return first


def padded_context(length: int) -> int:
    """Return an upper bound of a context's length with padding, which is at most 25% and a tile."""
    return length + length // 4 + TILE


def _rounded_tiles(tiles: int) -> int:
    """Round up to one of few sizes with at most 25% padding: 1..8, 10, 12, 14, 16, 20, 24, ..."""
    step = 1 << max(0, tiles.bit_length() - 3)
    return -(-tiles // step) * step


def cuts_of(start: int, length: int) -> tuple[tuple[int, int], ...]:
    """Return the columns (begin, end) of each cut. start: position of column 0 in its cut.

    0, 1100 -> (0, 512), (512, 1024), (1024, 1100); 448, 200 -> (0, 64), (64, 200).
    """
    borders = [0, *range(CONTEXT_CUT - start, length, CONTEXT_CUT), length]
    return tuple(pairwise(borders))


def _build_item(
    members: NDArray[np.int64],
    m: int,
    length: int,
    cuts: tuple[tuple[int, int], ...],
    group: GroupInputs,
    num_kv_heads: int,
) -> WorkItem:
    """Build a work item.

    members: [4, B], the row, first token, number of queries and first position of B query blocks.
    """
    size = group.block_size
    device = group.blocks_RN.device
    rows_B, tokens_B, counts_B, starts_B = members
    steps_Bm = np.minimum(np.arange(m), counts_B[:, None] - 1)
    seen_Bm = starts_B[:, None] + steps_Bm  # the last position that each query may see
    first_Bm = _first_seen(seen_Bm, group)
    keys_BL = first_Bm[:, :1] // TILE * TILE + np.arange(length)
    # Without window or chunk, every query sees the columns before the earliest query's own tile.
    hidden_from = 0 if group.window or group.chunk else int(starts_B.min()) // TILE * TILE
    tail_B1l = keys_BL[:, None, hidden_from:]
    hidden_Bml = (tail_B1l > seen_Bm[:, :, None]) | (tail_B1l < first_Bm[:, :, None])
    used_BL = (keys_BL <= seen_Bm[:, -1:]) & (keys_BL >= first_Bm[:, :1])
    columns_BL = np.minimum(keys_BL // size, group.blocks_RN.shape[1] - 1)
    blocks_BN = group.blocks_RN.index_select(0, torch.from_numpy(rows_B).to(device))
    blocks_BL = blocks_BN.gather(1, torch.from_numpy(columns_BL).to(device))
    entries_BL = blocks_BL * size + torch.from_numpy(keys_BL % size).to(device)
    return WorkItem(
        size=(len(rows_B), m, length),
        tokens=torch.from_numpy((tokens_B[:, None] + steps_Bm).ravel()).to(device),
        rows_BL=entries_BL * torch.from_numpy(used_BL).to(device) * num_kv_heads,
        hidden_from=hidden_from,
        hidden_Bml=torch.from_numpy(hidden_Bml).to(device),
        cuts=cuts,
    )


def attention(
    q_THd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TorchAttentionMetadata,
    *,
    sinks_H: Tensor | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """Return attention over the paged cache, [T', H * v] in q's dtype.

    q_THd: queries, already scaled. Rows beyond the plan's tokens are padding, and get zeros.
    v_cache: may be a view of k_cache.
    sinks_H: fp32, attention sinks: a score per head without a value (gpt-oss).
    soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2); 0: unchanged.

    Products with a bfloat16 cache run in bfloat16 with fp32 sums, all others in fp32. Unused
    positions read the first entry of the null block. It is zeroed here, because their weight of 0
    times a stale NaN would be NaN.
    """
    num_rows, num_heads, d = q_THd.shape
    num_kv_heads = k_cache.shape[2]
    v_dim = plan.shape.v_dim
    assert (num_heads, num_kv_heads, d) == (
        plan.shape.num_heads,
        plan.shape.num_kv_heads,
        plan.shape.dim,
    ), plan.shape
    assert v_cache.shape[3] == entry_width(v_dim, v_cache.dtype), (v_cache.shape, v_dim)
    k_rows = k_cache.view(-1, k_cache.shape[3])
    v_rows = v_cache.view(-1, v_cache.shape[3])
    v_rows[:num_kv_heads] = 0
    sinks_Gh = None if sinks_H is None else sinks_H.view(num_kv_heads, -1)
    out = torch.empty((num_rows, num_heads, v_dim), dtype=q_THd.dtype, device=q_THd.device)
    out[plan.num_tokens :] = 0
    for item in plan.items:
        batch, m, length = item.size
        q_BmGhd = q_THd.index_select(0, item.tokens).view(batch, m, num_kv_heads, -1, d)
        # A block whose scores alone exceed four times the limit is split by KV heads.
        scores = batch * m * num_heads * min(length, CONTEXT_CUT)
        heads = max(1, min(num_kv_heads, 4 * MAX_SCORES * num_kv_heads // scores))
        parts = []
        for first in range(0, num_kv_heads, heads):
            part = slice(first, first + heads)
            rows_BGL = item.rows_BL[:, None] + plan.heads_G1[part]
            sinks = None if sinks_Gh is None else sinks_Gh[part]
            parts.append(
                _attend(q_BmGhd[:, :, part], k_rows, v_rows, rows_BGL, item, sinks, soft_cap)
            )
        o_MHv = (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).reshape(
            batch * m, num_heads, v_dim
        )
        # Repeated queries write the same result again.
        out.index_copy_(0, item.tokens, o_MHv.to(out.dtype))
    return out.view(num_rows, num_heads * v_dim)


def _attend(
    q_BmGhd: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    rows_BGL: Tensor,
    item: WorkItem,
    sinks_Gh: Tensor | None,
    soft_cap: float,
) -> Tensor:
    """Return the results of one item for some KV heads, fp32 [B, m, G, h, v].

    k_rows, v_rows: the caches as [entries, entry width].
    """
    batch, m, kv_heads, h, d = q_BmGhd.shape
    narrow = min(d, v_rows.shape[1])
    compute_dtype = torch.bfloat16 if k_rows.dtype == torch.bfloat16 else torch.float32
    num_queries = m * h
    q = q_BmGhd.permute(0, 2, 1, 3, 4).reshape(batch * kv_heads, num_queries, d).to(compute_dtype)
    # Queries are padded to a multiple of `row_step`, so that torch always chooses the same kernel.
    row_step = 8
    if compute_dtype == torch.bfloat16:  # at least MIN_PRODUCT multiplications
        row_step = 1 << (MIN_PRODUCT // (TILE * narrow)).bit_length()
    if extra := -num_queries % row_step:
        q = torch.nn.functional.pad(q, (0, 0, 0, extra))

    total: Partial | None = None
    for start, end in item.cuts:
        k = gather_entries(k_rows, rows_BGL, (start, end)).to(compute_dtype)
        v = gather_entries(v_rows, rows_BGL, (start, end)).to(compute_dtype)
        hidden_Bml = None
        if end > (first := max(start, item.hidden_from)):
            hidden_Bml = item.hidden_Bml[:, :, first - item.hidden_from : end - item.hidden_from]
        part = attention_partial(q, k, v, hidden_Bml, h, soft_cap)
        total = part if total is None else merge_partials(total, part)
    assert total is not None
    if sinks_Gh is not None:  # an additional last cut, with one score and no value
        sinks = sinks_Gh.repeat(batch, m)
        largest = torch.nn.functional.pad(sinks, (0, extra))
        total = merge_partials(
            total, Partial(largest, torch.ones_like(largest), torch.zeros_like(total.values))
        )
    out = (total.values / total.exp_sum[:, :, None])[:, :num_queries]
    return out.view(batch, kv_heads, m, h, -1).permute(0, 2, 1, 3, 4)


class Partial(NamedTuple):
    """(max, sum, values) of attention to some cuts, fp32; see the module's docstring."""

    largest: Tensor  # [B * G, q]
    exp_sum: Tensor  # [B * G, q]
    values: Tensor  # [B * G, q, v]


def attention_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden_Bml: Tensor | None,
    h: int,
    soft_cap: float = 0.0,
    bias: Tensor | None = None,
) -> Partial:
    """Return the attention of queries [B * G, q, d] to one cut, keys [B * G, n, d].

    hidden_Bml: whether each of m queries does not see each of the last l columns. The h query heads
    of a KV head are adjacent rows. Rows beyond m * h are padding.
    bias: fp32 [B * G, q, n], added to scores (ops/relative_attention.py).
    """
    scores = _scores(q, k)
    if soft_cap:
        for part in _split_for_threads(scores):
            part.div_(soft_cap).tanh_().mul_(soft_cap)
    if bias is not None:
        scores += bias
    if hidden_Bml is not None:
        batch, m, hidden = hidden_Bml.shape
        tail = scores.view(batch, -1, *scores.shape[1:])[:, :, : m * h, scores.shape[2] - hidden :]
        tail.view(batch, -1, m, h, hidden).masked_fill_(hidden_Bml[:, None, :, None], -torch.inf)
    largest = scores.amax(-1)
    scores -= largest.clamp(min=LOWEST)[:, :, None]
    for part in _split_for_threads(scores):
        part.exp_()
    total: Tensor | None = None
    for tile in _values_of_tiles(scores, v).unbind(1):
        total = tile.float() if total is None else total.add_(tile)
    assert total is not None
    return Partial(largest, scores.sum(-1), total)


def merge_partials(total: Partial, part: Partial) -> Partial:
    """Merge the next cut into the cuts before it."""
    largest = torch.maximum(total.largest, part.largest)
    base = largest.clamp(min=LOWEST)
    total_factor = exp(total.largest - base)
    part_factor = exp(part.largest - base)
    return Partial(
        largest,
        total.exp_sum * total_factor + part.exp_sum * part_factor,
        total.values * total_factor[:, :, None] + part.values * part_factor[:, :, None],
    )


def _split_for_threads(scores: Tensor) -> tuple[Tensor, ...]:
    """Split a contiguous tensor of whole SIMD vectors into parts for one thread each.

    torch computes the last elements of each thread's share with another function.
    """
    return torch.split(scores.view(-1), TORCH_GRAIN)


def gather_entries(rows: Tensor, index_BGL: Tensor, columns: tuple[int, int]) -> Tensor:
    """Copy the columns of each context, [B * G, length, d]; int8 entries become fp32."""
    index = index_BGL[:, :, slice(*columns)]
    return from_entries(
        rows.index_select(0, index.reshape(-1)).view(-1, index.shape[2], rows.shape[1])
    )


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Return q [B * G, rows, d] times keys [B * G, L, d], fp32 [B * G, rows, L].

    A bfloat16 product rounds its fp32 sums to 8 bits, too few for scores. A second product, which
    subtracts the first one before it rounds, returns the error of the first. This costs less than
    converting keys to fp32.
    """
    if q.dtype != torch.bfloat16:
        scores = torch.bmm(q[:, :, :MAX_SUM_INPUTS], k[:, :, :MAX_SUM_INPUTS].transpose(1, 2))
        for start in range(MAX_SUM_INPUTS, q.shape[2], MAX_SUM_INPUTS):
            scores += torch.bmm(
                q[:, :, start : start + MAX_SUM_INPUTS],
                k[:, :, start : start + MAX_SUM_INPUTS].transpose(1, 2),
            )
        return scores
    high = torch.bmm(q, k.transpose(1, 2))
    return high.float().add_(torch.baddbmm(high, q, k.transpose(1, 2), beta=-1))


def _values_of_tiles(probs: Tensor, v: Tensor) -> Tensor:
    """Return probs [B * G, rows, L] times values [B * G, L, v] per tile.

    The result is [B * G, tiles, rows, v] in v's dtype.
    """
    heads, rows, length = probs.shape
    count = length // TILE
    p = torch.empty((heads, count, rows, TILE), dtype=v.dtype, device=v.device)
    p.copy_(probs.view(heads, rows, count, TILE).transpose(1, 2))
    products = torch.bmm(p.view(-1, rows, TILE), v.reshape(heads * count, TILE, -1))
    return products.view(heads, count, rows, -1)
