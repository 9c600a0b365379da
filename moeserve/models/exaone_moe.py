"""K-EXAONE: three of four layers have a sliding window and a rotary embedding; the fourth has full
attention without position encoding. Experts are those of DeepSeek-V3.

Source: arXiv 2601.01739.
"""

from dataclasses import replace

from moeserve.blocks.weights import Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family


def _spec_fields(config: Fields) -> family.SpecFields:
    window = family.sliding_window(config)
    mixer = family.attention(config, qk_norm="head")
    full = mixer if window is None else replace(mixer, rope=None)
    default = (
        family.alternating(
            config, every=config.integer("sliding_window_pattern", 1, family.MAX_LAYERS)
        )
        if window
        else ["full_attention"] * family.num_layers(config)
    )
    sliding = replace(mixer, rule=KVRule(window=window))
    mixers = [
        sliding if kind == "sliding_attention" else full
        for kind in family.layer_types(config, default=default)
    ]
    shared = family.shared_experts(config, key="num_shared_experts")
    experts = family.moe(config, router=family.deepseek_router(config), shared=shared)
    return {
        "layers": family.layers(
            config, mixers, family.listed_moe(config, experts, family.dense(config))
        )
    }


FAMILY = family.Family(
    architecture="ExaoneMoeForCausalLM",
    model_type="exaone_moe",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=102400,
        hidden=4096,
        intermediate=16384,
        layers=32,
        heads=32,
        kv_heads=32,
        positions=2048,
        experts=64,
        top_k=8,
        expert_size=1024,
    )
    | {
        "eos_token_id": 53,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    names=Names(
        spelled={"mlp.gate.e_score_correction_bias": ("mlp.e_score_correction_bias",)},
        foreign=("mtp.",),
    ),
)
