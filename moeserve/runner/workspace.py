"""Work space of one step beside weights and KV blocks, from shapes alone: an upper estimate, no measurement."""

from __future__ import annotations

from moeserve.config import Config
from moeserve.loader.spec import ModelSpec
from moeserve.runner.limits import step_tokens
from moeserve.runner.outputs import PROMPT_ELEMENTS
from moeserve.runner.sampler import CHUNK_ELEMENTS

_F32 = 4


def workspace_bytes(spec: ModelSpec, config: Config) -> int:
    """Bytes: one layer's activations of a full step in fp32, the logits of every request, and the sampler's chunks.

    Layers run one after the other, so one layer's activations are the peak.
    """
    tokens = step_tokens(config)
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    attention = 4 * heads + 2 * spec.hidden_size
    dense = 3 * max(spec.intermediate_size, spec.shared_expert_size)
    # Every (token, chosen expert) pair: its input, its gate and up, its output.
    routed = spec.experts_per_token * (2 * spec.hidden_size + 3 * spec.expert_size) + 3 * spec.num_experts
    per_token = 4 * spec.hidden_size + max(attention, dense + routed)
    logits = 2 * max(min(config.scheduler.max_num_seqs, tokens) * spec.vocab_size, PROMPT_ELEMENTS)
    return _F32 * (tokens * per_token + logits + 8 * 4 * CHUNK_ELEMENTS)
