"""OLMoE (OLMoE-1B-7B): queries and keys are normalised over all heads together; then q, k and v may be clipped.

Source: arXiv 2409.02060.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _fields(config: Fields, num_layers: int) -> family.SpecFields:
    return {
        **family.every_layer_moe(config, num_layers),
        **family.no_window(config, num_layers),
        **family.attention_bias(config),
        "clip_qkv": config.optional_number("clip_qkv", 0, family.MAX_MULTIPLIER),
        "qk_norm": "full",
        "router": RouterRule(renormalize=config.boolean("norm_topk_prob")),
    }


FAMILY = family.Family(
    "OlmoeForCausalLM",
    "olmoe",
    _fields,
    family.sizes(50304, 2048, 2048, 16, 16, None, 4096)
    | {
        "clip_qkv": None,
        "eos_token_id": 50279,
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
    },
)
