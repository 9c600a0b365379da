"""Selection of the blocks of tokens that a query attends to (block-sparse attention).

Shapes: S selecting queries, J index heads, d their width, K selected blocks of B tokens, M queries
that are scored at once, L context, N blocks of a context.

A query selects if it sees more than K blocks. Each index head selects by itself. The score of a
block is the largest product of the query and a key of the block, in fp32; NaN counts as infinity.
The last `local` blocks that the query sees are always selected, its own block among them. Of equal
scores the earliest block is selected, so the selection depends on query and context alone.

For attention, each selecting query and KV head become a request of their own, as in
ops/selected.py.

Source: MiniMax-M3 (huggingface.co/MiniMaxAI/MiniMax-M3).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moeserve.ops.attention import MAX_SCORES, TILE
from moeserve.ops.inputs import GroupInputs, StepInputs
from moeserve.ops.latent import PackHeads
from moeserve.ops.selected import MAX_QUERIES, MIN_KEYS, POSITION_BITS, Selection

ALWAYS = torch.iinfo(torch.int64).max
NEVER = torch.iinfo(torch.int64).min


@dataclass(frozen=True, slots=True)
class BlockRule:
    """The rule by which a query selects blocks."""

    size: int  # B, tokens
    top_k: int  # K, the last blocks included
    local: int  # number of the last blocks, which are always selected

    @property
    def tokens(self) -> int:
        """The most tokens that a query attends to."""
        return self.size * self.top_k


def select_blocks(
    q_SJd: Tensor, cache: Tensor, selection: Selection, rule: BlockRule, pack_heads: PackHeads
) -> Tensor:
    """Return the cache slots of the selected blocks, int64 [S, J, K * B], in order of positions.

    A slot is block * block_size + offset. Slots after a query's own position are arbitrary. cache:
    of index keys [blocks, block size, 1, d]. pack_heads: of the table that computes the scores.
    """
    k_rows = cache.view(-1, cache.shape[3])
    heads = q_SJd.shape[1]
    offsets_B = torch.arange(rule.size, device=q_SJd.device)
    out = torch.empty((len(q_SJd), heads, rule.tokens), dtype=torch.int64, device=q_SJd.device)
    step = max(1, min(MAX_QUERIES, MAX_SCORES // (heads * MIN_KEYS)))
    for request in selection.requests:
        rows = request.rows
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            first = request.first + start - rows.start
            slots_L = request.slots_L[: first + part.stop - part.start]
            scores_MJN = block_scores(q_SJd[part], k_rows, slots_L, rule.size, pack_heads)
            blocks_MJK = best_blocks(scores_MJN, first, rule)
            positions = (blocks_MJK[..., None] * rule.size + offsets_B).flatten(2)
            out[part] = slots_L[positions.clamp(max=len(slots_L) - 1)]
    return out


def block_scores(
    q_MJd: Tensor, k_rows: Tensor, slots_L: Tensor, size: int, pack_heads: PackHeads
) -> Tensor:
    """Return the scores of the blocks of `size` keys in these cache slots, fp32 [M, J, N].

    The product has the queries as weights and a row per key, so a score's bits depend on its query
    and its block alone. The score of an incomplete last block is arbitrary.
    """
    count, heads, dim = q_MJd.shape
    by_queries = pack_heads(q_MJd.reshape(1, -1, dim).float())
    step = math.lcm(TILE, size)
    span = max(step, max(MIN_KEYS, MAX_SCORES // max(dim, count * heads)) // step * step)
    index_L = torch.nn.functional.pad(slots_L, (0, -len(slots_L) % step))
    parts = []
    for index_l in torch.split(index_L, span):
        dots = by_queries(k_rows.index_select(0, index_l).float()[:, None])
        parts.append(dots.view(-1, size, count, heads).amax(1))
    return torch.cat(parts)[: -(-len(slots_L) // size)].permute(1, 2, 0).contiguous()


def best_blocks(scores_MJN: Tensor, first: int, rule: BlockRule) -> Tensor:
    """Return the K blocks that each query selects, int64 [M, J, K], ascending.

    first: position of the first query. Scores are compared as in ops/selected.py: as integers,
    which are the bits of floats, then the negated block. For example scores [3, 5, 4, 1], all
    blocks seen, K 3, local 1 -> [1, 2, 3].
    """
    count, _, num_blocks = scores_MJN.shape
    scores = scores_MJN.masked_fill(scores_MJN.isnan(), torch.inf) + 0.0
    bits = scores.view(torch.int32).long()
    blocks_N = torch.arange(num_blocks, device=scores.device)
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << POSITION_BITS) - blocks_N
    positions_M = torch.arange(first, first + count, device=scores.device)
    last_M11 = (positions_M // rule.size)[:, None, None]
    keys = torch.where(blocks_N > last_M11 - rule.local, ALWAYS - blocks_N, keys)
    keys.masked_fill_(blocks_N > last_M11, NEVER)
    return keys.topk(rule.top_k, dim=-1, sorted=False).indices.sort(-1).values


def blocks_as_requests(
    slots_SJC: Tensor, group: GroupInputs, step: StepInputs, selection: Selection, rule: BlockRule
) -> tuple[GroupInputs, StepInputs]:
    """Return a group and a step in which each query and KV head is a request of one KV head.

    The cache is that of the layer in blocks of one entry: cache.view(-1, 1, 1, cache.shape[3]).
    """
    count, heads, _ = slots_SJC.shape
    device = slots_SJC.device
    entries = slots_SJC * heads + torch.arange(heads, device=device)[:, None]
    positions_S = np.concatenate(
        [request.first + np.arange(len(request.rows)) for request in selection.requests]
    )
    # The last selected block is the query's own, which ends with the query.
    last_S = (rule.top_k - 1) * rule.size + positions_S % rule.size
    starts_R = np.repeat(last_S, heads).astype(np.int32)
    offsets_R1 = np.arange(count * heads + 1, dtype=np.int32)
    rows_on_device = (
        torch.from_numpy(starts_R).to(device),
        torch.from_numpy(offsets_R1).to(device),
    )
    rows = replace(step, starts_R=starts_R, offsets_R1=offsets_R1, rows_on_device=rows_on_device)
    return replace(group, blocks_RN=entries.flatten(0, 1), block_size=1), rows
