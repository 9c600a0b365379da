"""How much memory one forward pass needs beside weights and cache: an upper bound from shapes alone.

T tokens (rounded up), D model width, H heads, G KV heads, d head width, I expert width, K experts per token.
"""

from __future__ import annotations

import torch

from moeserve.loader.spec import ModelSpec
from moeserve.moe.all2all.layout import TERMS
from moeserve.ops.attention import CONTEXT, QUERY_BLOCK, SCORES, TILE
from moeserve.ops.linear import padded_rows

INT64 = 8
FP32 = 4
LARGEST_PAD = 32  # rows; that pick_ops may choose


def workspace_bytes(spec: ModelSpec, max_tokens: int, max_rows: int, max_len: int, dtype: torch.dtype) -> int:
    """Bytes that `forward` holds at its peak for steps of up to max_tokens tokens in max_rows rows (requests) with
    contexts up to max_len, and `logits` for max_rows rows.

    Layers run one after the other and reuse memory, so the peak is the dearer of a layer's two halves.
    """
    tokens = padded_rows(max_tokens, LARGEST_PAD)
    size = dtype.itemsize
    # residual, normed rows, a block's output, and the norm's fp32 copies
    stream = tokens * spec.hidden_size * (3 * size + 3 * FP32)
    half = max(_attention(spec, tokens, max_len, size), _feed_forward(spec, tokens, size))
    logits = max_rows * (spec.vocab_size * (size + FP32) + spec.hidden_size * size)
    return stream + _plans(spec, tokens, max_rows, max_len) + max(half, logits)


def _plans(spec: ModelSpec, tokens: int, max_rows: int, max_len: int) -> int:
    """Cache rows of every query block's context, and rotary angles; planning holds a few copies of one item's."""
    blocks = min(tokens, max_rows + tokens // QUERY_BLOCK)
    groups = len(set(spec.windows)) or 1
    longest = _padded(max_len)
    return INT64 * longest * (groups * blocks + 6) + 2 * tokens * spec.head_dim * FP32


def _attention(spec: ModelSpec, tokens: int, max_len: int, size: int) -> int:
    d = spec.head_dim
    both = (spec.num_heads + spec.num_kv_heads) * d
    qkv = both + spec.num_kv_heads * d
    rows = tokens * (qkv * size + both * (5 * FP32 + size) + 2 * spec.num_heads * d * size)
    # One item: queries of one KV head are the least that a context is cut into.
    per_head = spec.num_heads // spec.num_kv_heads
    longest = _padded(max_len)
    scores = max(4 * SCORES, QUERY_BLOCK * per_head * longest)
    item = scores * (4 * FP32 + size + size * d // TILE)
    context = max(CONTEXT, spec.num_kv_heads * d * TILE)
    item += context * (size + FP32) + 2 * INT64 * spec.num_kv_heads * longest
    return rows + item


def _feed_forward(spec: ModelSpec, tokens: int, size: int) -> int:
    width = spec.hidden_size
    dense = 4 * max(spec.intermediate_size, spec.shared_expert_size) + 2 * width
    if not spec.num_experts:
        return tokens * dense * size
    pairs = tokens * spec.experts_per_token
    grouped = 2 * pairs * width * size + 4 * pairs * INT64
    expert = tokens * (4 * spec.expert_size + 2 * width) * size  # all tokens may choose the same expert
    scores = tokens * spec.num_experts * (size + 2 * FP32 + 3 * INT64)
    combine = TERMS * (size + 2 * FP32) + tokens * width * size
    return grouped + max(expert, combine, tokens * dense * size + combine, scores)


def _padded(length: int) -> int:
    """Contexts are padded by at most a quarter, in tiles."""
    return length + length // 4 + TILE
