"""Ling and Ring 2.5 and 2.6: Ling 2.0's experts; of a few layers the last has latent attention, the others lightning
attention. Ring-linear 2.0 has grouped-query attention in place of the latent one.

Source: Ring-linear (arXiv 2510.19338), huggingface.co/inclusionAI/Ling-2.6-flash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moeserve.blocks.lightning import Lightning
from moeserve.blocks.mixer import Mixer
from moeserve.loader.files import Fields
from moeserve.models import bailing_moe, family
from moeserve.models.rope_config import read_rope


def _fields(config: Fields, full: Callable[[Fields], Mixer]) -> family.SpecFields:
    config.only(use_bias=False, use_qkv_bias=False, linear_silu=False, use_linear_silu=False, linear_rope=True)
    config.only(router_dtype="fp32")
    count, group = family.num_layers(config), config.integer("layer_group_size", 1, family.MAX_LAYERS)
    last, softmax = count // group * group, full(config)
    mixers = [
        softmax if (i + 1) % group == 0 or i >= last else _lightning(config, 1 - (i - 1) / max(count - 1, 1) + 1e-5)
        for i in range(count)
    ]
    return bailing_moe.with_experts(config, mixers)


def _lightning(config: Fields, decay: float) -> Lightning:
    """Reads a layer of lightning attention. Its first layers count from -1, as the models were trained."""
    heads, dim = config.integer("num_attention_heads", 1, family.MAX_HEADS), config.integer("head_dim", 2, 4096)
    if config.values.get("num_kv_heads_for_linear_attn") not in (None, 0, heads):
        raise config.error("num_kv_heads_for_linear_attn", f"only {heads}, num_attention_heads, is supported")
    groups = config.integer("group_norm_size", 1, heads)
    if heads % groups:
        raise config.error("group_norm_size", f"it must divide num_attention_heads ({heads})")
    rope = read_rope(config, dim, partial=True)
    return Lightning(num_heads=heads, head_dim=dim, rope=rope, decay=decay, norm_groups=groups)


def _latent(config: Fields) -> Mixer:
    config.only(rope_interleave=True)
    return family.latent_attention(config)


def _grouped(config: Fields) -> Mixer:
    return family.attention(config, rope={"partial": True}, qk_norm="head")


_DEFAULTS = bailing_moe.FAMILY.defaults | {
    "group_norm_size": 4,
    "layer_group_size": 5,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 2.5,
}
_PARTS = ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
_LATENT = {f"self_attn.{name}.weight": (f"attention.{name}.weight",) for name in _PARTS}
_NAMES = replace(bailing_moe.FAMILY.names, ignored=("rotary_emb.inv_freq", "attention.slope"))
FAMILIES = (
    family.Family(
        "BailingMoeV2_5ForCausalLM",
        ("bailing_hybrid", "bailing_moe_linear"),
        lambda config: _fields(config, _latent),
        _DEFAULTS | family.LATENT | {"num_key_value_heads": 16, "q_lora_rank": None, "rope_theta": 6_000_000.0},
        replace(_NAMES, spelled={**_NAMES.spelled, **_LATENT}),
    ),
    family.Family(
        "BailingMoeLinearV2ForCausalLM",
        "bailing_moe_linear",
        lambda config: _fields(config, _grouped),
        _DEFAULTS,
        _NAMES,
    ),
)
