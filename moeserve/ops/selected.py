"""Selection of the tokens that a query attends to (DeepSeek sparse attention).

Shapes: T tokens (including padding), S of which select, J index heads, d their width, K selected
tokens, M queries that are scored at once, L context padded to tiles, N blocks of a request's table.

A query selects if it sees more than K tokens. The score of a token is

    sum over heads j of weight_j * relu(q_j . k)

in fp32, computed by the active table's products; NaN counts as infinity. The K tokens with the
largest scores are selected, of equal ones the earliest, so the selection depends on query and
context alone.

For attention, each selecting query becomes a request of its own, whose context is its K tokens in
ascending order of positions, in blocks of one token. So `attention` of every table can compute it,
and a query that sees exactly K tokens has the same bits with and without selection.

Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.ops.attention import MAX_SCORES, TILE
from moeserve.ops.inputs import GroupInputs, StepInputs
from moeserve.ops.latent import PackHeads

MAX_QUERIES = 16  # queries that are scored at once, at most
MIN_KEYS = 1024  # keys that are scored at once, at least, if there are as many
POSITION_BITS = 31  # of a key of `best_positions`


@dataclass(frozen=True, eq=False)
class SelectingRequest:
    """The selecting queries of one request."""

    rows: range  # their indices among the S selecting queries
    first: int  # position of the first query
    blocks_N: Tensor  # block table of the request
    block_size: int

    @cached_property
    def slots_L(self) -> Tensor:
        """The cache slots of all positions up to the last query's."""
        positions = torch.arange(self.first + len(self.rows), device=self.blocks_N.device)
        blocks_L = self.blocks_N.index_select(0, positions // self.block_size)
        return blocks_L * self.block_size + positions % self.block_size


@dataclass(frozen=True, slots=True)
class Selection:
    """The queries of a step that select, and those that do not."""

    top_k: int
    blocks_RN: Tensor  # block tables of the step
    requests: tuple[SelectingRequest, ...]
    others: tuple[GroupInputs, StepInputs] | None  # a step of the other queries; None: none exist
    context: int  # the most tokens that a query sees
    tokens_S: Tensor  # int64: tokens of the selecting queries
    rows_S: Tensor  # int64: their rows
    positions_S: Tensor  # int64: their positions
    other_tokens: Tensor  # int64: tokens of the queries that do not select


def plan_selection(group: GroupInputs, step: StepInputs, top_k: int) -> Selection | None:
    """Return the selecting queries of a step; None if there are none. group: of the layers."""
    assert group.window is None, group
    assert group.chunk is None, group
    offsets = step.offsets_R1.astype(np.int64)
    blocks_RN = group.blocks_RN
    counts_R = np.diff(offsets)
    num_plain_R = np.clip(top_k - step.starts_R, 0, counts_R)  # queries that do not select
    if (num_plain_R == counts_R).all():
        return None
    selecting = []
    requests: list[SelectingRequest] = []
    num_selecting = 0
    for row in np.flatnonzero(num_plain_R < counts_R):
        tokens = np.arange(offsets[row] + num_plain_R[row], offsets[row + 1])
        rows = range(num_selecting, num_selecting + len(tokens))
        first = int(step.starts_R[row] + num_plain_R[row])
        requests.append(SelectingRequest(rows, first, blocks_RN[int(row)], group.block_size))
        selecting.append(tokens)
        num_selecting += len(tokens)
    tokens_S = np.concatenate(selecting)
    rows_S = np.repeat(np.arange(len(counts_R)), counts_R - num_plain_R)
    positions_S = tokens_S + (step.starts_R - offsets[:-1])[rows_S]
    kept_rows = np.flatnonzero(num_plain_R)
    other_tokens = np.concatenate(
        [np.arange(offsets[row], offsets[row] + num_plain_R[row]) for row in kept_rows]
        or [num_plain_R[:0]]
    )
    others = None
    if len(kept_rows):
        blocks = blocks_RN.index_select(0, _to_device(kept_rows, blocks_RN.device))
        starts_R = step.starts_R[kept_rows]
        offsets_R1 = np.concatenate(([0], np.cumsum(num_plain_R[kept_rows]))).astype(np.int32)
        rows_on_device = (
            _to_device(starts_R, blocks_RN.device),
            _to_device(offsets_R1, blocks_RN.device),
        )
        rest = replace(
            step, starts_R=starts_R, offsets_R1=offsets_R1, rows_on_device=rows_on_device
        )
        others = replace(group, blocks_RN=blocks), rest
    device = blocks_RN.device
    return Selection(
        top_k=top_k,
        blocks_RN=blocks_RN,
        requests=tuple(requests),
        others=others,
        context=int(positions_S.max()) + 1,
        tokens_S=_to_device(tokens_S, device),
        rows_S=_to_device(rows_S, device),
        positions_S=_to_device(positions_S, device),
        other_tokens=_to_device(other_tokens, device),
    )


def _to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device without a sync."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def select_always(group: GroupInputs, step: StepInputs, top_k: int) -> Selection:
    """Return a selection by all queries, for CUDA graphs: rows and positions are on the device.

    A query that sees fewer than K tokens selects all of them first, then later positions, which
    `chosen_as_requests` omits.
    """
    starts_R, offsets_R1 = step.rows_on_device
    tokens_T = torch.arange(len(step.ids_T), device=starts_R.device)
    rows_T = torch.searchsorted(offsets_R1[1:], tokens_T.int(), right=True).clamp(
        max=len(starts_R) - 1
    )
    context = int((step.starts_R + np.diff(step.offsets_R1)).max())
    return Selection(
        top_k=min(top_k, context),
        blocks_RN=group.blocks_RN,
        requests=(),
        others=None,
        context=context,
        tokens_S=tokens_T,
        rows_S=rows_T,
        positions_S=step.positions.text_T,
        other_tokens=tokens_T[:0],
    )


def chosen_as_requests(
    slots_SK: Tensor, group: GroupInputs, step: StepInputs, positions_S: Tensor | None = None
) -> tuple[GroupInputs, StepInputs]:
    """Return a group and a step in which each selecting query is a request with its K tokens.

    The cache is that of the layer in blocks of one token: cache.view(-1, 1, *cache.shape[2:]).
    positions_S: of the queries, if some may see fewer than K tokens, which then come first.
    """
    count, top_k = slots_SK.shape
    device = slots_SK.device
    last_S = (
        torch.full((count,), top_k - 1, device=device)
        if positions_S is None
        else positions_S.clamp(max=top_k - 1)
    )
    rows_on_device = last_S.int(), torch.arange(count + 1, dtype=torch.int32, device=device)
    starts_R = np.full(count, top_k - 1, np.int32)
    offsets_R1 = np.arange(count + 1, dtype=np.int32)
    rows = replace(step, starts_R=starts_R, offsets_R1=offsets_R1, rows_on_device=rows_on_device)
    return replace(group, blocks_RN=slots_SK, block_size=1), rows


def index_select(
    q_SJd: Tensor, weights_SJ: Tensor, cache: Tensor, selection: Selection, pack_heads: PackHeads
) -> Tensor:
    """Return the cache slots of the selected tokens, int64 [S, K], in order of positions.

    A slot is block * block_size + offset. weights_SJ: fp32. cache: of index keys [blocks, block
    size, 1, d]. pack_heads: of the table that computes the scores.
    """
    k_rows = cache.view(-1, cache.shape[3])
    out_SK = torch.empty((len(q_SJd), selection.top_k), dtype=torch.int64, device=q_SJd.device)
    for request in selection.requests:
        rows = request.rows
        step = max(1, min(MAX_QUERIES, MAX_SCORES // (q_SJd.shape[1] * MIN_KEYS)))
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            first = request.first + start - rows.start
            slots_L = request.slots_L[: first + part.stop - part.start]
            scores_ML = index_scores(q_SJd[part], weights_SJ[part], k_rows, slots_L, pack_heads)
            last_M = torch.arange(first, first + len(scores_ML), device=scores_ML.device)
            out_SK[part] = slots_L[best_positions(scores_ML, last_M, selection.top_k)]
    return out_SK


def index_scores(
    q_MJd: Tensor, weights_MJ: Tensor, k_rows: Tensor, slots_L: Tensor, pack_heads: PackHeads
) -> Tensor:
    """Return the scores of the keys in these cache slots, fp32 [M, L].

    Both products have the queries as weights and a row per key, so a score's bits depend on its
    query and key alone.
    """
    count, heads, dim = q_MJd.shape
    by_queries = pack_heads(q_MJd.reshape(1, -1, dim).float())
    by_weights = pack_heads(weights_MJ[:, None].contiguous())
    span = max(MIN_KEYS, MAX_SCORES // max(dim, count * heads) // TILE * TILE)
    index_L = torch.nn.functional.pad(slots_L, (0, -len(slots_L) % TILE))
    parts = []
    for index_l in torch.split(index_L, span):
        dots_lMJ = by_queries(k_rows.index_select(0, index_l).float()[:, None]).view(
            -1, count, heads
        )
        parts.append(by_weights(dots_lMJ.relu_())[:, :, 0])
    return torch.cat(parts)[: len(slots_L)].T.contiguous()


def best_positions(scores_ML: Tensor, last_M: Tensor, top_k: int) -> Tensor:
    """Return the positions of each query's top_k largest scores, ascending.

    last_M: the last position that each query sees. Scores are compared as integers: the bits of
    floats (flipped if negative), then the negated position, which makes them unique.
    """
    length = scores_ML.shape[1]
    bits_ML = (scores_ML.masked_fill(scores_ML.isnan(), torch.inf) + 0.0).view(torch.int32).long()
    positions_L = torch.arange(length, device=scores_ML.device)
    keys_ML = ((bits_ML ^ ((bits_ML >> 31) & 0x7FFFFFFF)) << POSITION_BITS) - positions_L
    keys_ML.masked_fill_(positions_L > last_M[:, None], torch.iinfo(torch.int64).min)
    return keys_ML.topk(top_k, dim=-1, sorted=False).indices.sort(-1).values
