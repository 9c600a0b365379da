"""Qwen2, Qwen2.5 and Qwen3 (dense): Llama with biases of queries, keys and values (Qwen2), or with
norms of each query and key head (Qwen3).

Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen2 with experts, whose softmax weights are not
renormalized, and a shared expert with a sigmoid gate. Some layers may be dense.

Source: arXiv 2407.10671, 2505.09388.
"""

from typing import Any

from moeserve.blocks.feed_forward import MoE, SharedExpert
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields, **options: Any) -> family.SpecFields:
    mixer = family.attention(config, **options)
    mixers = family.window_per_layer(
        config, mixer, lambda layer, max_window_layers: layer >= max_window_layers
    )
    return {"layers": family.layers(config, mixers, family.dense(config))}


def _qwen2_moe(config: Fields) -> family.SpecFields:
    mixer = family.attention(config, qkv_bias=config.boolean("qkv_bias"))
    mixers = family.window_per_layer(
        config, mixer, lambda layer, max_window_layers: layer % 2 == 0 and layer < max_window_layers
    )
    blocks = family.some_layers_moe(
        config, experts(config, renormalize=config.boolean("norm_topk_prob"))
    )
    return {"layers": family.layers(config, mixers, blocks)}


def experts(config: Fields, *, renormalize: bool) -> MoE:
    """Read the routed experts and the shared expert. renormalize: see `RouterRule`."""
    shared = SharedExpert(
        size=config.integer("shared_expert_intermediate_size", 1, family.MAX_WIDTH), gated=True
    )
    return family.moe(config, router=RouterRule(renormalize=renormalize), shared=shared)


_WINDOW_DEFAULTS = family.QWEN_WINDOWS | {"max_window_layers": 28}
_DEFAULTS = (
    family.sizes(
        vocab=151936,
        hidden=4096,
        intermediate=22016,
        layers=32,
        heads=32,
        kv_heads=32,
        positions=32768,
    )
    | _WINDOW_DEFAULTS
)
QWEN2 = family.Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    fields=lambda config: _spec_fields(config, qkv_bias=True),
    defaults=_DEFAULTS,
)
QWEN3 = family.Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    fields=lambda config: _spec_fields(config, qk_norm="head", **family.attention_bias(config)),
    defaults=_DEFAULTS | {"head_dim": 128},
)
QWEN2_MOE = family.Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    fields=_qwen2_moe,
    defaults=family.sizes(
        vocab=151936,
        hidden=2048,
        intermediate=5632,
        layers=24,
        heads=16,
        kv_heads=16,
        positions=32768,
        experts=60,
        top_k=4,
        expert_size=1408,
    )
    | _WINDOW_DEFAULTS
    | {"norm_topk_prob": False, "qkv_bias": True, "shared_expert_intermediate_size": 5632},
)
