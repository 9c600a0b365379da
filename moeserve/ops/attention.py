"""Paged attention in plain torch: one function for prefill and decode whose bits depend on query and context alone.

T tokens, R rows (requests), H heads, G KV heads, h = H / G, d head width, L context padded to tiles.
An item works on B query blocks of m queries at once, all with about the same context.

The order of every sum is fixed by position: scores are dot products over d; softmax runs over one row in fp32, where
masked positions add exact zeros; values are summed inside absolute tiles of 64 tokens, counted from position 0, and
tiles are added in order. How queries are packed into items is free, and chosen so that the work space stays bounded:
about `SCORES` scores and `CONTEXT` cache elements at a time, whatever the context lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE = 64
QUERY_BLOCK = 64
SCORES = 1 << 20
CONTEXT = 1 << 21
MKLDNN_MIN = 4096  # torch gives smaller bfloat16 products (rows * columns * inner) to another kernel


@dataclass(frozen=True, slots=True)
class Item:
    """B query blocks of m queries (short ones repeat their last query) over positions base .. base + L - 1.

    queries_Bm and its valid entries: valid_N index into B*m, tokens_N into T; both None if the item is all tokens in
    order. hidden_BmL (from tile-aligned column `hidden_from`) and empty_BL say which scores and which values to hide.
    """

    queries: Tensor | None  # [B * m]
    valid_N: Tensor | None
    tokens_N: Tensor | None
    size: tuple[int, int, int]  # B, m, L
    blocks_BN: Tensor  # int64: the blocks that hold those positions
    skip: int  # tokens of the first block before `base`
    hidden_from: int
    hidden_BmL: Tensor
    empty_BL: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every layer of one KV group shares in one step."""

    num_tokens: int
    block_size: int
    items: tuple[Item, ...]


def row_pad(dtype: torch.dtype, head_dim: int) -> int:
    """Query rows per product are a multiple of this, so that torch always takes the same kernel."""
    if dtype != torch.bfloat16:
        return 8
    return 1 << (MKLDNN_MIN // (TILE * head_dim)).bit_length()


def plan_attention(
    blocks_RN: Tensor,
    block_size: int,
    window: int | None,
    starts_R: NDArray[np.int32],
    offsets_R1: NDArray[np.int32],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> AttentionPlan:
    """Pack the step's queries into items. Row i owns tokens offsets_R1[i] .. offsets_R1[i+1]-1, from starts_R[i] on.

    blocks_RN: block tables, padded with 0. window: tokens that a query sees, itself included; None for all.
    """
    groups: dict[tuple[int, int, int], list[tuple[int, int, int, int]]] = {}
    for row, start in enumerate(starts_R.tolist()):
        first, end = int(offsets_R1[row]), int(offsets_R1[row + 1])
        for token in range(first, end, QUERY_BLOCK):
            count = min(QUERY_BLOCK, end - token)
            position = start + token - first
            base = 0 if window is None else max(0, position - window + 1) // TILE * TILE
            tiles = _bucket(-(-(position + count - base) // TILE))
            key = (1 if count == 1 else -(-count // 8) * 8, tiles, base % block_size)
            groups.setdefault(key, []).append((row, token, count, position))
    items = []
    for (m, tiles, _), members in sorted(groups.items()):
        length = tiles * TILE
        per_block = max(num_heads * m * length / SCORES, num_kv_heads * head_dim * length / CONTEXT)
        batch = max(1, int(1 / per_block))
        for at in range(0, len(members), batch):
            part = members[at : at + batch]
            items.append(_item(part, m, length, blocks_RN, block_size, window, int(offsets_R1[-1])))
    return AttentionPlan(int(offsets_R1[-1]), block_size, tuple(items))


def _bucket(tiles: int) -> int:
    """Round up so that at most a quarter is padding and few sizes exist: 1..8, 10, 12, 14, 16, 20, 24, ..."""
    step = 1 << max(0, tiles.bit_length() - 3)
    return -(-tiles // step) * step


def _item(
    members: list[tuple[int, int, int, int]],
    m: int,
    length: int,
    blocks_RN: Tensor,
    block_size: int,
    window: int | None,
    num_tokens: int,
) -> Item:
    device = blocks_RN.device
    rows_B, tokens_B, counts_B, positions_B = np.array(members, np.int64).T
    base_B = np.zeros_like(rows_B) if window is None else np.maximum(0, positions_B - window + 1) // TILE * TILE
    steps_Bm = np.minimum(np.arange(m), counts_B[:, None] - 1)
    queries_Bm = tokens_B[:, None] + steps_Bm
    seen_Bm = positions_B[:, None] + steps_Bm  # last position that each query may see
    keys_BL = base_B[:, None] + np.arange(length)
    valid_Bm = np.arange(m) < counts_B[:, None]
    whole = valid_Bm.all() and len(rows_B) * m == num_tokens and bool((np.diff(queries_Bm.ravel()) == 1).all())
    # Columns before the first query's own tile are visible to every query, except in front of a window.
    hidden_from = 0 if window is not None else int(positions_B.min()) // TILE * TILE
    tail_BL = keys_BL[:, hidden_from:]
    hidden = tail_BL[:, None, :] > seen_Bm[:, :, None]
    empty = tail_BL > seen_Bm[:, -1:]
    if window is not None:
        hidden |= tail_BL[:, None, :] <= seen_Bm[:, :, None] - window
        empty |= tail_BL <= positions_B[:, None] - window
    # Positions to blocks: the table may end before the padded context does; the null block stands in, and is hidden.
    first_B = base_B // block_size
    skip_B = base_B - first_B * block_size
    num_blocks = int(-(-(length + skip_B[0]) // block_size))
    columns_BN = first_B[:, None] + np.arange(num_blocks)
    inside = columns_BN < blocks_RN.shape[1]
    index = torch.from_numpy(np.where(inside, columns_BN, 0)).to(device)
    blocks = blocks_RN[torch.from_numpy(rows_B).to(device)[:, None], index]
    blocks = blocks * torch.from_numpy(inside).to(device)
    return Item(
        queries=None if whole else torch.from_numpy(queries_Bm.ravel()).to(device),
        valid_N=None if whole else torch.from_numpy(np.flatnonzero(valid_Bm)).to(device),
        tokens_N=None if whole else torch.from_numpy(queries_Bm[valid_Bm]).to(device),
        size=(len(rows_B), m, length),
        blocks_BN=blocks,
        skip=int(skip_B[0]),
        hidden_from=hidden_from,
        hidden_BmL=torch.from_numpy(hidden).to(device),
        empty_BL=torch.from_numpy(empty).to(device),
    )


def attention(q_THd: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan) -> Tensor:
    """Attend to the paged cache [blocks, block_size, G, d]; [T', H * d] like q, zero in rows beyond the plan's tokens.

    Queries come already scaled. bfloat16 products run in bfloat16 with fp32 sums; everything else in fp32.
    """
    num_rows, num_heads, head_dim = q_THd.shape
    num_kv_heads = k_cache.shape[2]
    out = q_THd.new_zeros(num_rows, num_heads, head_dim)
    for item in plan.items:
        batch, m, length = item.size
        queries = q_THd[: batch * m] if item.queries is None else q_THd.index_select(0, item.queries)
        q_BmGhd = queries.view(batch, m, num_kv_heads, -1, head_dim)
        # A block whose scores exceed the bound alone is cut by heads.
        heads = max(1, min(num_kv_heads, int(4 * SCORES * num_kv_heads / (batch * m * num_heads * length))))
        parts = [
            _attend(q_BmGhd[:, :, g : g + heads], k_cache[:, :, g : g + heads], v_cache[:, :, g : g + heads], item)
            for g in range(0, num_kv_heads, heads)
        ]
        o_MHd = (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).reshape(batch * m, num_heads, head_dim)
        if item.tokens_N is None or item.valid_N is None:
            out[: batch * m] = o_MHd
        else:
            out.index_copy_(0, item.tokens_N, o_MHd.index_select(0, item.valid_N).to(out.dtype))
    return out.view(num_rows, num_heads * head_dim)


def _attend(q_BmGhd: Tensor, k_cache: Tensor, v_cache: Tensor, item: Item) -> Tensor:
    """[B, m, G, h, d] in fp32 for one item and the KV heads given."""
    batch, m, kv_heads, h, d = q_BmGhd.shape
    compute = torch.bfloat16 if k_cache.dtype == torch.bfloat16 else torch.float32
    rows = m * h
    q = q_BmGhd.permute(0, 2, 1, 3, 4).reshape(batch * kv_heads, rows, d).to(compute)
    if extra := -rows % row_pad(compute, d):
        q = torch.nn.functional.pad(q, (0, 0, 0, extra))
    chunk = max(TILE, int(CONTEXT / (batch * kv_heads * d)) // TILE * TILE)
    spans = [(at, min(at + chunk, item.size[2])) for at in range(0, item.size[2], chunk)]
    parts = [_scores(q, _gather(k_cache, item, span).to(compute)) for span in spans]
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    real = scores.view(batch, kv_heads, -1, item.size[2])[:, :, :rows, item.hidden_from :]
    real = real.view(batch, kv_heads, m, h, -1)
    real.masked_fill_(item.hidden_BmL[:, None, :, None, :], -torch.inf)
    probs = scores.softmax(-1)
    total: Tensor | None = None
    for start, end in spans:
        v_BLGd = _gather(v_cache, item, (start, end))
        if end > item.hidden_from:  # 0 * NaN from a stale cell would be NaN
            tail = slice(max(start, item.hidden_from), end)
            empty = item.empty_BL[:, tail.start - item.hidden_from : tail.stop - item.hidden_from, None, None]
            v_BLGd[:, tail.start - start :].masked_fill_(empty, 0)
        for tile in _tiles(probs[:, :, start:end].to(compute), v_BLGd.to(compute)):
            total = tile.float() if total is None else total.add_(tile)
    assert total is not None
    return total[:, :rows].view(batch, kv_heads, m, h, d).permute(0, 2, 1, 3, 4)


def _gather(cache: Tensor, item: Item, span: tuple[int, int]) -> Tensor:
    """Positions `span` of the item's context out of the blocks: [B, length, G, d], a copy."""
    size = cache.shape[1]
    first = (item.skip + span[0]) // size
    blocks_BN = item.blocks_BN[:, first : -(-(item.skip + span[1]) // size)]
    found = cache.index_select(0, blocks_BN.reshape(-1)).view(blocks_BN.shape[0], -1, *cache.shape[2:])
    offset = item.skip + span[0] - first * size
    return found[:, offset : offset + span[1] - span[0]]


def _scores(q: Tensor, k_BLGd: Tensor) -> Tensor:
    """q [B * G, rows, d] times keys: fp32 [B * G, rows, L].

    A bfloat16 product rounds its fp32 sums to 8 bits, too few for scores. A second product that subtracts the first
    before rounding returns what was lost, at less cost than converting the keys to fp32.
    """
    k = k_BLGd.permute(0, 2, 3, 1).flatten(0, 1)
    if q.dtype != torch.bfloat16:
        return torch.bmm(q, k)
    high = torch.bmm(q, k)
    return high.float().add_(torch.baddbmm(high, q, k, beta=-1))


def _tiles(probs: Tensor, v_BLGd: Tensor) -> tuple[Tensor, ...]:
    """probs [B * G, rows, L] times values, tile by tile: one [B * G, rows, d] for each 64 positions."""
    heads, rows, length = probs.shape
    count = length // TILE
    p = probs.view(heads, rows, count, TILE).transpose(1, 2).reshape(-1, rows, TILE)
    v = v_BLGd.permute(0, 2, 1, 3).reshape(heads * count, TILE, -1)
    return torch.bmm(p, v).view(heads, count, rows, -1).unbind(1)
