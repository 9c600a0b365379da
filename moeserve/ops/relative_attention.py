"""Paged attention whose scores have a bias that depends on query, head and distance.

Shapes: as in ops/attention.py, whose tiles, cuts and order of sums it has. E distances with a bias.

    score of query i and key j = q_i . k_j + bias of q_i at the distance i - j

Products are fp32.

Source: Inkling (huggingface.co/thinkingmachines/Inkling), after relative position representations
(arXiv 1803.02155).
"""

import torch
from torch import Tensor

from moeserve.ops.attention import (
    TILE,
    Partial,
    TorchAttentionMetadata,
    WorkItem,
    attention_partial,
    gather_entries,
    merge_partials,
)

ROW_STEP = 8  # rows of queries are padded to a multiple, so that torch chooses the same kernel


def relative_attention(
    q_THd: Tensor,
    bias_THE: Tensor,
    cache: tuple[Tensor, Tensor],
    plan: TorchAttentionMetadata,
    positions_T: Tensor,
    window: int | None,
    sinks_TH: Tensor | None = None,
) -> Tensor:
    """Return attention over the paged cache, [T', H * v] in q's dtype.

    q_THd: queries, already scaled. Rows beyond the plan's tokens are padding, and get zeros.
    bias_THE: fp32, the biases of each query at the distances 0 .. E - 1. It is 0 farther away.
    cache: of keys, and of values.
    plan: from `plan_attention` of ops/attention.py.
    positions_T: the positions of queries. window: see `GroupInputs`.
    sinks_TH: fp32, attention sinks of each query: scores without values.
    """
    num_rows, num_heads, _ = q_THd.shape
    num_kv_heads = cache[0].shape[2]
    k_rows, v_rows = (tensor.view(-1, tensor.shape[3]) for tensor in cache)
    v_rows[:num_kv_heads] = 0  # unused positions read the first entry of the null block
    v_dim = plan.shape.v_dim
    out = torch.empty((num_rows, num_heads, v_dim), dtype=q_THd.dtype, device=q_THd.device)
    out[plan.num_tokens :] = 0
    for item in plan.items:
        positions = positions_T.index_select(0, item.tokens)
        results = _attend(
            q_THd.index_select(0, item.tokens).float(),
            bias_THE.index_select(0, item.tokens),
            (k_rows, v_rows),
            item.rows_BL[:, None] + plan.heads_G1,
            item,
            positions,
            window,
            None if sinks_TH is None else sinks_TH.index_select(0, item.tokens),
        )
        out.index_copy_(0, item.tokens, results.to(out.dtype))
    return out.view(num_rows, num_heads * v_dim)


def _attend(
    q_MHd: Tensor,
    bias_MHE: Tensor,
    rows: tuple[Tensor, Tensor],
    rows_BGL: Tensor,
    item: WorkItem,
    positions_M: Tensor,
    window: int | None,
    sinks_MH: Tensor | None,
) -> Tensor:
    """Return the results of the M = B * m queries of one item, fp32 [M, H, v].

    rows: the caches as [entries, entry width].
    """
    batch, m, _ = item.size
    kv_heads = rows_BGL.shape[1]
    h = q_MHd.shape[1] // kv_heads
    distances_BmL = _distances(positions_M.view(batch, m), item, window)
    q = _by_kv_head(q_MHd, batch, kv_heads)
    total: Partial | None = None
    for start, end in item.cuts:
        k, v = (gather_entries(entries, rows_BGL, (start, end)).float() for entries in rows)
        hidden_Bml = None
        if end > (first := max(start, item.hidden_from)):
            hidden_Bml = item.hidden_Bml[:, :, first - item.hidden_from : end - item.hidden_from]
        bias = _biases(bias_MHE, distances_BmL[:, :, start:end])
        part = attention_partial(q, k, v, hidden_Bml, h, bias=_by_kv_head(bias, batch, kv_heads))
        total = part if total is None else merge_partials(total, part)
    assert total is not None
    if sinks_MH is not None:  # an additional last cut, with one score and no value
        largest = _by_kv_head(sinks_MH[:, :, None], batch, kv_heads)[:, :, 0]
        sink = Partial(largest, torch.ones_like(largest), torch.zeros_like(total.values))
        total = merge_partials(total, sink)
    results = (total.values / total.exp_sum[:, :, None])[:, : m * h]
    return (
        results.view(batch, kv_heads, m, h, -1).transpose(1, 2).reshape(batch * m, h * kv_heads, -1)
    )


def _distances(positions_Bm: Tensor, item: WorkItem, window: int | None) -> Tensor:
    """Return the distances of an item's columns from its queries, int64 [B, m, L]."""
    first_B = positions_Bm[:, 0]
    if window is None:
        first_B = torch.zeros_like(first_B)
    else:
        first_B = (first_B - window + 1).clamp(min=0) // TILE * TILE
    columns_BL = first_B[:, None] + torch.arange(item.size[2], device=first_B.device)
    return positions_Bm[:, :, None] - columns_BL[:, None]


def _biases(bias_MHE: Tensor, distances_Bmn: Tensor) -> Tensor:
    """Return the biases of columns, fp32 [M, H, n]; 0 if a distance has none."""
    extent = bias_MHE.shape[2]
    distances_M1n = distances_Bmn.flatten(0, 1)[:, None]
    index = distances_M1n.clamp(0, extent - 1).expand(-1, bias_MHE.shape[1], -1)
    has_none = (distances_M1n < 0) | (distances_M1n >= extent)
    return bias_MHE.gather(2, index).masked_fill_(has_none, 0.0)


def _by_kv_head(x_MHn: Tensor, batch: int, kv_heads: int) -> Tensor:
    """Return rows by KV head, [B * G, q, n], padded to a multiple of ROW_STEP rows."""
    rows, heads, width = x_MHn.shape
    m = rows // batch
    x = x_MHn.view(batch, m, kv_heads, heads // kv_heads, width).transpose(1, 2)
    x = x.reshape(batch * kv_heads, -1, width)
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % ROW_STEP))
