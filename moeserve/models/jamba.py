"""Jamba (v0.1, 1.5, 1.6, 1.7): Mamba, with attention without position encoding in one of eight
layers, and experts in every second layer.

Source: arXiv 2403.19887, 2408.12570.
"""

from dataclasses import replace

from moeserve.blocks.mamba1 import Mamba1
from moeserve.blocks.weights import ExpertNames, Names, per_expert
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule

_MAX_STATE = 1024


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(mamba_inner_layernorms=True)
    config.unsupported("sliding_window", "this architecture has no sliding window; set it to null")
    attention = replace(family.attention(config), rope=None)
    width = config.integer("hidden_size", 1, family.MAX_WIDTH)
    is_auto_rank = config.raw("mamba_dt_rank") == "auto"
    mamba = Mamba1(
        channels=width * config.integer("mamba_expand", 1, 64),
        state=config.integer("mamba_d_state", 1, _MAX_STATE),
        rank=-(-width // 16)
        if is_auto_rank
        else config.integer("mamba_dt_rank", 1, family.MAX_WIDTH),
        conv=config.integer("mamba_d_conv", 2, family.MAX_CONV),
        conv_bias=config.boolean("mamba_conv_bias"),
        bias=config.boolean("mamba_proj_bias"),
        decay_tensor=family.decay_tensor(config),
    )
    dense = family.dense(config)
    experts = family.moe(config, size_key="intermediate_size", router=RouterRule())
    mixers = [
        attention if has_attention else mamba for has_attention in _layers_of_kind(config, "attn")
    ]
    blocks = [
        experts if has_experts and experts.num_experts > 1 else dense
        for has_experts in _layers_of_kind(config, "expert")
    ]
    return {"layers": family.layers(config, mixers, blocks)}


def _layers_of_kind(config: Fields, kind: str) -> list[bool]:
    """Return whether each layer is of a kind: layer `offset` of each `period` layers.

    GGUF files list them (loader/gguf_architectures).
    """
    key = f"{kind}_layers"
    if (listed := config.values.get(key)) is not None:
        count = family.num_layers(config)
        if not isinstance(listed, list) or [type(each) for each in listed] != [bool] * count:
            raise config.error(key, f"it must be true or false for each of {count} layers")
        return listed
    period = config.integer(f"{kind}_layer_period", 1, family.MAX_LAYERS)
    offset = config.integer(f"{kind}_layer_offset", 0, period - 1)
    return [i % period == offset for i in range(family.num_layers(config))]


FAMILY = family.Family(
    architecture="JambaForCausalLM",
    model_type="jamba",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=65536,
        hidden=4096,
        intermediate=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        positions=262144,
        experts=16,
        top_k=2,
    )
    | {
        "attn_layer_offset": 4,
        "attn_layer_period": 8,
        "eos_token_id": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_dt_rank": "auto",
        "mamba_expand": 2,
        "mamba_proj_bias": False,
    },
    names=Names(
        norm="final_layernorm.weight",
        experts=(
            per_expert("feed_forward.experts"),
            ExpertNames(
                gate_up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj"
            ),
        ),
        spelled={
            "post_attention_layernorm.weight": ("pre_ff_layernorm.weight",),
            "mlp.gate.weight": ("feed_forward.router.weight",),
            **{
                f"mlp.{x}_proj.weight": (f"feed_forward.{x}_proj.weight",)
                for x in ("gate", "up", "down")
            },
        },
    ),
)
