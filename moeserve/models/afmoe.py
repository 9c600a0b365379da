"""AFMoE (Trinity Nano, Mini, Large): three of four layers have a sliding window and a rotary
embedding; the fourth has full attention without position encoding. Attention is gated, inputs and
outputs of blocks are normed, and the router uses sigmoid scores.

Source: arXiv 2602.17004.
"""

from dataclasses import replace

from moeserve.blocks.weights import Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1)
    sliding = family.attention(
        config,
        rule=KVRule(window=config.integer("sliding_window", 1, family.MAX_POSITION)),
        qk_norm="head",
        gate="element",
        **family.attention_bias(config),
    )
    full = replace(sliding, rope=None, rule=KVRule())
    default = family.alternating(
        config, every=config.integer("global_attn_every_n_layers", 1, family.MAX_LAYERS)
    )
    mixers = [
        sliding if kind == "sliding_attention" else full
        for kind in family.layer_types(config, default=default)
    ]
    router = replace(
        family.SIGMOID_ROUTER,
        scale=config.number("route_scale", 0, family.MAX_MULTIPLIER),
        fp32=False,
    )
    experts = family.moe(
        config, router=router, shared=family.shared_experts(config, key="num_shared_experts")
    )
    blocks = family.first_dense(config, experts, family.dense(config), key="num_dense_layers")
    scale = (
        config.integer("hidden_size", 1, family.MAX_WIDTH) ** 0.5
        if config.boolean("mup_enabled")
        else 1.0
    )
    layers = family.layers(config, mixers, blocks, attn_post_norm=True, mlp_post_norm=True)
    return {"layers": layers, "embedding_scale": scale}


FAMILY = family.Family(
    architecture="AfmoeForCausalLM",
    model_type="afmoe",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=200192,
        hidden=2048,
        intermediate=6144,
        layers=32,
        heads=16,
        kv_heads=None,
        positions=16384,
        experts=64,
        top_k=6,
        expert_size=1408,
    )
    | {
        "global_attn_every_n_layers": 4,
        "head_dim": 128,
        "mup_enabled": False,
        "num_dense_layers": 1,
        "num_shared_experts": 2,
        "rms_norm_eps": 1e-5,
        "route_scale": 1.0,
        "sliding_window": 1024,
    },
    names=Names(
        spelled={
            "attn_post_norm.weight": ("post_attention_layernorm.weight",),
            "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight",),
            "mlp_post_norm.weight": ("post_mlp_layernorm.weight",),
            "mlp.gate.weight": ("mlp.router.gate.weight",),
            "mlp.gate.e_score_correction_bias": ("mlp.expert_bias",),
        }
    ),
)
