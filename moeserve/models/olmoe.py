"""OLMoE (OLMoE-1B-7B): queries and keys are normed over all heads together, and queries, keys and
values may be clipped. FlexOlmo: OLMoE whose blocks' outputs are normed instead of their inputs.

Source: arXiv 2409.02060, 2507.07024.
"""

from typing import Any

from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields, clip: float | None = None, **options: Any) -> family.SpecFields:
    rule = family.no_window(config)
    bias = family.attention_bias(config)
    mixer = family.attention(config, rule=rule, qk_norm="full", clip=clip, **bias)
    router = RouterRule(renormalize=config.boolean("norm_topk_prob"))
    experts = family.moe(config, size_key="intermediate_size", router=router)
    return {"layers": family.layers(config, mixer, experts, **options)}


OLMOE = family.Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    fields=lambda config: _spec_fields(
        config, config.optional_number("clip_qkv", 0, family.MAX_MULTIPLIER)
    ),
    defaults=family.sizes(
        vocab=50304,
        hidden=2048,
        intermediate=2048,
        layers=16,
        heads=16,
        kv_heads=None,
        positions=4096,
        experts=64,
        top_k=8,
    )
    | {"clip_qkv": None, "eos_token_id": 50279, "norm_topk_prob": False, "rms_norm_eps": 1e-5},
)
FLEX_OLMO = family.Family(
    architecture="FlexOlmoForCausalLM",
    model_type="flex_olmo",
    fields=lambda config: _spec_fields(
        config, pre_norm=False, attn_post_norm=True, mlp_post_norm=True
    ),
    defaults=family.sizes(
        vocab=100352,
        hidden=4096,
        intermediate=11008,
        layers=32,
        heads=32,
        kv_heads=None,
        positions=4096,
        experts=7,
        top_k=5,
    )
    | {"eos_token_id": 100257, "norm_topk_prob": False, "rope_theta": 500_000.0},
    names=Names(
        spelled={
            "attn_post_norm.weight": ("post_attention_layernorm.weight",),
            "mlp_post_norm.weight": ("post_feedforward_layernorm.weight",),
        }
    ),
)
