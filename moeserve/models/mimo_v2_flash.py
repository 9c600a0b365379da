"""MiMo-V2-Flash: the first layer and every sixth have full attention; the others have a sliding
window, attention sinks and twice as many KV heads. Values are scaled, and narrower than keys.
Experts are those of DeepSeek-V3.

Source: arXiv 2601.02780.
"""

from dataclasses import replace
from typing import Any

from moeserve.blocks.weights import MTPNames, Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.spec import LayerSpec

_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
    "sliding_attention": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.334,
    },
}


def _spec_fields(config: Fields) -> family.SpecFields:
    config = replace(config, values=_as_transformers(config))
    full = family.attention(
        config,
        layer_type="full_attention",
        rope={"partial": True},
        qkv_bias=config.boolean("attention_bias"),
        v_dim=config.integer("v_head_dim", 2, 4096),
        value_scale=config.optional_number("attention_value_scale", 0, 100.0) or 1.0,
    )
    sliding_rope = family.attention(
        config, layer_type="sliding_attention", rope={"partial": True}
    ).rope
    sliding = replace(
        full,
        rope=sliding_rope,
        rule=KVRule(window=config.integer("sliding_window", 1, family.MAX_POSITION)),
        num_kv_heads=2 * full.num_kv_heads,
        sinks=True,
    )
    count = family.num_layers(config)
    default = [
        "full_attention" if i == 0 or (i + 1) % 6 == 0 else "sliding_attention"
        for i in range(count)
    ]
    mixers = [
        sliding if kind == "sliding_attention" else full
        for kind in family.layer_types(config, default=default)
    ]
    experts = family.moe(config, router=family.deepseek_router(config))
    mlp = family.dense(config)
    return {
        "layers": family.layers(
            config, mixers, family.listed_moe(config, experts, mlp, num_first_dense=1)
        ),
        "mtp": LayerSpec(mixer=sliding, feed_forward=mlp),
    }


def _as_transformers(config: Fields) -> dict[str, Any]:
    """Return the values of the hub's config.json with the keys of transformers.

    Raises CheckpointError for values that are not supported.
    """
    values = dict(config.values)
    for key, hub_key, kinds in (
        ("layer_types", "hybrid_layer_pattern", ("full_attention", "sliding_attention")),
        ("mlp_layer_types", "moe_layer_freq", ("dense", "sparse")),
    ):
        if values.get(hub_key) is not None and key not in values:
            pattern = config.integers(hub_key, 0, 1)
            count = family.num_layers(config)
            if len(pattern) != count:
                raise config.error(hub_key, f"it must list 0 or 1 for each of {count} layers")
            values[key] = [kinds[number] for number in pattern]
    if "rope_parameters" not in values and "swa_rope_theta" in values:
        share = values.get("partial_rotary_factor", 0.334)
        full_theta = values.pop("rope_theta", _ROPE["full_attention"]["rope_theta"])
        sliding_theta = values.pop("swa_rope_theta")
        values["rope_parameters"] = {
            "full_attention": {"rope_theta": full_theta, "partial_rotary_factor": share},
            "sliding_attention": {"rope_theta": sliding_theta, "partial_rotary_factor": share},
        }
    # The hub's window counts earlier tokens only; KVRule.window includes the query's own token.
    if values.get("sliding_window_size") is not None:
        values["sliding_window"] = config.integer("sliding_window_size", 1, family.MAX_POSITION) + 1
    # Raise CheckpointError if config.json has other values for these keys.
    config.only(
        swa_num_attention_heads=config.integer("num_attention_heads", 1, family.MAX_HEADS),
        swa_num_key_value_heads=2 * config.integer("num_key_value_heads", 1, family.MAX_HEADS),
        swa_head_dim=config.raw("head_dim"),
        swa_v_head_dim=config.raw("v_head_dim"),
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
    )
    return values


FAMILY = family.Family(
    architecture="MiMoV2FlashForCausalLM",
    model_type="mimo_v2_flash",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=152576,
        hidden=4096,
        intermediate=16384,
        layers=48,
        heads=64,
        kv_heads=4,
        positions=131072,
        experts=256,
        top_k=8,
        expert_size=2048,
    )
    | {
        "attention_value_scale": 0.707,
        "head_dim": 192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _ROPE,
        "sliding_window": 129,  # 128 earlier tokens and the query's own
        "v_head_dim": 128,
    },
    names=Names(
        spelled={
            "self_attn.sinks": ("self_attn.attention_sink_bias",),
            "post_attention_layernorm.weight": (
                "post_attention_layernorm.weight",
                "pre_mlp_layernorm.weight",
            ),
        },
        foreign=("model.mtp.",),  # not read with the model, but with its MTP head
        mtp=MTPNames(
            layer="model.mtp.layers.0.", begin="model.mtp.layers.0.", norm="final_layernorm"
        ),
    ),
    aliases={"layernorm_epsilon": "rms_norm_eps"},
)
