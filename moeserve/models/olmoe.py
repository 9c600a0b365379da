"""OLMoE (OLMoE-1B-7B): queries and keys are normalised over all heads together; then q, k and v may be clipped.

Source: arXiv 2409.02060.
"""

from __future__ import annotations

from typing import Any

from moeserve.loader.fields import Fields
from moeserve.models.config_parts import (
    MAX_MULTIPLIER,
    attention_bias,
    every_layer_moe,
    no_window,
    sizes,
    softmax_router,
)
from moeserve.models.family import Family


def _fields(config: Fields, num_layers: int) -> dict[str, Any]:
    return {
        **every_layer_moe(config, num_layers),
        **no_window(config, num_layers),
        **attention_bias(config),
        "clip_qkv": config.optional_number("clip_qkv", 0, MAX_MULTIPLIER),
        "qk_norm": "full",
        "router": softmax_router(config),
    }


FAMILY = Family(
    "OlmoeForCausalLM",
    "olmoe",
    _fields,
    sizes(50304, 2048, 2048, 16, 16, None, 4096)
    | {
        "clip_qkv": None,
        "eos_token_id": 50279,
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
    },
)
