"""Qwen3-VL-MoE, the text part: Qwen3-MoE with all experts in two transposed tensors per layer.

Source: arXiv 2511.21631.
"""

from __future__ import annotations

from moeserve.blocks.weights import ExpertNames, Names
from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(config, rule=family.no_window(config), qk_norm="head", **family.attention_bias(config))
    experts = family.moe(config, router=RouterRule(renormalize=True))
    return {"layers": family.layers(config, mixer, family.some_layers_moe(config, experts))}


FAMILY = family.Family(
    "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_moe",
    _fields,
    family.sizes(151936, 2048, 5632, 24, 16, 16, 128000, experts=60, top_k=4, expert_size=1408)
    | {"rope_theta": 500_000.0},
    Names(
        "model.language_model.",
        experts=(ExpertNames(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", transposed=True),),
        foreign=("model.visual.",),
    ),
    text="text_config",
)
