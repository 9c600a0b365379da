"""FlexOlmo: OLMoE whose blocks are normalised behind, not before.

Source: arXiv 2507.07024.
"""

from __future__ import annotations

from moeserve.blocks.weights import Names
from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(config, rule=family.no_window(config), qk_norm="full", **family.attention_bias(config))
    router = RouterRule(renormalize=config.boolean("norm_topk_prob"))
    experts = family.moe(config, "intermediate_size", router=router)
    layers = family.layers(config, mixer, experts, pre_norm=False, attn_post_norm=True, mlp_post_norm=True)
    return {"layers": layers}


FAMILY = family.Family(
    "FlexOlmoForCausalLM",
    "flex_olmo",
    _fields,
    family.sizes(100352, 4096, 11008, 32, 32, None, 4096, experts=7, top_k=5)
    | {"eos_token_id": 100257, "norm_topk_prob": False, "rope_theta": 500_000.0},
    Names(
        spelled={
            "attn_post_norm.weight": ("post_attention_layernorm.weight",),
            "mlp_post_norm.weight": ("post_feedforward_layernorm.weight",),
        }
    ),
)
