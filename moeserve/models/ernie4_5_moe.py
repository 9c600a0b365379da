"""ERNIE-4.5 (21B-A3B, 300B-A47B): interleaved rotary embedding, shared experts, and a softmax
router that adds a bias per expert for the choice.

Source: ERNIE 4.5 Technical Report (Baidu, 2025).
"""

from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields) -> family.SpecFields:
    bias = config.boolean("use_bias")
    count = family.num_layers(config)
    mixer = family.attention(
        config,
        rule=family.no_window(config),
        rope={"interleaved": True},
        qkv_bias=bias,
        out_bias=bias,
    )
    router = RouterRule(
        bias=True, renormalize=True, floor=config.number("moe_norm_min", 0, 1.0), fp32=True
    )
    shared = family.shared_experts(config, key="moe_num_shared_experts", bias=bias)
    experts = family.moe(config, router=router, shared=shared)
    mlp = family.dense(config, bias=bias)
    first = config.integer("moe_layer_start_index", 0, count)
    last = config.integer("moe_layer_end_index", -1, count)
    sparse = range(first, count if last == -1 else last + 1)
    every = config.integer("moe_layer_interval", 1, family.MAX_LAYERS)
    blocks = [experts if i in sparse and (i + 1) % every == 0 else mlp for i in range(count)]
    return {"layers": family.layers(config, mixer, blocks), "head_bias": bias}


FAMILY = family.Family(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=103424,
        hidden=2560,
        intermediate=12288,
        layers=28,
        heads=20,
        kv_heads=4,
        positions=131072,
        experts=64,
        top_k=6,
        expert_size=1536,
    )
    | {
        "eos_token_id": 2,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_norm_min": 1e-12,
        "moe_num_shared_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    names=Names(
        spelled={"mlp.gate.e_score_correction_bias": ("mlp.moe_statics.e_score_correction_bias",)},
        foreign=("model.mtp_",),
        boxed=("mlp.moe_statics.e_score_correction_bias",),
    ),
    aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
)
