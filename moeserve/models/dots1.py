"""dots.llm1: Qwen3's attention and DeepSeek-V3's experts.

Source: arXiv 2506.05767.
"""

from dataclasses import replace

from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(moe_layer_freq=1)
    mixer = family.attention(config, qk_norm="head", **family.attention_bias(config))
    window = family.sliding_window(config)
    first = config.integer("max_window_layers", 0, 2**31) if window else 0
    default = [
        "sliding_attention" if window and i >= first else "full_attention"
        for i in range(family.num_layers(config))
    ]
    kinds = family.layer_types(config, default=default)
    mixers = [
        replace(mixer, rule=KVRule(window=window if kind == "sliding_attention" else None))
        for kind in kinds
    ]
    experts = family.moe(
        config, router=family.deepseek_router(config), shared=family.shared_experts(config)
    )
    return {
        "layers": family.layers(
            config, mixers, family.first_dense(config, experts, family.dense(config))
        )
    }


FAMILY = family.Family(
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=152064,
        hidden=4608,
        intermediate=10944,
        layers=62,
        heads=32,
        kv_heads=32,
        positions=2048,
        expert_size=1408,
    )
    | {
        "first_k_dense_replace": 0,
        "max_window_layers": 62,
        "n_shared_experts": None,
        "norm_topk_prob": False,
        "sliding_window": 4096,
    },
)
