"""Kolibri 1: norms before and after each block, and a router that chooses by logits with a bias per
expert, and weighs by sigmoids. Most layers have a sliding window; the others have no position
encoding.

Source: huggingface.co/Aleph-Alpha/Kolibri-1.
"""

from dataclasses import replace

from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import MoE, SharedExpert
from moeserve.blocks.weights import Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _mixers(config: Fields) -> list[Attention]:
    """Return the mixer of each layer."""
    kinds = family.layer_types(config, default=family.alternating(config, every=5))
    full = family.attention(config, qk_norm="head")
    window = family.sliding_window(config)
    if window is None:
        if "sliding_attention" in kinds:
            raise config.error("sliding_window", "sliding layers need a number of tokens")
        return [full] * len(kinds)
    sliding = replace(full, rule=KVRule(window=window))
    full = family.without_rope(full)
    return [sliding if kind == "sliding_attention" else full for kind in kinds]


def _experts(config: Fields) -> MoE:
    router = RouterRule(
        score="sigmoid_selected",
        bias=True,
        renormalize=config.boolean("norm_topk_prob"),
        fp32=True,
    )
    size = config.integer("shared_expert_intermediate_size", 1, family.MAX_WIDTH)
    shared = SharedExpert(size=size, name="mlp.shared_experts")
    return family.moe(config, router=router, shared=shared)


def _spec_fields(config: Fields) -> family.SpecFields:
    mixers = _mixers(config)
    norms = {"attn_post_norm": True, "mlp_post_norm": True}
    return {"layers": family.layers(config, mixers, _experts(config), **norms)}


FAMILY = family.Family(
    architecture="Kolibri1ForCausalLM",
    model_type="kolibri1",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=128000,
        hidden=2560,
        intermediate=0,
        layers=50,
        heads=48,
        kv_heads=4,
        positions=262144,
        experts=384,
        top_k=6,
        expert_size=512,
    )
    | {
        "head_dim": 128,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 512,
        "sliding_window": 513,
    },
    names=Names(
        spelled={
            "attn_post_norm.weight": ("post_attn_norm.weight",),
            "mlp_post_norm.weight": ("post_ffn_norm.weight",),
            "mlp.gate.e_score_correction_bias": ("moe.router.expert_bias",),
        }
    ),
)
