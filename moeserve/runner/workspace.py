"""The work space of one step beside weights and KV blocks: an upper estimate from shapes alone."""

from __future__ import annotations

import torch

from moeserve.config import Config
from moeserve.loader.spec import ModelSpec
from moeserve.models import workspace as model_workspace
from moeserve.runner.limits import step_tokens
from moeserve.runner.outputs import PROMPT_ELEMENTS
from moeserve.runner.sampling.reference import CHUNK_ELEMENTS

_F32 = 4


def workspace_bytes(
    spec: ModelSpec, config: Config, dtype: torch.dtype, inflow: model_workspace.Inflow | None = None
) -> int:
    """Returns the bytes of a forward pass of a full step, all requests' logits in fp32 with one copy, and the
    sampler's chunks.

    inflow: what other ranks send here, None where experts compute for this rank alone.
    """
    tokens = step_tokens(config)
    rows = min(config.scheduler.max_num_seqs, tokens)
    max_len = config.model.max_model_len or spec.max_position
    forward = model_workspace.workspace_bytes(spec, tokens, rows, max_len, dtype, config.parallel.tp, inflow)
    logits = 2 * max(rows * spec.vocab_size, PROMPT_ELEMENTS)
    return forward + _F32 * (logits + 8 * 4 * CHUNK_ELEMENTS)
