"""GraniteMoE (granite-3.0-1b-a400m, 3b-a800m): softmax over the chosen experts only, all experts of
a layer in one tensor, and multipliers of embeddings, attention scores, block outputs and logits.

- GraniteMoeShared: with a shared expert (the attention-only form of the granite-4.0 tiny previews).
- GraniteMoeSWA (granite-swash-3b-a600m): most layers have a sliding window. All have attention
  sinks, and a base of the rotary embedding of their own, or no position encoding.
- Granite 4 (granite-4.0-h-tiny, h-small): most layers are Mamba-2, the others attention without
  position encoding. In models without experts, the shared expert is the whole feed-forward block.

Source: arXiv 2408.13359, huggingface.co/ibm-granite.
"""

import math
from dataclasses import replace
from typing import Any

from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import Dense, MoE, SharedExpert
from moeserve.blocks.mamba2 import Mamba2
from moeserve.blocks.weights import ExpertNames, Names
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule

MAX_THETA = 1e12
KINDS = {  # name in releases or in transformers 5 -> name in transformers 5
    "mamba": "linear_attention",
    "linear_attention": "linear_attention",
    "attention": "full_attention",
    "full_attention": "full_attention",
}


def _granite_moe(config: Fields) -> family.SpecFields:
    return _spec_fields(config, _attention(config, family.no_window(config)), _experts(config))


def _spec_fields(
    config: Fields, mixers: Attention | list[Attention], experts: MoE
) -> family.SpecFields:
    return {"layers": family.layers(config, mixers, experts), **_multipliers(config)}


def _attention(config: Fields, rule: KVRule, **options: Any) -> Attention:
    scale = config.number("attention_multiplier", 0, family.MAX_MULTIPLIER)
    bias = family.attention_bias(config)
    return family.attention(config, rule=rule, scale=scale, **bias, **options)


def _experts(config: Fields, shared: SharedExpert | None = None) -> MoE:
    router = RouterRule(score="softmax_selected")
    return family.moe(config, size_key="intermediate_size", router=router, shared=shared)


def _with_shared_expert(config: Fields) -> MoE:
    if config.raw("shared_intermediate_size") == 0:
        return _experts(config)
    size = config.integer("shared_intermediate_size", 1, family.MAX_WIDTH)
    return _experts(config, SharedExpert(size=size, name="shared_mlp"))


def _granite_moe_shared(config: Fields) -> family.SpecFields:
    mixer = _attention(config, family.no_window(config))
    return _spec_fields(config, mixer, _with_shared_expert(config))


def _granite_moe_swa(config: Fields) -> family.SpecFields:
    default = [
        "sliding_attention" if i % 4 else "full_attention" for i in range(family.num_layers(config))
    ]
    kinds = family.layer_types(config, default=default)
    window = family.sliding_window(config)
    if window is None and "sliding_attention" in kinds:
        raise config.error("sliding_window", "sliding layers need a number of tokens")
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    full = _attention(config, FULL, sinks=True)
    mixers = [
        _with_theta(replace(full, rule=KVRule(window=window)), theta)
        for window, theta in zip(windows, _thetas(config), strict=True)
    ]
    return _spec_fields(config, mixers, _with_shared_expert(config))


def _thetas(config: Fields) -> list[float | None]:
    """Read the base of each layer's rotary embedding: 0 for none, None for the model's."""
    count = family.num_layers(config)
    thetas = config.raw("layer_rope_theta")
    if thetas is None:
        return [None] * count
    if (
        not isinstance(thetas, list)
        or len(thetas) != count
        or any(type(theta) not in (int, float) for theta in thetas)
        or any(theta != 0 and not 1 <= theta <= MAX_THETA for theta in thetas)
    ):
        raise config.error(
            "layer_rope_theta", f"it must list 0 or a number from 1 to {MAX_THETA:g} per layer"
        )
    return thetas


def _with_theta(attention: Attention, theta: float | None) -> Attention:
    if theta == 0:
        return family.without_rope(attention)
    if theta is None or attention.rope is None:
        return attention
    return replace(attention, rope=replace(attention.rope, theta=float(theta)))


def _multipliers(config: Fields) -> family.SpecFields:
    return {
        "embedding_scale": config.number("embedding_multiplier", 0, family.MAX_MULTIPLIER),
        "residual_scale": config.number("residual_multiplier", 0, family.MAX_MULTIPLIER),
        "logits_divisor": config.number("logits_scaling", 0, family.MAX_MULTIPLIER),
    }


def _granite_4(config: Fields) -> family.SpecFields:
    full = _attention(config, FULL)
    if config.raw("position_embedding_type") != "rope":
        full = family.without_rope(full)
    default = ["linear_attention"] * family.num_layers(config)
    kinds = [
        KINDS[kind] for kind in family.layer_types(config, known=tuple(KINDS), default=default)
    ]
    mamba = _mamba(config)
    mixers = [full if kind == "full_attention" else mamba for kind in kinds]
    return {
        **_multipliers(config),
        "layers": family.layers(config, mixers, _feed_forward(config)),
    }


def _feed_forward(config: Fields) -> Dense | MoE:
    size = config.integer("shared_intermediate_size", 1, family.MAX_WIDTH)
    if config.values.get("num_local_experts") == 0:
        return Dense(size=size, name="shared_mlp")
    return _experts(config, SharedExpert(size=size, name="shared_mlp"))


def _mamba(config: Fields) -> Mamba2:
    config.only(mamba_conv_bias=True, mamba_proj_bias=False)
    heads = config.integer("mamba_n_heads", 1, family.MAX_HEADS)
    expand = config.integer("mamba_expand", 1, family.MAX_WIDTH)
    inner = expand * config.integer("hidden_size", 1, family.MAX_WIDTH)
    if inner % heads:
        raise config.error("mamba_n_heads", f"it must divide mamba_expand * hidden_size ({inner})")
    if config.raw("mamba_d_head") not in ("auto", inner // heads):
        raise config.error(
            "mamba_d_head", f"with these mamba_n_heads and mamba_expand it is {inner // heads}"
        )
    groups = config.integer("mamba_n_groups", 1, heads)
    if heads % groups:
        raise config.error("mamba_n_groups", f"it must divide mamba_n_heads ({heads})")
    return Mamba2(
        num_heads=heads,
        num_groups=groups,
        state_dim=config.integer("mamba_d_state", 1, family.MAX_WIDTH),
        head_dim=inner // heads,
        conv=config.integer("mamba_d_conv", 2, family.MAX_CONV),
        time_limit=time_limit(config),
        decay_tensor=family.decay_tensor(config),
    )


def time_limit(config: Fields) -> tuple[float, float]:
    """Read `time_step_limit`, the least and the largest step."""
    value = config.raw("time_step_limit")
    numbers = []
    if isinstance(value, list):  # transformers 5 writes infinity as an object
        numbers = [math.inf if x == {"__float__": "Infinity"} else x for x in value]
    is_pair = [type(x) in (int, float) for x in numbers] == [True, True]
    if not is_pair or not 0 <= numbers[0] < numbers[1]:
        raise config.error(
            "time_step_limit", "it must be a list of two numbers, the least and the largest step"
        )
    return float(numbers[0]), float(numbers[1])


FAMILY = family.Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    fields=_granite_moe,
    defaults=family.sizes(
        vocab=32000,
        hidden=4096,
        intermediate=11008,
        layers=32,
        heads=32,
        kv_heads=None,
        positions=2048,
        experts=8,
        top_k=2,
    )
    | {
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "eos_token_id": 2,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
    names=Names(
        experts=(
            ExpertNames(
                gate_up="block_sparse_moe.input_linear.weight",
                down="block_sparse_moe.output_linear.weight",
            ),
            ExpertNames(
                gate_up="block_sparse_moe.experts.gate_up_proj",
                down="block_sparse_moe.experts.down_proj",
            ),
        ),
        spelled={
            "mlp.gate.weight": (
                "block_sparse_moe.router.layer.weight",
                "block_sparse_moe.router.weight",
            )
        },
    ),
)
SHARED = replace(
    FAMILY,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    fields=_granite_moe_shared,
    defaults=FAMILY.defaults | {"shared_intermediate_size": 0},
    names=replace(
        FAMILY.names,
        spelled={
            **FAMILY.names.spelled,
            "shared_mlp.gate_proj.weight": ("shared_mlp.input_linear.weight",),
            "shared_mlp.up_proj.weight": ("shared_mlp.input_linear.weight",),
            "shared_mlp.down_proj.weight": ("shared_mlp.output_linear.weight",),
        },
    ),
)
SWA = replace(
    SHARED,
    architecture="GraniteMoeSWAForCausalLM",
    model_type="granitemoe_swa",
    fields=_granite_moe_swa,
    defaults=SHARED.defaults | {"layer_rope_theta": None, "sliding_window": 128},
)
HYBRID = replace(
    SHARED,
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    fields=_granite_4,
    defaults=SHARED.defaults
    | {
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "position_embedding_type": None,
        "shared_intermediate_size": 1024,
        "time_step_limit": [0.0, math.inf],
    },
)
