"""The text model of Gemma 4 26B-A4B: five of six layers have a sliding window; the sixth has full
attention with wider heads, and its keys are also its values. Experts run beside a dense MLP. Inputs
and outputs of blocks are normed.

Source: huggingface.co/google/gemma-4-26B-A4B-it.
"""

from dataclasses import replace
from typing import Any

from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import Dense, MoE
from moeserve.blocks.weights import ExpertNames, Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import Activation, RouterRule

_GELU = Activation(kind="gelu_tanh")
_ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _spec_fields(config: Fields) -> family.SpecFields:
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if config.raw(key):
            raise config.error(key, "only 0 is supported")
    if config.raw("use_bidirectional_attention") == "all":
        raise config.error("use_bidirectional_attention", "only causal attention is supported")
    kinds = [
        *family.layer_types(config, default=family.alternating(config, every=6))[:-1],
        "full_attention",
    ]
    mixers = {kind: _attention(config, kind, kinds) for kind in dict.fromkeys(kinds)}
    mlp: Dense | MoE = replace(family.dense(config), activation=_GELU)
    if config.boolean("enable_moe_block"):
        mlp = family.moe(
            config,
            router=RouterRule(renormalize=True),
            activation=_GELU,
            expert_scale=True,
            beside=mlp,
        )
    width = config.integer("hidden_size", 1, family.MAX_WIDTH)
    return {
        "layers": family.layers(
            config,
            [mixers[kind] for kind in kinds],
            mlp,
            attn_post_norm=True,
            mlp_post_norm=True,
            scaled=True,
        ),
        "embedding_scale": width**0.5,
        "logits_cap": config.optional_number("final_logit_softcapping", 0, 1e6) or 0.0,
    }


def _own_values(config: Fields, layer: int) -> dict[str, Any]:
    """Return the values in which a layer differs. transformers pads its number with zeros: "05"."""
    for number, values in config.section("per_layer_config").items():
        if number.isdecimal() and int(number) == layer and isinstance(values, dict):
            return values
    return {}


def _attention(config: Fields, kind: str, kinds: list[str]) -> Attention:
    values: dict[str, Any] = dict(config.values)
    is_full = kind == "full_attention"
    is_value_key = is_full and config.boolean("attention_k_eq_v")
    if is_full:
        values["head_dim"] = config.raw("global_head_dim")
        if is_value_key and (heads := config.raw("num_global_key_value_heads")):
            values["num_key_value_heads"] = heads
        values |= _own_values(config, kinds.index(kind))
    return family.attention(
        replace(config, values=values),
        layer_type=kind,
        rope={"extra_kinds": ("proportional",)},
        rule=KVRule(
            window=None if is_full else config.integer("sliding_window", 1, family.MAX_POSITION)
        ),
        qk_norm="head",
        value_norm=True,
        shared_kv=is_value_key,
        scale=1.0,
        **family.attention_bias(config),
    )


FAMILY = family.Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=262144,
        hidden=2304,
        intermediate=9216,
        layers=30,
        heads=8,
        kv_heads=4,
        positions=131072,
    )
    | {
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "num_global_key_value_heads": None,
        "num_kv_shared_layers": 0,
        "per_layer_config": None,
        "rope_parameters": _ROPE,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    },
    names=Names(
        experts=(ExpertNames(gate_up="experts.gate_up_proj", down="experts.down_proj"),),
        spelled={
            "attn_post_norm.weight": ("post_attention_layernorm.weight",),
            "post_attention_layernorm.weight": ("pre_feedforward_layernorm.weight",),
            "mlp_post_norm.weight": ("post_feedforward_layernorm.weight",),
            "mlp.gate.weight": ("router.proj.weight",),
        },
    ),
    aliases={"top_k_experts": "num_experts_per_tok", "hidden_activation": "hidden_act"},
    hidden_act="gelu_pytorch_tanh",
)
MULTIMODAL = FAMILY.inside(
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    model="model.language_model.",
    foreign=(
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
)
