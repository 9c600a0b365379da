"""OLMoE (OLMoE-1B-7B): queries and keys are normalised over all heads together; then q, k and v may be clipped.

Source: arXiv 2409.02060.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _fields(config: Fields) -> family.SpecFields:
    clip = config.optional_number("clip_qkv", 0, family.MAX_MULTIPLIER)
    mixer = family.attention(
        config, rule=family.no_window(config), qk_norm="full", clip=clip, **family.attention_bias(config)
    )
    router = RouterRule(renormalize=config.boolean("norm_topk_prob"))
    return {"layers": family.layers(config, mixer, family.moe(config, "intermediate_size", router=router))}


FAMILY = family.Family(
    "OlmoeForCausalLM",
    "olmoe",
    _fields,
    family.sizes(50304, 2048, 2048, 16, 16, None, 4096, experts=64, top_k=8)
    | {"clip_qkv": None, "eos_token_id": 50279, "norm_topk_prob": False, "rms_norm_eps": 1e-5},
)
