"""Work space of one step beside weights and KV blocks, from shapes alone: an upper estimate, no measurement."""

from __future__ import annotations

from moeserve.config import Config
from moeserve.loader.spec import ModelSpec
from moeserve.ops.attention import CONTEXT, SCORES
from moeserve.runner.limits import step_tokens
from moeserve.runner.outputs import PROMPT_ELEMENTS
from moeserve.runner.sampler import CHUNK_ELEMENTS

_F32 = 4


def workspace_bytes(spec: ModelSpec, config: Config) -> int:
    """Bytes: one layer's activations of a full step in fp32, attention's bounded scores and gathered context, the
    logits of every request, and the sampler's chunks.

    Layers run one after the other, so one layer's activations are the peak. Measured peaks of 2,048-token steps lie
    at 0.3 to 0.95 of it (contexts of 2,048 to 8,192; what the allocator keeps included).
    """
    tokens = step_tokens(config)
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    attention = 4 * heads + 2 * spec.hidden_size
    dense = 3 * max(spec.intermediate_size, spec.shared_expert_size)
    # Every (token, chosen expert) pair: its input, its gate and up, its output.
    routed = spec.experts_per_token * (2 * spec.hidden_size + 3 * spec.expert_size) + 3 * spec.num_experts
    per_token = 4 * spec.hidden_size + max(attention, dense + routed)
    logits = 2 * max(min(config.scheduler.max_num_seqs, tokens) * spec.vocab_size, PROMPT_ELEMENTS)
    blocks = 6 * (4 * SCORES + CONTEXT)  # scores, their softmax, tiles and products; keys, values and indices
    return _F32 * (tokens * per_token + blocks + logits + 8 * 4 * CHUNK_ELEMENTS)
