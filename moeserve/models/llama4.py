"""The text model of Llama-4 (Scout, Maverick): attention within chunks; every fourth layer has full
attention without rotary embedding. Each token has one routed expert, whose input is weighted, and a
shared expert.

Source: github.com/meta-llama/llama-models, models/llama4.
"""

from dataclasses import replace

from moeserve.blocks.feed_forward import SharedExpert
from moeserve.blocks.mixer import QueryScale
from moeserve.blocks.weights import ExpertNames, Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields) -> family.SpecFields:
    count = family.num_layers(config)
    interval = config.integer("no_rope_layer_interval", 1, family.MAX_LAYERS)
    is_rotated = config.integers("no_rope_layers", 0, 1) or tuple(
        int((i + 1) % interval != 0) for i in range(count)
    )
    if len(is_rotated) != count:
        raise config.error("no_rope_layers", f"it must list 0 or 1 for each of {count} layers")
    kinds = family.layer_types(
        config,
        known=("full_attention", "chunked_attention"),
        default=["chunked_attention" if rotated else "full_attention" for rotated in is_rotated],
    )
    with_rope = family.attention(
        config, rope={"interleaved": True}, **family.attention_bias(config)
    )
    without_rope = replace(with_rope, rope=None)
    if config.boolean("use_qk_norm"):
        with_rope = replace(with_rope, qk_norm="unit", norm_last=True)
    if config.raw("attn_temperature_tuning"):  # a number instead of a boolean in some releases
        beta = config.number("attn_scale", 0, 100.0)
        length = config.integer("floor_scale", 1, family.MAX_POSITION)
        without_rope = replace(
            without_rope, query_scale=QueryScale(slope=beta, every=length, first=1)
        )
    chunk_rule = KVRule(
        chunk=config.optional_integer("attention_chunk_size", 1, family.MAX_POSITION)
    )
    mixers = [
        replace(
            with_rope if rotated else without_rope,
            rule=chunk_rule if kind == "chunked_attention" else KVRule(),
        )
        for rotated, kind in zip(is_rotated, kinds, strict=True)
    ]
    shared = SharedExpert(
        size=config.integer("intermediate_size", 1, family.MAX_WIDTH),
        name="feed_forward.shared_expert",
    )
    router = RouterRule(score="sigmoid", on_input=True)
    experts = family.moe(config, size_key="intermediate_size", router=router, shared=shared)
    mlp = replace(family.dense(config, key="intermediate_size_mlp"), name="feed_forward")
    step = config.integer("interleave_moe_layer_step", 1, family.MAX_LAYERS)
    is_listed = config.raw("moe_layers") is not None
    expert_layers = (
        config.integers("moe_layers", 0, count - 1) if is_listed else range(step - 1, count, step)
    )
    return {
        "layers": family.layers(
            config, mixers, [experts if i in expert_layers else mlp for i in range(count)]
        )
    }


FAMILY = family.Family(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=202048,
        hidden=5120,
        intermediate=8192,
        layers=48,
        heads=40,
        kv_heads=8,
        positions=131072,
        experts=16,
        top_k=1,
    )
    | {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "eos_token_id": 2,
        "floor_scale": 8192,
        "head_dim": 128,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 16384,
        "moe_layers": None,
        "no_rope_layer_interval": 4,
        "no_rope_layers": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "use_qk_norm": True,
    },
    names=Names(
        experts=(
            ExpertNames(
                gate_up="feed_forward.experts.gate_up_proj",
                down="feed_forward.experts.down_proj",
                transposed=True,
            ),
        ),
        spelled={"mlp.gate.weight": ("feed_forward.router.weight",)},
    ),
)
MULTIMODAL = FAMILY.inside(
    architecture="Llama4ForConditionalGeneration",
    model_type="llama4",
    model="language_model.model.",
    head="language_model.lm_head.weight",
    foreign=("vision_model.", "multi_modal_projector."),
)
