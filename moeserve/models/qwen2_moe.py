"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biased q, k and v, top-k weights as the softmax gave them, and a
shared expert for every token behind a sigmoid gate. Some layers may be dense.

Source: arXiv 2407.10671.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _fields(config: Fields, num_layers: int) -> family.SpecFields:
    return {
        **family.some_layers_moe(config, num_layers),
        **family.window_per_layer(config, num_layers, lambda layer, limit: layer % 2 == 0 and layer < limit),
        "qkv_bias": config.boolean("qkv_bias"),
        "shared_expert_size": config.integer("shared_expert_intermediate_size", 1, family.MAX_WIDTH),
        "router": RouterRule(renormalize=config.boolean("norm_topk_prob")),
    }


FAMILY = family.Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    _fields,
    family.sizes(151936, 2048, 5632, 24, 16, 16, 32768)
    | family.QWEN_WINDOWS
    | {
        "decoder_sparse_step": 1,
        "layer_types": None,
        "max_window_layers": 28,
        "mlp_only_layers": None,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
        "shared_expert_intermediate_size": 5632,
    },
)
