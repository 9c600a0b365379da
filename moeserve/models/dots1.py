"""dots.llm1: Qwen3's attention and DeepSeek-V3's experts.

Source: arXiv 2506.05767.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.models.spec import layer_specs


def _fields(config: Fields) -> family.SpecFields:
    config.only("moe_layer_freq", 1)
    mixer = family.attention(config, qk_norm="head", **family.attention_bias(config))
    window, first = config.optional_integer("sliding_window", 1, family.MAX_POSITION), config.raw("max_window_layers")
    usual = [
        "sliding_attention" if window and i >= first else "full_attention" for i in range(family.num_layers(config))
    ]
    kinds = family.layer_types(config, usual=usual)
    mixers = family.with_windows(mixer, [window if kind == "sliding_attention" else None for kind in kinds])
    experts = family.moe(config, router=family.deepseek_router(config), shared=family.shared_experts(config))
    return {"layers": layer_specs(mixers, family.first_dense(config, experts, family.dense(config)))}


FAMILY = family.Family(
    "Dots1ForCausalLM",
    "dots1",
    _fields,
    family.sizes(152064, 4608, 10944, 62, 32, 32, 2048, expert_size=1408)
    | {
        "first_k_dense_replace": 0,
        "max_window_layers": 62,
        "n_shared_experts": None,
        "norm_topk_prob": False,
        "sliding_window": 4096,
    },
)
