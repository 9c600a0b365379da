"""Step-3.5 and the text model of Step-3.7: sliding-window layers have more heads than others,
attention has a sigmoid gate per head, norm weights are stored minus 1, and activations of some
layers are clamped.

Source: huggingface.co/stepfun-ai/Step-3.5-Flash.
"""

from dataclasses import replace
from typing import Any

from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import Dense, MoE, SharedExpert
from moeserve.blocks.weights import ExpertNames, Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.spec import NormSpec
from moeserve.ops.rules import Activation, RouterRule


def _spec_fields(config: Fields) -> family.SpecFields:
    required: dict[str, Any] = {
        "moe_router_activation": "sigmoid",
        "use_moe_router_bias": True,
        "gating": True,
        "norm_expert_weight": True,
        "zero_centered": True,
        "use_qk_norm": True,
        "use_head_wise_attn_gate": True,
        "sink": False,
        "use_moe": True,
        "use_rope_layers": [],
        "yarn_only_types": ["full_attention"],
    }
    config.only(**required)
    mtp = family.mtp_layers(config)
    known_types = ("full_attention", "sliding_attention")
    count = family.num_layers(config)
    # These lists may have further entries, for layers of multi-token prediction.
    keys_per_layer = (
        "layer_types",
        "rope_theta",
        "partial_rotary_factors",
        "swiglu_limits",
        "swiglu_limits_shared",
    )
    decoder_values = {
        key: value[:count]
        for key in keys_per_layer
        if isinstance(value := config.values.get(key), list)
    }
    decoder_config = replace(config, values={**config.values, **decoder_values})
    types = family.layer_types(
        decoder_config, known=known_types, default=["full_attention"] * count
    )
    mixers = {kind: _attention(decoder_config, kind, types) for kind in dict.fromkeys(types)}
    return {
        "layers": family.layers(
            config, [mixers[kind] for kind in types], _feed_forward_blocks(decoder_config, count)
        ),
        "num_mtp_layers": mtp,
        "norm": NormSpec(shift=family.norm_shift(config)),
    }


def _attention(config: Fields, kind: str, types: list[str]) -> Attention:
    """Read the attention of layers of one type. Keys with a list must have one value per type."""
    first = types.index(kind)
    values = dict(config.values)
    for key, hub_key in (
        ("rope_theta", "rope_theta"),
        ("partial_rotary_factor", "partial_rotary_factors"),
    ):
        if isinstance(per_layer := values.get(hub_key), list):
            if len(per_layer) != len(types) or any(
                value != per_layer[first]
                for value, layer_type in zip(per_layer, types, strict=True)
                if layer_type == kind
            ):
                raise config.error(
                    hub_key,
                    f"it must list a number for each of {len(types)} layers, the same for all "
                    "layers of a type",
                )
            values[key] = per_layer[first]
    if kind == "sliding_attention":
        other = config.section("attention_other_setting")
        heads = values.get("num_sliding_attention_heads") or other.get("num_attention_heads")
        values["num_attention_heads"] = heads or values["num_attention_heads"]
        if config.values.get("yarn_only_types"):
            values.pop("rope_scaling", None)
    type_config = replace(config, values=values)
    rule = KVRule(
        window=type_config.integer("sliding_window", 1, family.MAX_POSITION)
        if kind == "sliding_attention"
        else None
    )
    width = type_config.optional_number("query_pre_attn_scalar", 0, 1e6)
    return family.attention(
        type_config,
        layer_type=kind,
        rope={"partial": True},
        rule=rule,
        qk_norm="head",
        gate="head",
        scale=None if width in (None, type_config.raw("head_dim")) else width**-0.5,
        **family.attention_bias(type_config),
    )


def _feed_forward_blocks(config: Fields, count: int) -> list[Dense | MoE]:
    scale = config.number("moe_router_scaling_factor", 0, family.MAX_MULTIPLIER)
    fp32 = config.boolean("need_fp32_gate")
    router = RouterRule(score="sigmoid", bias=True, renormalize=True, scale=scale, fp32=fp32)
    routed_activations, shared_activations = (
        _activations(config, key, count) for key in ("swiglu_limits", "swiglu_limits_shared")
    )
    size = config.integer("share_expert_dim", 1, family.MAX_WIDTH)
    bias = config.boolean("mlp_bias")
    expert_layers = _layers_with_experts(config, count)
    return [
        family.moe(
            config,
            router=router,
            activation=routed_activations[i],
            shared=SharedExpert(
                size=size, bias=bias, activation=shared_activations[i], name="share_expert"
            ),
        )
        if i in expert_layers
        else replace(family.dense(config, bias=bias), activation=shared_activations[i])
        for i in range(count)
    ]


def _layers_with_experts(config: Fields, count: int) -> set[int]:
    """Read which layers have experts."""
    kinds = config.values.get("mlp_layer_types")
    layers = config.values.get("moe_layers_enum")
    if isinstance(kinds, list):
        return {i for i, kind in enumerate(kinds) if kind == "sparse"}
    if layers is None:
        return set(range(3, count))
    numbers = layers.split(",") if isinstance(layers, str) else layers
    try:
        return {int(number) for number in numbers}
    except (TypeError, ValueError):
        raise config.error("moe_layers_enum", "it must list the layers with experts") from None


def _activations(config: Fields, key: str, count: int) -> list[Activation]:
    """Read the activation of each layer. key: the list of limits."""
    limits = config.raw(key) or [None] * count
    if (
        not isinstance(limits, list)
        or len(limits) != count
        or any(isinstance(limit, str | list | dict) for limit in limits)
    ):
        raise config.error(key, f"it must list a limit or null for each of {count} layers")
    return [
        Activation(limit=limit, limit_after=True) if limit else Activation() for limit in limits
    ]


FAMILY = family.Family(
    architecture="Step3p5ForCausalLM",
    model_type="step3p5",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=128815,
        hidden=4096,
        intermediate=11264,
        layers=45,
        heads=64,
        kv_heads=8,
        positions=128000,
        experts=288,
        top_k=8,
        expert_size=1280,
    )
    | {
        "attention_other_setting": None,
        "head_dim": 128,
        "moe_router_scaling_factor": 1.0,
        "need_fp32_gate": False,
        "per_layer_config": None,
        "query_pre_attn_scalar": None,
        "rms_norm_eps": 1e-5,
        "share_expert_dim": 1280,
        "swiglu_limits": None,
        "swiglu_limits_shared": None,
    },
    names=Names(
        experts=(
            ExpertNames(
                gate="moe.gate_proj.weight", up="moe.up_proj.weight", down="moe.down_proj.weight"
            ),
        ),
        spelled={
            "mlp.gate.weight": ("moe.gate.weight",),
            "mlp.gate.e_score_correction_bias": ("moe.router_bias",),
            "self_attn.gate_proj.weight": ("self_attn.g_proj.weight",),
        },
        foreign=("vision_model.", "vit_large_projector."),
    ),
    aliases={
        "moe_num_experts": "num_experts",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
        "num_attention_groups": "num_key_value_heads",
    },
)
STEP_3_7 = FAMILY.inside(architecture="Step3p7ForConditionalGeneration", model_type="step3p7")
