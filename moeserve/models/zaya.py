"""ZAYA1 (8B): compressed convolutional attention, and routers that are MLPs, which read the state
of the layer before. A router may choose no expert.

Source: arXiv 2511.17127, huggingface.co/Zyphra/ZAYA1-8B.
"""

from dataclasses import replace
from typing import Any

from moeserve.blocks.convolved_attention import ConvolvedAttention, ConvolvedHeads
from moeserve.blocks.feed_forward import MoE
from moeserve.blocks.scaled_residual import HeldOutput, ScaledResidual
from moeserve.blocks.weights import FUSED, PER_EXPERT, Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.rope_config import read_rope
from moeserve.models.spec import LayerSpec
from moeserve.ops.rules import RouterRule

# Type of layers -> the type of their rotary embedding, as `read_rope` knows it
_ROPES = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(attention_bias=False, cca_time1=2, num_experts_per_tok=1)
    default = ["hybrid"] * family.num_layers(config)
    router_size = config.integer("router_hidden_size", 1, family.MAX_WIDTH)
    experts = family.moe(config, router=RouterRule(bias=True), router_size=router_size, num_empty=1)
    kinds = family.layer_types(config, known=tuple(_ROPES), default=default)
    layers = [
        layer
        for i, kind in enumerate(kinds)
        for layer in (_heads(config, i), _attention_and_experts(config, i, kind, experts))
    ]
    # After the last layer, the norm is that of the model.
    return {
        "layers": tuple(layers),
        "collapse": HeldOutput(norm="norm.weight"),
        "has_final_norm": False,
        "head_bias": config.boolean("lm_head_bias"),
    }


def _with_usual_types(config: Fields) -> Fields:
    """Return the config with rotary embeddings by the usual types of layers."""
    ropes = config.section("rope_parameters")
    usual = {_ROPES[kind]: ropes[kind] for kind in _ROPES if kind in ropes}
    return replace(config, values={**config.values, "rope_parameters": usual})


def _head_sizes(config: Fields) -> dict[str, Any]:
    """Return the fields of both mixers."""
    heads = config.integer("num_attention_heads", 1, family.MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", 1, heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
    dim = config.integer("head_dim", 2, family.MAX_HEADS)
    if dim % 2:
        raise config.error("head_dim", "it must be even")
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}


def _heads(config: Fields, layer: int) -> LayerSpec:
    """Return the block that makes a layer's queries, keys and values."""
    return LayerSpec(
        mixer=ConvolvedHeads(
            conv=config.integer("cca_time0", 2, family.MAX_CONV), **_head_sizes(config)
        ),
        feed_forward=None,
        pre_norm=False,
        attn_connection=HeldOutput(
            norm="input_layernorm.weight", embeddings="" if layer else "input_hidden_states"
        ),
        stored_as=(layer, layer),
    )


def _attention_and_experts(config: Fields, layer: int, kind: str, experts: MoE) -> LayerSpec:
    """Return a layer's attention and its experts. kind: the layer's type."""
    sizes = _head_sizes(config)
    rule = KVRule()
    if kind == "hybrid_sliding":
        rule = KVRule(window=config.integer("sliding_window", 1, family.MAX_POSITION))
    rope = read_rope(_with_usual_types(config), sizes["head_dim"], _ROPES[kind], partial=True)
    return LayerSpec(
        mixer=ConvolvedAttention(rope=rope, rule=rule, **sizes),
        feed_forward=experts,
        pre_norm=False,
        attn_connection=ScaledResidual(module="post_attention_residual_scale"),
        mlp_connection=ScaledResidual(
            module="post_mlp_residual_scale",
            norm="post_attention_layernorm.weight",
            router=experts.router_size,
            is_first_router=layer == 0,
        ),
        stored_as=(layer, layer),
    )


FAMILY = family.Family(
    architecture="ZayaForCausalLM",
    model_type="zaya",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=262272,
        hidden=2048,
        intermediate=2048,
        layers=40,
        heads=8,
        kv_heads=2,
        positions=131072,
        experts=16,
        top_k=1,
        expert_size=2048,
    )
    | {
        "cca_time0": 2,
        "eos_token_id": 106,
        "head_dim": 128,
        "lm_head_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "hybrid": {"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
            "hybrid_sliding": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
        "router_hidden_size": 256,
        "tie_word_embeddings": True,
    },
    names=Names(
        experts=(PER_EXPERT, FUSED),
        spelled={
            "mlp.gate.weight": ("mlp.gate.router_mlp.out_proj.weight",),
            "mlp.gate.e_score_correction_bias": ("mlp.gate.balancing_biases",),
        },
    ),
)
