"""Ling and Ring 2.0 (mini, flash, 1T): GLM-4.5's blocks under other names, with queries, keys and values in one tensor.

Source: arXiv 2510.22115.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.blocks.mixer import Mixer
from moeserve.blocks.weights import Names
from moeserve.loader.files import Fields
from moeserve.models import family

_QKV = ("attention.query_key_value.weight",)
_BIAS = ("attention.query_key_value.bias",)


def _fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(
        config,
        rule=family.no_window(config),
        rope={"partial": True},
        qkv_bias=config.boolean("use_qkv_bias"),
        out_bias=config.boolean("use_bias"),
        qk_norm="head",
    )
    return with_experts(config, mixer)


def with_experts(config: Fields, mixers: Mixer | Sequence[Mixer]) -> family.SpecFields:
    """Reads what all of Ling's layers have beside attention, and how many layers are not loaded."""
    config.only(score_function="sigmoid", use_qk_norm=True, moe_router_enable_expert_bias=True)
    config.only(moe_shared_expert_intermediate_size=config.raw("moe_intermediate_size"))
    shared = family.shared_experts(config, "num_shared_experts")
    experts = family.moe(config, router=family.deepseek_router(config), shared=shared)
    blocks = family.first_dense(config, experts, family.dense(config))
    return {"layers": family.layers(config, mixers, blocks), "num_mtp_layers": family.mtp_layers(config)}


FAMILY = family.Family(
    "BailingMoeV2ForCausalLM",
    ("bailing_moe", "bailing_moe_v2"),
    _fields,
    family.sizes(157184, 2048, 5120, 20, 16, 4, 32768, experts=256, top_k=8, expert_size=512)
    | {
        "eos_token_id": 156892,
        "head_dim": 128,
        "n_group": 8,
        "rope_theta": 600_000.0,
        "topk_group": 4,
        "use_bias": False,
        "use_qkv_bias": False,
    },
    Names(
        embed="word_embeddings.weight",
        spelled={
            **{f"self_attn.{x}_proj.weight": _QKV for x in "qkv"},
            **{f"self_attn.{x}_proj.bias": _BIAS for x in "qkv"},
            "self_attn.o_proj.weight": ("attention.dense.weight",),
            "self_attn.o_proj.bias": ("attention.dense.bias",),
            "self_attn.q_norm.weight": ("attention.query_layernorm.weight",),
            "self_attn.k_norm.weight": ("attention.key_layernorm.weight",),
            "mlp.gate.e_score_correction_bias": ("mlp.gate.expert_bias",),
        },
    ),
)
