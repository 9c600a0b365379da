"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): norms on each query and key head, softmax top-k weights renormalised.

Some layers may be dense (`mlp_only_layers`, `decoder_sparse_step`).

Source: arXiv 2505.09388.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _fields(config: Fields) -> family.SpecFields:
    rule = family.same_window(config, family.switched_window(config))
    mixer = family.attention(config, rule=rule, qk_norm="head", **family.attention_bias(config))
    experts = family.moe(config, router=RouterRule(renormalize=config.boolean("norm_topk_prob")))
    return {"layers": family.layers(config, mixer, family.some_layers_moe(config, experts))}


FAMILY = family.Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _fields,
    family.sizes(151936, 2048, 6144, 24, 32, 4, 32768, experts=128, top_k=8, expert_size=768)
    | family.QWEN_WINDOWS
    | {"norm_topk_prob": False},
)
