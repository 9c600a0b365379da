"""Beam: some layers have a sliding window and a rotary embedding, the others full attention without
position encoding, whose queries are scaled by position. Attention is gated, inputs and outputs of
blocks are normed, and the router uses groups of experts.

After n additions, the published residual stream is h_n = x_n / sqrt(n) + h_(n-1) sqrt((n - 1) / n),
with the embedding as h_1. Then sqrt(n) h_n is the plain sum of the blocks' outputs, which is the
residual stream here. The norm of h_n is the norm of the sum with n times the epsilon.

Source: huggingface.co/reflection/Beam-1.0-501B-A23B.
"""

from dataclasses import replace

from moeserve.blocks.attention import Attention
from moeserve.blocks.mixer import QueryScale
from moeserve.blocks.weights import Names
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.spec import NormSpec

_QUERY_SCALE = QueryScale(slope=0.1, every=2048, first=1, form="power")
_SLIDING = "sliding_attention"


def _spec_fields(config: Fields) -> family.SpecFields:
    count = family.num_layers(config)
    default = [*family.alternating(config, every=6)[:-1], "full_attention"]
    types = family.layer_types(config, default=default)
    mixers = {kind: _attention(config, kind) for kind in dict.fromkeys(types)}
    experts = family.moe(config, router=family.deepseek_router(config))
    blocks = family.listed_moe(config, experts, family.dense(config), num_first_dense=min(3, count))
    layers = family.layers(
        config,
        [mixers[kind] for kind in types],
        blocks,
        attn_post_norm=True,
        mlp_post_norm=True,
    )
    return {
        "layers": tuple(
            replace(layer, eps_factors=(2.0 * i + 1, 2.0 * i + 2)) for i, layer in enumerate(layers)
        ),
        "norm": NormSpec(last_eps_factor=2.0 * count + 1),
        "logits_cap": config.optional_number("final_logit_softcapping", 0, 1e6) or 0.0,
    }


def _attention(config: Fields, kind: str) -> Attention:
    """Read the attention of layers of one type."""
    rule = FULL
    if kind == _SLIDING:
        rule = KVRule(window=config.integer("sliding_window", 1, family.MAX_POSITION))
    sections = config.section("rope_parameters")
    if kind not in sections:
        raise config.error("rope_parameters", f"it must have an object or null for {kind}")
    rope = sections[kind]
    mixer = family.attention(
        replace(config, values={**config.values, "rope_parameters": {} if rope is None else rope}),
        rule=rule,
        qk_norm="head",
        gate="element",
        gate_bias=True,
        **family.attention_bias(config),
    )
    if rope is not None:
        return mixer
    return replace(family.without_rope(mixer), query_scale=_QUERY_SCALE)


FAMILY = family.Family(
    architecture="BeamForCausalLM",
    model_type="beam",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=151936,
        hidden=5120,
        intermediate=20480,
        layers=52,
        heads=48,
        kv_heads=8,
        positions=8192,
        experts=256,
        top_k=8,
        expert_size=2560,
    )
    | {
        "final_logit_softcapping": 30.0,
        "head_dim": 128,
        "n_group": 8,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": None,
        },
        "routed_scaling_factor": 2.5,
        "sliding_window": 512,
        "topk_group": 4,
    },
    names=Names(
        spelled={
            "attn_post_norm.weight": ("post_attention_layernorm.weight",),
            "post_attention_layernorm.weight": ("pre_feedforward_layernorm.weight",),
            "mlp_post_norm.weight": ("post_feedforward_layernorm.weight",),
        }
    ),
)
