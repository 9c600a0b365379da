"""Selection of the groups of tokens that a query attends to (blocks/group_indexer.py).

Shapes: S selecting queries, J index heads, d their width, R tokens of a group, K selected tokens, M
queries that are scored at once, G complete groups, L positions of a context.

Groups with the largest scores are selected, of equal ones the earliest, so the selection depends on
query and context alone. As in ops/selected.py, each selecting query becomes a request of its own,
whose context is its selected tokens in ascending order of positions.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.ops.attention import MAX_SCORES
from moeserve.ops.inputs import GroupInputs, StepInputs
from moeserve.ops.latent import PackHeads
from moeserve.ops.selected import (
    MAX_QUERIES,
    MIN_KEYS,
    SelectingRequest,
    Selection,
    best_positions,
    index_scores,
)


def select_groups(
    q_SJd: Tensor,
    cache: Tensor,
    selection: Selection,
    group: int,
    pack_heads: PackHeads,
    weights_SJ: Tensor | None = None,
) -> Tensor:
    """Return the cache slots of the selected tokens, int64 [S, K], in order of positions.

    K is `selection.top_k`. A query with fewer tokens in its incomplete group repeats its own slot
    at the end.

    cache: of the groups' keys, [blocks, block size, 1, d / R].
    group: R.
    weights_SJ: fp32, the weights of heads in a score; None: 1.
    """
    dim = q_SJd.shape[2]
    k_rows = cache.view(-1, dim)
    if weights_SJ is None:
        weights_SJ = torch.ones(q_SJd.shape[:2], device=q_SJd.device)
    out_SK = torch.empty((len(q_SJd), selection.top_k), dtype=torch.int64, device=q_SJd.device)
    num_groups = selection.top_k // group
    step = max(1, min(MAX_QUERIES, MAX_SCORES // (q_SJd.shape[1] * MIN_KEYS)))
    for request in selection.requests:
        for start in range(request.rows.start, request.rows.stop, step):
            part = slice(start, min(start + step, request.rows.stop))
            last_M = _positions(request, part, q_SJd.device)
            slots_G = request.slots_L[: int(last_M[-1] + 1) // group * group : group] // group
            scores_MG = index_scores(q_SJd[part], weights_SJ[part], k_rows, slots_G, pack_heads)
            groups_MK = best_positions(scores_MG, (last_M + 1) // group - 1, num_groups)
            positions_MK = _tokens(groups_MK, last_M, group)
            out_SK[part] = request.slots_L[positions_MK]
    return out_SK


def _positions(request: SelectingRequest, part: slice, device: torch.device) -> Tensor:
    """Return the positions of some of a request's selecting queries."""
    first = request.first + part.start - request.rows.start
    return torch.arange(first, first + part.stop - part.start, device=device)


def _tokens(groups_MK: Tensor, last_M: Tensor, group: int) -> Tensor:
    """Return the positions of the tokens of selected groups, and of each query's incomplete one.

    groups 0 and 2 of 4 tokens, query at position 13 -> 0 .. 3, 8 .. 11, 12, 13, 13.
    """
    offsets = torch.arange(group, device=groups_MK.device)
    selected = (groups_MK[:, :, None] * group + offsets).flatten(1)
    tail = (last_M[:, None] + 1) // group * group + offsets[: group - 1]
    return torch.cat((selected, torch.minimum(tail, last_M[:, None])), 1)


def groups_as_requests(
    slots_SK: Tensor, counts_S: NDArray[np.int32], group: GroupInputs, step: StepInputs
) -> tuple[GroupInputs, StepInputs]:
    """Return a group and a step in which each selecting query is a request with its tokens.

    counts_S: the number of each query's tokens. The cache is that of the layer in blocks of one
    token: cache.view(-1, 1, *cache.shape[2:]).
    """
    starts_R = counts_S - 1
    offsets_R1 = np.arange(len(counts_S) + 1, dtype=np.int32)
    on_device = tuple(torch.from_numpy(x).to(slots_SK.device) for x in (starts_R, offsets_R1))
    rows = replace(
        step,
        starts_R=starts_R,
        offsets_R1=offsets_R1,
        rows_on_device=(on_device[0], on_device[1]),
    )
    return replace(group, blocks_RN=slots_SK, block_size=1), rows
