"""An upper bound of the memory that one forward pass needs beside weights and cache, from shapes
alone.

T tokens (rounded up), D model width, H heads, G KV heads, d head width, I expert width, K experts
per token.

Under tensor parallelism a rank computes a part of the columns. Gathered columns come on top, up to
three times: as sent (the transport may keep them for a while), as received, and in order.

Where experts are sharded, a rank also takes in rows of all others, up to what
`moe/all2all/registry.py` allows.
"""

from dataclasses import dataclass

import torch

from moeserve.blocks.feed_forward_layer import feed_forward_workspace
from moeserve.blocks.kinds import mixer_workspace
from moeserve.blocks.linear import FP32, INT64, gathered_bytes
from moeserve.models.spec import ModelSpec
from moeserve.ops.attention import QUERY_BLOCK, padded_context
from moeserve.ops.linear import LARGEST_PAD, padded_rows


@dataclass(frozen=True, slots=True)
class Inflow:
    """Rows that other ranks may send here.

    rows: of one dispatch, at most. ubatches: micro-batches, each of which may have received so
    many. copies: copies of received rows that are in memory at once. moving: experts that are in
    memory a second time while they move here.
    """

    rows: int
    ubatches: int
    copies: int
    moving: int


def workspace_bytes(
    spec: ModelSpec,
    max_tokens: int,
    max_rows: int,
    max_len: int,
    dtype: torch.dtype,
    tp_size: int = 1,
    inflow: Inflow | None = None,
) -> int:
    """Return the bytes that `forward` and `logits` hold at their peak on one of tp_size ranks.

    max_tokens: of a step. max_rows: requests of a step. max_len: of a context. inflow: None where
    no rows come from other ranks. Layers run one after the other and reuse memory, so the peak is
    the larger of a layer's two halves.
    """
    tokens = padded_rows(max_tokens, LARGEST_PAD)
    size = dtype.itemsize
    # residual, normed rows, a block's output, and the norm's fp32 copies
    stream = tokens * spec.hidden_size * (3 * size + 3 * FP32)
    if spec.draft_layers:  # the model's hidden states, padded, and two normed rows side by side
        stream += tokens * spec.hidden_size * (4 + 2 * len(spec.aux_hidden_layers)) * size
    half = max(
        max(
            mixer_workspace(
                layer.mixer,
                width=spec.hidden_size,
                tokens=tokens,
                max_len=max_len,
                size=size,
                tp_size=ranks,
            ),
            feed_forward_workspace(
                layer.feed_forward,
                width=spec.hidden_size,
                tokens=tokens,
                size=size,
                tp_size=ranks,
            )
            if layer.feed_forward
            else 0,
        )
        for layer, ranks in [
            *((layer, tp_size) for layer in set(spec.shared_layers)),
            *((layer, 1) for layer in set(spec.draft_layers) if spec.draft_whole),
        ]
    )
    logits = max_rows * (spec.vocab_size * (size + FP32) + spec.hidden_size * size)
    logits += gathered_bytes(max_rows, spec.vocab_size, size, tp_size)
    kept = 0 if inflow is None else _received(spec, inflow, size)
    return stream + _plans(spec, tokens, max_rows, max_len) + max(half, logits) + kept


def _plans(spec: ModelSpec, tokens: int, max_rows: int, max_len: int) -> int:
    """Return the bytes of cache rows of query blocks, rotary angles, copies while planning."""
    blocks = min(tokens, max_rows + tokens // QUERY_BLOCK)
    attending = (
        layer.mixer for layer in spec.cached_layers if layer.mixer.head_shape(1) is not None
    )
    angles = max((tensor.width for mixer in attending for tensor in mixer.cache(1)), default=0)
    return (
        INT64 * padded_context(max_len) * (len(set(spec.kv_rules)) * blocks + 6)
        + 2 * tokens * angles * FP32
    )


def _received(spec: ModelSpec, inflow: Inflow, size: int) -> int:
    """Bytes of other ranks' rows and of their experts' results, whose memory stays with the
    transport, and of experts that are being moved in.

    One micro-batch computes at a time, and in the worst case one expert has a row of every token.
    """
    width = spec.hidden_size
    rows = inflow.ubatches * inflow.rows * (inflow.copies * width * size + 4 * INT64)
    alike = padded_rows(inflow.rows // spec.experts_per_token, LARGEST_PAD)
    return (
        rows
        + (alike * (4 * spec.expert_size + 2 * width) + inflow.moving * spec.expert_weights) * size
    )
