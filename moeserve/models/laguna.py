"""Laguna (XS.2): attention with a softplus gate per head or per element, in most layers with a
sliding window. The number of query heads may differ between layers. Router logits are soft-capped.

Source: huggingface.co/poolside/Laguna-XS.2.
"""

from dataclasses import replace

from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import SharedExpert
from moeserve.blocks.weights import FUSED, PER_EXPERT, Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(moe_apply_router_weight_on_input=False, swa_attention_sink_enabled=False)
    config.unsupported(
        "swa_rope_parameters", "write it to rope_parameters, under sliding_attention"
    )
    default = ["full_attention"] * family.num_layers(config)
    types = family.layer_types(config, default=default)
    mixers = [
        _attention(config, kind, heads)
        for kind, heads in zip(types, _heads_per_layer(config), strict=True)
    ]
    size = config.integer("shared_expert_intermediate_size", 1, family.MAX_WIDTH)
    experts = family.moe(
        config,
        router=RouterRule(
            score="sigmoid",
            bias=True,
            renormalize=True,
            scale=config.number("moe_routed_scaling_factor", 0, family.MAX_MULTIPLIER),
        ),
        router_cap=_router_cap(config),
        shared=SharedExpert(size=size),
    )
    blocks = family.listed_moe(config, experts, family.dense(config), num_first_dense=1)
    return {"layers": family.layers(config, mixers, blocks)}


def _attention(config: Fields, kind: str, heads: int) -> Attention:
    """Read the attention of a layer. kind: its type. heads: its number of query heads."""
    rule = KVRule()
    if kind == "sliding_attention":
        rule = KVRule(window=config.integer("sliding_window", 1, family.MAX_POSITION))
    return family.attention(
        replace(config, values={**config.values, "num_attention_heads": heads}),
        layer_type=kind,
        rope={"partial": True},
        rule=rule,
        qk_norm="head",
        gate=_gate(config),
        gate_act="softplus",
        **family.attention_bias(config),
    )


def _gate(config: Fields) -> str:
    """Read `gating`: true means a gate per head."""
    gates = {True: "head", "per-head": "head", "per-element": "element"}
    value = config.raw("gating")
    if not isinstance(value, bool | str) or value not in gates:
        raise config.error("gating", "supported: true, per-head, per-element")
    return gates[value]


def _heads_per_layer(config: Fields) -> tuple[int, ...]:
    """Read the number of query heads of each layer."""
    count = family.num_layers(config)
    key = "num_attention_heads_per_layer"
    heads = config.integers(key, 1, family.MAX_HEADS)
    if not heads:
        return (config.integer("num_attention_heads", 1, family.MAX_HEADS),) * count
    if len(heads) != count:
        raise config.error(key, f"it must list a number for each of {count} layers")
    return heads


def _router_cap(config: Fields) -> float:
    """Read the cap of router logits; 0 for none."""
    key = "moe_router_logit_softcapping"
    return config.number(key, 0, family.MAX_MULTIPLIER) if config.raw(key) else 0.0


FAMILY = family.Family(
    architecture="LagunaForCausalLM",
    model_type="laguna",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=100352,
        hidden=2048,
        intermediate=8192,
        layers=40,
        heads=48,
        kv_heads=8,
        positions=131072,
        experts=256,
        top_k=8,
        expert_size=512,
    )
    | {
        "gating": True,
        "head_dim": 128,
        "moe_routed_scaling_factor": 1.0,
        "moe_router_logit_softcapping": 0.0,
        "num_attention_heads_per_layer": None,
        "rope_parameters": {
            "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        },
        "shared_expert_intermediate_size": 512,
        "sliding_window": 512,
    },
    names=Names(
        experts=(PER_EXPERT, FUSED),
        spelled={
            "self_attn.gate_proj.weight": ("self_attn.g_proj.weight",),
            "mlp.gate.e_score_correction_bias": ("mlp.experts.e_score_correction_bias",),
            **{
                f"mlp.shared_expert.{name}_proj.weight": (
                    f"mlp.shared_expert.{name}_proj.weight",
                    f"mlp.shared_experts.{name}_proj.weight",
                )
                for name in ("gate", "up", "down")
            },
        },
    ),
)
