"""Mellum 2: Qwen3-MoE with sliding-window layers, whose rotary embedding has a smaller base.

Source: huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base.
"""

from moeserve.blocks.weights import Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule

_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _spec_fields(config: Fields) -> family.SpecFields:
    types = family.layer_types(config, default=["full_attention"] * family.num_layers(config))
    window = family.sliding_window(config)
    mixers = {
        kind: family.attention(
            config,
            layer_type=kind,
            qk_norm="head",
            rule=KVRule(window=window if kind == "sliding_attention" else None),
            **family.attention_bias(config),
        )
        for kind in dict.fromkeys(types)
    }
    experts = family.moe(config, router=RouterRule(renormalize=config.boolean("norm_topk_prob")))
    blocks = family.listed_moe(config, experts, family.dense(config), num_first_dense=0)
    return {"layers": family.layers(config, [mixers[kind] for kind in types], blocks)}


FAMILY = family.Family(
    architecture="MellumForCausalLM",
    model_type="mellum",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=98304,
        hidden=2304,
        intermediate=7168,
        layers=28,
        heads=32,
        kv_heads=4,
        positions=131072,
        experts=64,
        top_k=8,
        expert_size=896,
    )
    | {"head_dim": 128, "rope_parameters": _ROPE, "sliding_window": 1024},
    names=Names(foreign=("mtp.",)),
)
