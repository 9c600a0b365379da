"""Hunyuan-A13B: queries and keys are normed after the rotary embedding, whose base is scaled by a
fixed alpha.

Source: Hunyuan-A13B Technical Report (Tencent, 2025).
"""

from dataclasses import replace
from typing import Any

from moeserve.blocks.feed_forward import SharedExpert
from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(use_cla=False, use_qk_norm=True)
    mixer = family.attention(
        config,
        rule=family.no_window(config),
        rope={"extra_kinds": ("dynamic",)},
        qk_norm="head",
        norm_last=True,
        **family.attention_bias(config),
    )
    size = config.integer("intermediate_size", 1, family.MAX_WIDTH)
    for key, value in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if _same(config, key) not in (None, value):
            raise config.error(key, f"only {value} is supported")
    counts = {
        key: _same(config, key)
        for key in ("num_experts", "num_experts_per_tok")
        if key in config.values
    }
    router = RouterRule(renormalize=True, fp32=True)
    shared = SharedExpert(size=size, name="mlp.shared_mlp")
    config = replace(config, values={**config.values, **counts})
    experts = family.moe(config, size_key="intermediate_size", router=router, shared=shared)
    return {"layers": family.layers(config, mixer, experts)}


def _same(config: Fields, key: str) -> Any:
    """Return a value that releases list once per layer. Raises CheckpointError if layers differ."""
    value = config.values.get(key)
    if not isinstance(value, list):
        return value
    if not value or any(other != value[0] for other in value):
        raise config.error(key, "layers that differ are not supported")
    return value[0]


FAMILY = family.Family(
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=290943,
        hidden=4096,
        intermediate=11008,
        layers=32,
        heads=32,
        kv_heads=None,
        positions=2048,
    )
    | {"eos_token_id": 2, "num_experts": 1, "num_experts_per_tok": 1, "rms_norm_eps": 1e-5},
    names=Names(
        spelled={
            "mlp.gate.weight": ("mlp.gate.wg.weight",),
            "self_attn.q_norm.weight": ("self_attn.query_layernorm.weight",),
            "self_attn.k_norm.weight": ("self_attn.key_layernorm.weight",),
        }
    ),
    aliases={"moe_topk": "num_experts_per_tok"},
)
