"""GraniteMoE (granite-3.0-1b-a400m, 3b-a800m): softmax over the chosen experts only, all experts of
a layer in one tensor, and multipliers of embeddings, attention scores, block outputs and logits.

- GraniteMoeShared: with a shared expert (the attention-only form of the granite-4.0 tiny previews).
- Granite 4 (granite-4.0-h-tiny, h-small): most layers are Mamba-2, the others attention without
  position encoding. In models without experts, the shared expert is the whole feed-forward block.

Source: arXiv 2408.13359, huggingface.co/ibm-granite.
"""

import math
from dataclasses import replace

from moeserve.blocks.feed_forward import Dense, MoE, SharedExpert
from moeserve.blocks.mamba2 import Mamba2
from moeserve.blocks.weights import ExpertNames, Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule

KINDS = {  # name in releases or in transformers 5 -> name in transformers 5
    "mamba": "linear_attention",
    "linear_attention": "linear_attention",
    "attention": "full_attention",
    "full_attention": "full_attention",
}


def _spec_fields(config: Fields, shared: SharedExpert | None = None) -> family.SpecFields:
    scale = config.number("attention_multiplier", 0, family.MAX_MULTIPLIER)
    mixer = family.attention(
        config, rule=family.no_window(config), scale=scale, **family.attention_bias(config)
    )
    experts = family.moe(
        config,
        size_key="intermediate_size",
        router=RouterRule(score="softmax_selected"),
        shared=shared,
    )
    return {"layers": family.layers(config, mixer, experts), **_multipliers(config)}


def _granite_moe_shared(config: Fields) -> family.SpecFields:
    if config.raw("shared_intermediate_size") == 0:
        return _spec_fields(config)
    size = config.integer("shared_intermediate_size", 1, family.MAX_WIDTH)
    return _spec_fields(config, SharedExpert(size=size, name="shared_mlp"))


def _multipliers(config: Fields) -> family.SpecFields:
    return {
        "embedding_scale": config.number("embedding_multiplier", 0, family.MAX_MULTIPLIER),
        "residual_scale": config.number("residual_multiplier", 0, family.MAX_MULTIPLIER),
        "logits_divisor": config.number("logits_scaling", 0, family.MAX_MULTIPLIER),
    }


def _granite_4(config: Fields) -> family.SpecFields:
    scale = config.number("attention_multiplier", 0, family.MAX_MULTIPLIER)
    full = family.attention(config, scale=scale, **family.attention_bias(config))
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
    shared = SharedExpert(size=size, name="shared_mlp")
    return family.moe(
        config,
        size_key="intermediate_size",
        router=RouterRule(score="softmax_selected"),
        shared=shared,
    )


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
    fields=_spec_fields,
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
