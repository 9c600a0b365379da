"""Hy3: Qwen3's attention, a dense first layer, and a sigmoid router.

Source: huggingface.co/tencent/Hy3-preview.
"""

from dataclasses import replace

from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import family


def _spec_fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(
        config, rule=family.no_window(config), qk_norm="head", **family.attention_bias(config)
    )
    router = replace(
        family.SIGMOID_ROUTER,
        scale=config.number("router_scaling_factor", 0, family.MAX_MULTIPLIER),
    )
    bias = config.boolean("mlp_bias")
    shared = family.shared_experts(
        config, key="num_shared_experts", name="mlp.shared_mlp", bias=bias
    )
    experts = family.moe(config, router=router, shared=shared)
    blocks = family.listed_moe(config, experts, family.dense(config, bias=bias), num_first_dense=1)
    return {
        "layers": family.layers(config, mixer, blocks),
        "num_mtp_layers": family.mtp_layers(config),
    }


FAMILY = family.Family(
    architecture="HYV3ForCausalLM",
    model_type="hy_v3",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=120832,
        hidden=4096,
        intermediate=13312,
        layers=80,
        heads=64,
        kv_heads=8,
        positions=131072,
        experts=192,
        top_k=8,
        expert_size=1536,
    )
    | {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "router_scaling_factor": 2.826,
    },
    names=Names(
        spelled={
            "mlp.gate.weight": ("mlp.router.gate.weight",),
            "mlp.gate.e_score_correction_bias": ("mlp.expert_bias",),
        }
    ),
)
