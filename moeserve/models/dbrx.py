"""DBRX: layer norms, clipped queries, keys and values, and one tensor per product of all experts.

Source: huggingface.co/databricks/dbrx-instruct.
"""

from dataclasses import replace

from moeserve.blocks.weights import ExpertNames, Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.rope_config import read_rope
from moeserve.models.spec import NormSpec
from moeserve.ops.rules import RouterRule

_QKV = ("norm_attn_norm.attn.Wqkv.weight",)


def _spec_fields(config: Fields) -> family.SpecFields:
    attn = Fields(config.path, config.section("attn_config"), _ATTN_DEFAULTS, "attn_config.")
    ffn = Fields(config.path, config.section("ffn_config"), _FFN_DEFAULTS, "ffn_config.")
    _check_activation(ffn)
    values = {
        "num_key_value_heads": attn.integer("kv_n_heads", 1, family.MAX_HEADS),
        "num_experts": ffn.integer("moe_num_experts", 1, family.MAX_EXPERTS),
        "num_experts_per_tok": ffn.integer("moe_top_k", 1, family.MAX_EXPERTS),
        "moe_intermediate_size": ffn.integer("ffn_hidden_size", 1, family.MAX_WIDTH),
    }
    config = _with_theta(replace(config, values={**config.values, **values}), attn)
    mixer = family.attention(
        config,
        rule=family.no_window(config),
        clip=attn.optional_number("clip_qkv", 0, family.MAX_MULTIPLIER),
    )
    experts = family.moe(config, router=RouterRule(renormalize=_renormalizes(ffn)))
    return {
        "layers": family.layers(config, mixer, experts),
        "norm": NormSpec(centred=True),
        "norm_eps": 1e-5,
    }


def _with_theta(config: Fields, attn: Fields) -> Fields:
    """Return the config with the base of the rotary embedding, which the authors have in attn."""
    if attn.values.get("rope_theta") is None:
        return config
    theta = attn.number("rope_theta", 1.0, 1e12)
    config = replace(config, values={"rope_theta": theta, **config.values})
    if read_rope(config, head_dim=2).theta != theta:
        raise attn.error("rope_theta", "but rope_parameters has another one; remove one of the two")
    return config


def _check_activation(ffn: Fields) -> None:
    act = ffn.section("ffn_act_fn")
    if act not in ({}, {"name": "silu"}):
        raise ffn.error("ffn_act_fn", "only {'name': 'silu'} is supported")


def _renormalizes(ffn: Fields) -> bool:
    """Return whether routing weights are divided by their sum, their norm of order 1."""
    order = ffn.raw("moe_normalize_expert_weights")
    if order not in (None, 1):
        raise ffn.error("moe_normalize_expert_weights", "supported: 1 and null")
    return order is not None


_ATTN_DEFAULTS = {"clip_qkv": None, "kv_n_heads": 1}
_FFN_DEFAULTS = {
    "ffn_act_fn": None,
    "ffn_hidden_size": 3584,
    "moe_normalize_expert_weights": 1.0,
    "moe_num_experts": 4,
    "moe_top_k": 1,
}
FAMILY = family.Family(
    architecture="DbrxForCausalLM",
    model_type="dbrx",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=32000,
        hidden=2048,
        intermediate=3584,
        layers=24,
        heads=16,
        kv_heads=1,
        positions=2048,
    )
    | {"attn_config": None, "ffn_config": None},
    names=Names(
        model="transformer.",
        layers="blocks",
        embed="wte.weight",
        norm="norm_f.weight",
        spelled={
            "input_layernorm.weight": ("norm_attn_norm.norm_1.weight",),
            "post_attention_layernorm.weight": ("norm_attn_norm.norm_2.weight",),
            **{f"self_attn.{x}_proj.weight": _QKV for x in "qkv"},
            "self_attn.o_proj.weight": ("norm_attn_norm.attn.out_proj.weight",),
            "mlp.gate.weight": ("ffn.router.layer.weight",),
        },
        experts=(
            ExpertNames(
                gate="ffn.experts.mlp.w1",
                up="ffn.experts.mlp.v1",
                down="ffn.experts.mlp.w2",
                stacked=True,
            ),
        ),
    ),
    aliases={
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
    },
)
