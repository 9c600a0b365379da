"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): norms on each query and key head, softmax top-k weights renormalised.

Some layers may be dense (`mlp_only_layers`, `decoder_sparse_step`).

Source: arXiv 2505.09388.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _fields(config: Fields, num_layers: int) -> family.SpecFields:
    return {
        **family.some_layers_moe(config, num_layers),
        **family.same_window(config, num_layers, family.switched_window(config)),
        **family.attention_bias(config),
        "qk_norm": "head",
        "router": RouterRule(renormalize=config.boolean("norm_topk_prob")),
    }


FAMILY = family.Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _fields,
    family.sizes(151936, 2048, 6144, 24, 32, 4, 32768)
    | family.QWEN_WINDOWS
    | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
)
