"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biased q, k and v, top-k weights as the softmax gave them, and a
shared expert for every token behind a sigmoid gate. Some layers may be dense.

Source: arXiv 2407.10671.
"""

from moeserve.blocks.feed_forward import MoE, SharedExpert
from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(config, qkv_bias=config.boolean("qkv_bias"))
    mixers = family.window_per_layer(config, mixer, lambda layer, limit: layer % 2 == 0 and layer < limit)
    blocks = family.some_layers_moe(config, experts(config, renormalize=config.boolean("norm_topk_prob")))
    return {"layers": family.layers(config, mixers, blocks)}


def experts(config: Fields, *, renormalize: bool) -> MoE:
    """Reads the experts and the shared one. renormalize: see `RouterRule`."""
    shared = SharedExpert(size=config.integer("shared_expert_intermediate_size", 1, family.MAX_WIDTH), gated=True)
    return family.moe(config, router=RouterRule(renormalize=renormalize), shared=shared)


FAMILY = family.Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    _fields,
    family.sizes(151936, 2048, 5632, 24, 16, 16, 32768, experts=60, top_k=4, expert_size=1408)
    | family.QWEN_WINDOWS
    | {"max_window_layers": 28, "norm_topk_prob": False, "qkv_bias": True, "shared_expert_intermediate_size": 5632},
)
