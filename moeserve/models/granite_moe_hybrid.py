"""Granite 4 (granite-4.0-h-tiny, h-small): most layers are Mamba-2, the others attention without rotation; experts of
GraniteMoE beside a shared one, which is the whole feed-forward block where there are no experts.

Source: huggingface.co/ibm-granite.
"""

from __future__ import annotations

import math
from dataclasses import replace

from moeserve.blocks.feed_forward import Dense, MoE, SharedExpert
from moeserve.blocks.mamba2 import Mamba2
from moeserve.loader.files import Fields
from moeserve.models import family, granite_moe
from moeserve.ops.rules import RouterRule

KINDS = {  # as releases and transformers 5 have them
    "mamba": "linear_attention",
    "linear_attention": "linear_attention",
    "attention": "full_attention",
    "full_attention": "full_attention",
}


def _fields(config: Fields) -> family.SpecFields:
    scale = config.number("attention_multiplier", 0, family.MAX_MULTIPLIER)
    full = family.attention(config, scale=scale, **family.attention_bias(config))
    if config.raw("position_embedding_type") != "rope":
        full = replace(full, rope=None)
    usual = ["linear_attention"] * family.num_layers(config)
    kinds = [KINDS[kind] for kind in family.layer_types(config, tuple(KINDS), usual=usual)]
    mamba = _mamba(config)
    mixers = [full if kind == "full_attention" else mamba for kind in kinds]
    return {
        **granite_moe.multipliers(config),
        "layers": family.layers(config, mixers, _feed_forward(config)),
    }


def _feed_forward(config: Fields) -> Dense | MoE:
    size = config.integer("shared_intermediate_size", 1, family.MAX_WIDTH)
    if config.values.get("num_local_experts") == 0:
        return Dense(size=size, name="shared_mlp")
    shared = SharedExpert(size=size, name="shared_mlp")
    return family.moe(config, "intermediate_size", router=RouterRule(score="softmax_selected"), shared=shared)


def _mamba(config: Fields) -> Mamba2:
    config.only(mamba_conv_bias=True, mamba_proj_bias=False)
    heads = config.integer("mamba_n_heads", 1, family.MAX_HEADS)
    inner = config.integer("mamba_expand", 1, family.MAX_WIDTH) * config.integer("hidden_size", 1, family.MAX_WIDTH)
    if inner % heads:
        raise config.error("mamba_n_heads", f"it must divide mamba_expand * hidden_size ({inner})")
    if config.raw("mamba_d_head") not in ("auto", inner // heads):
        raise config.error("mamba_d_head", f"mamba_n_heads and mamba_expand make it {inner // heads}")
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
    )


def time_limit(config: Fields) -> tuple[float, float]:
    """Reads `time_step_limit`; transformers 5 writes infinity as an object."""
    value = config.raw("time_step_limit")
    numbers = [math.inf if x == {"__float__": "Infinity"} else x for x in value] if isinstance(value, list) else []
    if [type(x) in (int, float) for x in numbers] != [True, True] or not 0 <= numbers[0] < numbers[1]:
        raise config.error("time_step_limit", "it must be a list of two numbers, the least and the largest step")
    return float(numbers[0]), float(numbers[1])


FAMILY = replace(
    granite_moe.SHARED,
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    fields=_fields,
    defaults=granite_moe.SHARED.defaults
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
