"""GraniteMoE (granite-3.0-1b-a400m, 3b-a800m): softmax over the chosen experts only, experts fused per layer, and
multipliers on embeddings, attention scores, residual branches and logits.

Source: arXiv 2408.13359.
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
        "attention_scale": config.number("attention_multiplier", 0, family.MAX_MULTIPLIER),
        "embedding_scale": config.number("embedding_multiplier", 0, family.MAX_MULTIPLIER),
        "residual_scale": config.number("residual_multiplier", 0, family.MAX_MULTIPLIER),
        "logits_divisor": config.number("logits_scaling", 0, family.MAX_MULTIPLIER),
        "router": RouterRule(score="softmax_selected"),
    }


FAMILY = family.Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    _fields,
    family.sizes(32000, 4096, 11008, 32, 32, None, 2048)
    | {
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "eos_token_id": 2,
        "logits_scaling": 1.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "residual_multiplier": 1.0,
    },
    family.Names(
        experts=(
            family.ExpertNames(
                gate_up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"
            ),
            family.ExpertNames(
                gate_up="block_sparse_moe.experts.gate_up_proj", down="block_sparse_moe.experts.down_proj"
            ),
        ),
        router=("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    ),
)
