"""ERNIE-4.5 (21B-A3B, 300B-A47B): interleaved rotary embedding, shared experts, and a softmax
router that adds a bias per expert for the choice.

ERNIE-4.5-VL (28B-A3B, 424B-A47B) has a second router and second experts for the tokens of pictures.
Only its text model is supported, for which the three axes of its rotary embedding are the same.

Source: ERNIE 4.5 Technical Report (Baidu, 2025).
"""

from dataclasses import replace
from typing import Any

from moeserve.blocks.feed_forward import Dense, MoE
from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields) -> family.SpecFields:
    bias = config.boolean("use_bias")
    mixer = family.attention(
        config,
        rule=family.no_window(config),
        rope={"interleaved": True},
        qkv_bias=bias,
        out_bias=bias,
    )
    router = RouterRule(
        bias=True, renormalize=True, floor=config.number("moe_norm_min", 0, 1.0), fp32=True
    )
    shared = family.shared_experts(config, key="moe_num_shared_experts", bias=bias)
    experts = family.moe(config, router=router, shared=shared)
    blocks = _blocks(config, experts, family.dense(config, bias=bias))
    return {"layers": family.layers(config, mixer, blocks), "head_bias": bias}


def _blocks(config: Fields, experts: MoE, mlp: Dense) -> list[Dense | MoE]:
    """Return the block of each layer."""
    if config.raw("mlp_layer_types") is not None:
        return family.listed_moe(config, experts, mlp)
    count = family.num_layers(config)
    first = config.integer("moe_layer_start_index", 0, count)
    last = config.integer("moe_layer_end_index", -1, family.MAX_LAYERS)
    sparse = range(first, count if last == -1 else last + 1)
    every = config.integer("moe_layer_interval", 1, family.MAX_LAYERS)
    return [experts if i in sparse and (i + 1) % every == 0 else mlp for i in range(count)]


def _vision(config: Fields) -> family.SpecFields:
    text, vision = _parts(config)
    fields = _spec_fields(text)
    pictures = _spec_fields(vision)
    if [isinstance(layer.feed_forward, MoE) for layer in fields["layers"]] != [
        isinstance(layer.feed_forward, MoE) for layer in pictures["layers"]
    ]:
        raise config.error(
            "moe_layer_end_index", "layers with experts for text alone are not supported"
        )
    layers = tuple(
        replace(layer, feed_forward=replace(block, num_unused=block.num_experts))
        if isinstance(block := layer.feed_forward, MoE)
        else layer
        for layer in fields["layers"]
    )
    return {"layers": layers}


def _parts(config: Fields) -> list[Fields]:
    """Return the configurations for text and for pictures: keys may list a value for each."""
    values: list[dict[str, Any]] = [dict(config.values), dict(config.values)]
    for key in ("moe_intermediate_size", "moe_layer_end_index", "moe_layer_start_index",
                "moe_num_experts", "num_experts"):  # fmt: skip
        both = config.values.get(key, config.defaults.get(key))
        if not isinstance(both, list):
            continue
        if len(both) != 2 or (key.endswith("experts") and both[0] != both[1]):
            raise config.error(
                key, "it must list a number for text and one for pictures, experts as many of both"
            )
        for part, value in zip(values, both, strict=True):
            part[key] = value
    return [replace(config, values=part) for part in values]


FAMILY = family.Family(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=103424,
        hidden=2560,
        intermediate=12288,
        layers=28,
        heads=20,
        kv_heads=4,
        positions=131072,
        experts=64,
        top_k=6,
        expert_size=1536,
    )
    | {
        "eos_token_id": 2,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_norm_min": 1e-12,
        "moe_num_shared_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    names=Names(
        spelled={"mlp.gate.e_score_correction_bias": ("mlp.moe_statics.e_score_correction_bias",)},
        foreign=("model.mtp_",),
        boxed=("mlp.moe_statics.e_score_correction_bias",),
    ),
    aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
)
VISION = replace(
    FAMILY.inside(
        architecture="Ernie4_5_VLMoeForConditionalGeneration",
        model_type=("ernie4_5_vl_moe", "ernie4_5_moe_vl"),
        ignored=("rotary_emb.inv_freq", "mlp.gate.weight_1"),
        foreign=("model.mtp_", "model.resampler_model.", "model.vision_model.", "vision_model."),
        boxed_rows=2,
        transposed=("mlp.gate.weight",),
    ),
    fields=_vision,
    text_optional=True,
    defaults=FAMILY.defaults | {"eos_token_id": None, "moe_intermediate_size": [1536, 512]},
)
