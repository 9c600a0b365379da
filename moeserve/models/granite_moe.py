"""GraniteMoE (granite-3.0-1b-a400m, 3b-a800m): softmax over the chosen experts only, experts fused per layer, and
multipliers on embeddings, attention scores, residual branches and logits. GraniteMoeShared: with a shared expert
(granite-4.0 tiny previews' attention-only form).

Source: arXiv 2408.13359, huggingface.co/ibm-granite.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.blocks.feed_forward import SharedExpert
from moeserve.blocks.weights import ExpertNames, Names
from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _fields(config: Fields, shared: SharedExpert | None = None) -> family.SpecFields:
    scale = config.number("attention_multiplier", 0, family.MAX_MULTIPLIER)
    mixer = family.attention(config, rule=family.no_window(config), scale=scale, **family.attention_bias(config))
    experts = family.moe(config, "intermediate_size", router=RouterRule(score="softmax_selected"), shared=shared)
    return {"layers": family.layers(config, mixer, experts), **multipliers(config)}


def _shared_fields(config: Fields) -> family.SpecFields:
    if config.raw("shared_intermediate_size") == 0:
        return _fields(config)
    size = config.integer("shared_intermediate_size", 1, family.MAX_WIDTH)
    return _fields(config, SharedExpert(size=size, name="shared_mlp"))


def multipliers(config: Fields) -> family.SpecFields:
    """Reads what multiplies embeddings and residual branches, and what divides logits."""
    return {
        "embedding_scale": config.number("embedding_multiplier", 0, family.MAX_MULTIPLIER),
        "residual_scale": config.number("residual_multiplier", 0, family.MAX_MULTIPLIER),
        "logits_divisor": config.number("logits_scaling", 0, family.MAX_MULTIPLIER),
    }


FAMILY = family.Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    _fields,
    family.sizes(32000, 4096, 11008, 32, 32, None, 2048, experts=8, top_k=2)
    | {
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "eos_token_id": 2,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
    Names(
        experts=(
            ExpertNames(gate_up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"),
            ExpertNames(gate_up="block_sparse_moe.experts.gate_up_proj", down="block_sparse_moe.experts.down_proj"),
        ),
        spelled={"mlp.gate.weight": ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight")},
    ),
)
SHARED = replace(
    FAMILY,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    fields=_shared_fields,
    defaults=FAMILY.defaults | {"shared_intermediate_size": 0},
    names=replace(
        FAMILY.names,
        spelled={
            **FAMILY.names.spelled,
            "shared_mlp.gate_proj.weight": ("shared_mlp.input_linear.weight",),
            "shared_mlp.up_proj.weight": ("shared_mlp.input_linear.weight",),
            "shared_mlp.down_proj.weight": ("shared_mlp.output_linear.weight",),
        },
    ),
)
FAMILIES = (FAMILY, SHARED)
