"""An upper bound of the memory that one forward pass needs beside weights and cache, from shapes alone.

T tokens (rounded up), D model width, H heads, G KV heads, d head width, I expert width, K experts per token.

Under tensor parallelism a rank computes a part of the columns. Gathered columns come on top, up to three times: as
sent (the transport may keep them for a while), as received, and in order.

Where experts are sharded, a rank also takes in rows of all others, up to what `moe/all2all/rounds.py` allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.loader.spec import ModelSpec, local_kv_heads
from moeserve.moe.all2all.layout import TERMS
from moeserve.ops.attention import CONTEXT, QUERY_BLOCK, SCORES, TILE
from moeserve.ops.linear import padded_rows

INT64 = 8
FP32 = 4
LARGEST_PAD = 32  # rows; that pick_ops may choose
GATHERED = 3


@dataclass(frozen=True, slots=True)
class Inflow:
    """Rows that other ranks may send here.

    rows: of one dispatch, at most. ubatches: micro-batches, each of which may have received so many. copies: copies of
    received rows that are in memory at once. experts: physical experts of this rank in a layer.
    """

    rows: int
    ubatches: int
    copies: int
    experts: int


def workspace_bytes(
    spec: ModelSpec,
    max_tokens: int,
    max_rows: int,
    max_len: int,
    dtype: torch.dtype,
    tp_size: int = 1,
    inflow: Inflow | None = None,
) -> int:
    """Returns the bytes that `forward` and `logits` hold at their peak on one of tp_size ranks.

    max_tokens: of a step. max_rows: requests of a step. max_len: of a context. inflow: None where no rows come from
    other ranks. Layers run one after the other and reuse memory, so the peak is the larger of a layer's two halves.
    """
    tokens = padded_rows(max_tokens, LARGEST_PAD)
    size = dtype.itemsize
    # residual, normed rows, a block's output, and the norm's fp32 copies
    stream = tokens * spec.hidden_size * (3 * size + 3 * FP32)
    half = max(_attention(spec, tokens, max_len, size, tp_size), _feed_forward(spec, tokens, size, tp_size))
    logits = max_rows * (spec.vocab_size * (size + FP32) + spec.hidden_size * size)
    logits += _gathered(max_rows, spec.vocab_size, size, tp_size)
    kept = 0 if inflow is None else _received(spec, inflow, size)
    return stream + _plans(spec, tokens, max_rows, max_len) + max(half, logits) + kept


def _plans(spec: ModelSpec, tokens: int, max_rows: int, max_len: int) -> int:
    """Bytes of the cache rows of all query blocks, of rotary angles, and of copies while planning."""
    blocks = min(tokens, max_rows + tokens // QUERY_BLOCK)
    groups = len(set(spec.windows)) or 1
    longest = _padded(max_len)
    return INT64 * longest * (groups * blocks + 6) + 2 * tokens * spec.head_dim * FP32


def _gathered(rows: int, columns: int, size: int, tp_size: int) -> int:
    return 0 if tp_size == 1 else GATHERED * rows * (columns + tp_size) * size


def _attention(spec: ModelSpec, tokens: int, max_len: int, size: int, tp_size: int) -> int:
    d = spec.head_dim
    heads, kv_heads = spec.num_heads // tp_size, local_kv_heads(spec, tp_size)
    both = (heads + kv_heads) * d
    qkv = both + kv_heads * d
    rows = tokens * (qkv * size + both * (5 * FP32 + size) + 2 * heads * d * size)
    rows += _gathered(tokens, spec.num_heads * d + spec.hidden_size, size, tp_size)
    if spec.qk_norm == "full" and tp_size > 1:
        all_both = both * tp_size
        rows += _gathered(tokens, all_both, size, tp_size) + 4 * FP32 * tokens * all_both
    # One item: queries of one KV head are the least that a context is cut into.
    per_head = heads // kv_heads
    longest = _padded(max_len)
    scores = max(4 * SCORES, QUERY_BLOCK * per_head * longest)
    item = scores * FP32 * (5 + d // TILE)  # an int8 cache computes in fp32, whatever the activations
    context = max(CONTEXT, kv_heads * d * TILE)
    item += context * (size + FP32) + 2 * INT64 * kv_heads * longest
    return rows + item


def _received(spec: ModelSpec, inflow: Inflow, size: int) -> int:
    """Bytes of other ranks' rows and of their experts' results, whose memory stays with the transport, and of experts
    that are being moved in: those of a layer, and one that is read twice and packed.

    One micro-batch computes at a time, and in the worst case one expert has a row of every token.
    """
    width = spec.hidden_size
    rows = inflow.ubatches * inflow.rows * (inflow.copies * width * size + 4 * INT64)
    alike = padded_rows(inflow.rows // spec.experts_per_token, LARGEST_PAD)
    moving = (inflow.experts + 3) * 3 * width * spec.expert_size
    return rows + (alike * (4 * spec.expert_size + 2 * width) + moving) * size


def _feed_forward(spec: ModelSpec, tokens: int, size: int, tp_size: int) -> int:
    width = spec.hidden_size
    dense = tokens * (4 * max(spec.intermediate_size, spec.shared_expert_size) + 2 * width) * size
    gathered = _gathered(tokens, spec.intermediate_size + width, size, tp_size)
    if not spec.num_experts:
        return dense + gathered
    own = padded_rows(-(-tokens // tp_size), LARGEST_PAD)  # tokens that this rank sends to experts
    pairs = own * spec.experts_per_token
    grouped = 2 * pairs * width * size + 4 * pairs * INT64
    expert = own * (4 * spec.expert_size + 2 * width) * size  # all tokens may choose the same expert
    scores = tokens * spec.num_experts * (size + 2 * FP32 + 3 * INT64)
    combine = TERMS * (size + 2 * FP32) + own * width * size
    return grouped + max(expert, combine, dense + combine, scores) + gathered


def _padded(length: int) -> int:
    """A context with its padding, which is at most a quarter and a tile."""
    return length + length // 4 + TILE
