"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): norms on each query and key head, softmax top-k weights renormalised.

Some layers may be dense (`mlp_only_layers`, `decoder_sparse_step`).

Source: arXiv 2505.09388.
"""

from __future__ import annotations

from typing import Any

from moeserve.loader.fields import Fields
from moeserve.models.config_parts import (
    QWEN_WINDOWS,
    attention_bias,
    same_window,
    sizes,
    softmax_router,
    some_layers_moe,
    switched_window,
)
from moeserve.models.family import Family


def _fields(config: Fields, num_layers: int) -> dict[str, Any]:
    return {
        **some_layers_moe(config, num_layers),
        **same_window(config, num_layers, switched_window(config)),
        **attention_bias(config),
        "qk_norm": "head",
        "router": softmax_router(config),
    }


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _fields,
    sizes(151936, 2048, 6144, 24, 32, 4, 32768)
    | QWEN_WINDOWS
    | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
)
