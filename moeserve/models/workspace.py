"""An upper bound of the activation memory of one step, without weights and KV cache.

It is computed from shapes alone, before the model is built.

With tensor parallelism, a rank computes a part of the columns. In addition, the gathered columns
are in memory up to three times: as sent (the transport may keep them for a while), as received, and
in order. With expert parallelism, a rank also receives rows of the other ranks, at most as many as
moe/all2all/registry.py allows.
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
    """The memory that expert parallelism needs on this rank, at most."""

    rows: int  # received in one dispatch
    ubatches: int  # micro-batches, each of which may have received so many rows
    copies: int  # copies of received rows that are in memory at the same time
    moving: int  # experts that are in memory twice while they are moved to this rank


def workspace_bytes(
    spec: ModelSpec,
    max_tokens: int,
    max_rows: int,
    max_len: int,
    dtype: torch.dtype,
    tp_size: int = 1,
    inflow: Inflow | None = None,
) -> int:
    """Return the peak of bytes that `forward` and `logits` hold, on one of tp_size ranks.

    Layers run one after the other and reuse memory, so the peak is the largest of any layer's mixer
    and feed-forward block.

    max_tokens: tokens of a step. max_rows: requests of a step. max_len: tokens of a context.
    inflow: None without expert parallelism.
    """
    tokens = padded_rows(max_tokens, LARGEST_PAD)
    itemsize = dtype.itemsize
    # 3 * itemsize: the residual stream, the normed stream, and a block's output.
    # 3 * FP32: the norm's copies of its input, its square, and its result.
    stream = tokens * spec.hidden_size * (3 * itemsize + 3 * FP32)
    if spec.num_streams > 1:
        # The other streams, before and after a block.
        others = (spec.num_streams - 1) * spec.hidden_size
        stream += tokens * 2 * others * itemsize
    if spec.connections:
        # The temporaries of a connection, and streams that are not copies of the embedding.
        stream += max(
            connection.workspace(spec.hidden_size, tokens, itemsize)
            for connection in set(spec.connections)
        )
    if spec.draft_layers:
        # The model's hidden states and the auxiliary ones, twice (without and with padding), and
        # the two inputs of the merge.
        num_hidden_states = 1 + len(spec.aux_hidden_layers) * spec.num_streams
        stream += tokens * spec.hidden_size * (2 * num_hidden_states + 2) * itemsize
    largest_block = max(
        max(
            mixer_workspace(
                layer.mixer,
                width=spec.hidden_size,
                tokens=tokens,
                max_len=max_len,
                itemsize=itemsize,
                tp_size=ranks,
            ),
            feed_forward_workspace(
                layer.feed_forward,
                width=spec.hidden_size,
                tokens=tokens,
                itemsize=itemsize,
                tp_size=ranks,
            )
            if layer.feed_forward
            else 0,
        )
        for layer, ranks in [
            *((layer, tp_size) for layer in set(spec.sharded_layers)),
            *((layer, 1) for layer in set(spec.draft_layers) if spec.replicate_drafter),
        ]
    )
    # Logits in the model's dtype and in fp32, and their hidden states.
    logits = max_rows * (spec.vocab_size * (itemsize + FP32) + spec.hidden_size * itemsize)
    logits += gathered_bytes(max_rows, spec.vocab_size, itemsize, tp_size)
    received = 0 if inflow is None else _received(spec, inflow, itemsize)
    return (
        stream + _metadata(spec, tokens, max_rows, max_len) + max(largest_block, logits) + received
    )


def _metadata(spec: ModelSpec, tokens: int, max_rows: int, max_len: int) -> int:
    """Return the bytes of attention metadata: cache rows of each query block, and rotary angles."""
    query_blocks = min(tokens, max_rows + tokens // QUERY_BLOCK)
    if spec.diffusion is not None:  # each query is a row (ops/block_attention.py)
        query_blocks = tokens
    attending = (
        layer.mixer for layer in spec.cached_layers if layer.mixer.head_shape(1) is not None
    )
    angles = max((tensor.width for mixer in attending for tensor in mixer.cache(1)), default=0)
    # For each rule, an index per position of each query block. 6: temporary indices of one context.
    num_contexts = len(set(spec.kv_rules)) * query_blocks + 6
    rotary_bytes = 2 * tokens * angles * FP32  # cosines and sines
    return INT64 * padded_context(max_len) * num_contexts + rotary_bytes


def _received(spec: ModelSpec, inflow: Inflow, itemsize: int) -> int:
    """Return the bytes of expert parallelism.

    They are those of received rows and their results, which the transport keeps; of the activations
    of one expert; and of experts that are being moved to this rank. Only one micro-batch computes
    at a time. In the worst case, one expert gets every token.
    """
    width = spec.hidden_size
    # 4 * INT64: the indices of a row in the sorts and sums of the transport.
    row_bytes = inflow.copies * width * itemsize + 4 * INT64
    tokens = padded_rows(inflow.rows // spec.experts_per_token, LARGEST_PAD)
    # 4 * expert_size: gate and up, their activation, and a temporary one. 2 * width: input, result.
    activation_bytes = tokens * (4 * spec.expert_size + 2 * width) * itemsize
    moving_bytes = inflow.moving * spec.expert_weights * itemsize
    return inflow.ubatches * inflow.rows * row_bytes + activation_bytes + moving_bytes
