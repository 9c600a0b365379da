"""Paged attention in plain torch: one function for prefill and decode whose bits depend on query
and context alone.

T tokens, R rows (requests), H heads, G KV heads, h = H / G, d and v widths of a key and of a value,
L context padded to tiles. An item works on B query blocks of m queries at once, all with about the
same context. q query rows of a KV head: B * G of them side by side.

The order of every sum is fixed by position, not by what is computed together:

- A context consists of absolute cuts of CUT positions, counted from position 0, and a cut of
  absolute tiles of TILE.
- `attention_partial` returns (max, sum, values) of a cut: the largest score, the sum of
  exp(score - max), and the values weighted by the same. Values are summed inside tiles, and tiles
  are added in order. A position that a query does not see adds exact zeros, and so does a cut of
  which it sees nothing: (-inf, 0, 0).
- `merge_partials` adds the next cut to those before. The result is values / sum.

The native and the Triton kernels have the same two steps under the same names, with cuts of their
own size. Cuts may be computed anywhere, as long as they are merged in order. The work space is
bounded to about `SCORES` scores and `CONTEXT` cache elements, whatever the context lengths.
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

TILE = 64
CUT = 512  # a multiple of TILE
QUERY_BLOCK = 64
SCORES = 1 << 20
CONTEXT = 1 << 21
UNBOUNDED = 1 << 40  # tokens in the window or chunk where there is none
LOWEST = torch.finfo(torch.float32).min
DEPTH = 128  # torch cuts the sums of deeper fp32 products, elsewhere for few rows than for many
SMALL_PRODUCT = (
    4096  # torch computes bfloat16 products of fewer multiplications with another kernel
)


@dataclass(frozen=True, slots=True)
class Item:
    """B query blocks of m queries (short ones repeat their last query) over L positions each, from
    a tile's start on.

    Scores from column `hidden_from` on are hidden where hidden_Bml says so.
    """

    size: tuple[int, int, int]  # B, m, L
    tokens: Tensor  # [B * m]: of the queries, into T
    # int64: the cache row [blocks * block_size * G] of each position's first head; 0 for unused
    # ones
    rows_BL: Tensor
    hidden_from: int
    hidden_Bml: Tensor
    cuts: tuple[tuple[int, int], ...]  # the columns of each cut


@dataclass(frozen=True, slots=True)
class TorchAttentionMetadata:
    """The attention metadata of one step, shared by all layers of one KV group."""

    shape: HeadShape
    num_tokens: int
    heads_G1: Tensor  # 0 .. G-1
    items: tuple[Item, ...]


def plan_attention(
    group: GroupInputs, step: StepInputs, shape: HeadShape
) -> TorchAttentionMetadata:
    """Pack the step's queries into items; see `PlanAttention`."""
    offsets = step.offsets_R1.tolist()
    kv_width = shape.num_kv_heads * max(shape.dim, shape.v_dim)
    members: dict[tuple[int, int, int], list[tuple[int, int, int, int]]] = {}
    for row, start in enumerate(step.starts_R.tolist()):
        first, end = offsets[row : row + 2]
        for token in range(first, end, QUERY_BLOCK):
            count = min(QUERY_BLOCK, end - token)
            position = start + token - first
            first_tile = int(_first_seen(position, group)) // TILE
            tiles = _bucket(-(-(position + count) // TILE) - first_tile)
            m = 1 if count == 1 else -(-count // 8) * 8
            # Blocks of an item have their cuts in the same columns.
            key = (m, tiles, first_tile % (CUT // TILE))
            members.setdefault(key, []).append((row, token, count, position))
    items = []
    for (m, tiles, offset), blocks in sorted(members.items()):
        length = tiles * TILE
        share = max(shape.num_heads * m * length / SCORES, kv_width * length / CONTEXT)
        batch = max(1, int(1 / share))
        for at in range(0, len(blocks), batch):
            items.append(
                _item(
                    np.array(blocks[at : at + batch], np.int64).T,
                    m,
                    length,
                    cuts_of(offset * TILE, length),
                    group,
                    shape.num_kv_heads,
                )
            )
    heads_G1 = torch.arange(shape.num_kv_heads, device=group.blocks_RN.device)[:, None]
    return TorchAttentionMetadata(shape, offsets[-1], heads_G1, tuple(items))


def _first_seen(positions: NDArray[np.int64] | int, group: GroupInputs) -> NDArray[np.int64]:
    """The first positions that queries at `positions` see."""
    window = group.window or UNBOUNDED
    chunk = group.chunk or UNBOUNDED
    first: NDArray[np.int64] = np.maximum(
        np.asarray(positions) - window + 1, np.asarray(positions) // chunk * chunk
    )
    return first


def padded_context(length: int) -> int:
    """Return an upper bound of a context's positions with those that pad it: at most a quarter and
    a tile.
    """
    return length + length // 4 + TILE


def _bucket(tiles: int) -> int:
    """Round up so that at most a quarter is padding and few sizes exist: 1..8, 10, 12, 14, 16, 20,
    24, ...
    """
    step = 1 << max(0, tiles.bit_length() - 3)
    return -(-tiles // step) * step


def cuts_of(start: int, length: int) -> tuple[tuple[int, int], ...]:
    """Return the cuts of `length` columns, the first of which is `start` positions into its cut.

    0, 1100 -> (0, 512), (512, 1024), (1024, 1100); 448, 200 -> (0, 64), (64, 200)
    """
    borders = [0, *range(CUT - start, length, CUT), length]
    return tuple(pairwise(borders))


def _item(
    members: NDArray[np.int64],
    m: int,
    length: int,
    cuts: tuple[tuple[int, int], ...],
    group: GroupInputs,
    num_kv_heads: int,
) -> Item:
    """members: row, first token, tokens and first position of B query blocks."""
    size = group.block_size
    device = group.blocks_RN.device
    rows_B, tokens_B, counts_B, starts_B = members
    steps_Bm = np.minimum(np.arange(m), counts_B[:, None] - 1)
    seen_Bm = starts_B[:, None] + steps_Bm  # the last position that each query may see
    first_Bm = _first_seen(seen_Bm, group)
    keys_BL = first_Bm[:, :1] // TILE * TILE + np.arange(length)
    # Every query sees the columns before the earliest query's own tile, unless a window or chunk
    # hides them.
    hidden_from = 0 if group.window or group.chunk else int(starts_B.min()) // TILE * TILE
    tail_B1l = keys_BL[:, None, hidden_from:]
    hidden_Bml = (tail_B1l > seen_Bm[:, :, None]) | (tail_B1l < first_Bm[:, :, None])
    used_BL = (keys_BL <= seen_Bm[:, -1:]) & (keys_BL >= first_Bm[:, :1])
    columns_BL = np.minimum(keys_BL // size, group.blocks_RN.shape[1] - 1)
    blocks_BN = group.blocks_RN.index_select(0, torch.from_numpy(rows_B).to(device))
    blocks_BL = blocks_BN.gather(1, torch.from_numpy(columns_BL).to(device))
    entries_BL = blocks_BL * size + torch.from_numpy(keys_BL % size).to(device)
    return Item(
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
    """Attend to the paged cache; returns [T', H * v] of q's dtype, zero in rows beyond the
    metadata's tokens.

    Queries come already scaled. sinks_H: fp32, one score per head that takes weight and gives no
    value (gpt-oss). soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2); 0 leaves
    them. v_cache may be a view of k_cache. Products over bfloat16 run in bfloat16 with fp32 sums,
    all others in fp32. Positions that no query sees read the first entry of the null block, which
    is zeroed here: zero times a stale NaN is NaN.
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
        # A block whose scores exceed the bound alone is cut by heads.
        scores = batch * m * num_heads * min(length, CUT)
        heads = max(1, min(num_kv_heads, 4 * SCORES * num_kv_heads // scores))
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
        out.index_copy_(
            0, item.tokens, o_MHv.to(out.dtype)
        )  # a repeated query has the same result again
    return out.view(num_rows, num_heads * v_dim)


def _attend(
    q_BmGhd: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    rows_BGL: Tensor,
    item: Item,
    sinks_Gh: Tensor | None,
    soft_cap: float,
) -> Tensor:
    """[B, m, G, h, v] in fp32 for one item and the KV heads given; k_rows and v_rows [entries,
    entry width].
    """
    batch, m, kv_heads, h, d = q_BmGhd.shape
    narrow = min(d, v_rows.shape[1])
    compute = torch.bfloat16 if k_rows.dtype == torch.bfloat16 else torch.float32
    num_queries = m * h
    q = q_BmGhd.permute(0, 2, 1, 3, 4).reshape(batch * kv_heads, num_queries, d).to(compute)
    # Rows are padded to a multiple of this, so that torch always takes one kernel.
    step = 8 if compute != torch.bfloat16 else 1 << (SMALL_PRODUCT // (TILE * narrow)).bit_length()
    if extra := -num_queries % step:
        q = torch.nn.functional.pad(q, (0, 0, 0, extra))

    total: Partial | None = None
    for start, end in item.cuts:
        k = _gather(k_rows, rows_BGL, (start, end)).to(compute)
        v = _gather(v_rows, rows_BGL, (start, end)).to(compute)
        hidden_Bml = None
        if end > (first := max(start, item.hidden_from)):
            hidden_Bml = item.hidden_Bml[:, :, first - item.hidden_from : end - item.hidden_from]
        part = attention_partial(q, k, v, hidden_Bml, h, soft_cap)
        total = part if total is None else merge_partials(total, part)
    assert total is not None
    if sinks_Gh is not None:  # a cut of their own behind all others: one score without a value
        sinks = sinks_Gh.repeat(batch, m)
        largest = torch.nn.functional.pad(sinks, (0, extra))
        total = merge_partials(
            total, Partial(largest, torch.ones_like(largest), torch.zeros_like(total.values))
        )
    out = (total.values / total.weight[:, :, None])[:, :num_queries]
    return out.view(batch, kv_heads, m, h, -1).permute(0, 2, 1, 3, 4)


class Partial(NamedTuple):
    """(max, sum, values) of attention to some cuts, fp32; see the module."""

    largest: Tensor  # [B * G, q]
    weight: Tensor  # [B * G, q]
    values: Tensor  # [B * G, q, v]


def attention_partial(
    q: Tensor, k: Tensor, v: Tensor, hidden_Bml: Tensor | None, h: int, soft_cap: float = 0.0
) -> Partial:
    """Return the attention of queries [B * G, q, d] to one cut, keys [B * G, n, d].

    hidden_Bml: which of the last l columns each of m queries does not see; h query heads of a KV
    head follow each other. Query rows beyond m * h are padding.
    """
    scores = _scores(q, k)
    if soft_cap:
        for part in _pieces(scores):
            part.div_(soft_cap).tanh_().mul_(soft_cap)
    if hidden_Bml is not None:
        batch, m, hidden = hidden_Bml.shape
        tail = scores.view(batch, -1, *scores.shape[1:])[:, :, : m * h, scores.shape[2] - hidden :]
        tail.view(batch, -1, m, h, hidden).masked_fill_(hidden_Bml[:, None, :, None], -torch.inf)
    largest = scores.amax(-1)
    scores -= largest.clamp(min=LOWEST)[:, :, None]
    for part in _pieces(scores):
        part.exp_()
    total: Tensor | None = None
    for tile in _tiles(scores, v).unbind(1):
        total = tile.float() if total is None else total.add_(tile)
    assert total is not None
    return Partial(largest, scores.sum(-1), total)


def merge_partials(total: Partial, part: Partial) -> Partial:
    """Return the attention to the cuts before and the next one."""
    largest = torch.maximum(total.largest, part.largest)
    base = largest.clamp(min=LOWEST)
    old = exp(total.largest - base)
    new = exp(part.largest - base)
    return Partial(
        largest,
        total.weight * old + part.weight * new,
        total.values * old[:, :, None] + part.values * new[:, :, None],
    )


def _pieces(scores: Tensor) -> tuple[Tensor, ...]:
    """Return parts of a contiguous tensor of whole vectors, each too small for several threads.

    torch computes the last elements of a thread's part by another function.
    """
    return torch.split(scores.view(-1), TORCH_GRAIN)


def _gather(rows: Tensor, index_BGL: Tensor, span: tuple[int, int]) -> Tensor:
    """The positions `span` of every context and head: a copy [B * G, length, d], of int8 heads in
    fp32.
    """
    index = index_BGL[:, :, slice(*span)]
    return from_entries(
        rows.index_select(0, index.reshape(-1)).view(-1, index.shape[2], rows.shape[1])
    )


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q [B * G, rows, d] times keys [B * G, L, d]: fp32 [B * G, rows, L].

    A bfloat16 product rounds its fp32 sums to 8 bits, too few for scores. A second product that
    subtracts the first before rounding returns what was lost, at less cost than converting the keys
    to fp32.
    """
    if q.dtype != torch.bfloat16:
        scores = torch.bmm(q[:, :, :DEPTH], k[:, :, :DEPTH].transpose(1, 2))
        for at in range(DEPTH, q.shape[2], DEPTH):
            scores += torch.bmm(q[:, :, at : at + DEPTH], k[:, :, at : at + DEPTH].transpose(1, 2))
        return scores
    high = torch.bmm(q, k.transpose(1, 2))
    return high.float().add_(torch.baddbmm(high, q, k.transpose(1, 2), beta=-1))


def _tiles(probs: Tensor, v: Tensor) -> Tensor:
    """probs [B * G, rows, L] times values [B * G, L, v], tile by tile: [B * G, tiles, rows, v] of
    v's dtype.
    """
    heads, rows, length = probs.shape
    count = length // TILE
    p = torch.empty((heads, count, rows, TILE), dtype=v.dtype, device=v.device)
    p.copy_(probs.view(heads, rows, count, TILE).transpose(1, 2))
    products = torch.bmm(p.view(-1, rows, TILE), v.reshape(heads * count, TILE, -1))
    return products.view(heads, count, rows, -1)
