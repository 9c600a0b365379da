"""Ling and Ring 2.0 (mini, flash, 1T): GLM-4.5's blocks with other names of tensors, and queries,
keys and values in one tensor.

- Ling and Ring 2.5 and 2.6: the same experts. The last layer of each group of layers has latent
  attention, the others lightning attention.
- Ring-linear 2.0: the same as 2.5, with grouped-query attention instead of latent attention.

Source: arXiv 2510.22115, Ring-linear (arXiv 2510.19338), huggingface.co/inclusionAI/Ling-2.6-flash.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from moeserve.blocks.lightning import Lightning
from moeserve.blocks.mixer import Mixer
from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.rope_config import read_rope

_QKV = ("attention.query_key_value.weight",)
_BIAS = ("attention.query_key_value.bias",)


def _spec_fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(
        config,
        rule=family.no_window(config),
        rope={"partial": True},
        qkv_bias=config.boolean("use_qkv_bias"),
        out_bias=config.boolean("use_bias"),
        qk_norm="head",
    )
    return _with_experts(config, mixer)


def _with_experts(config: Fields, mixers: Mixer | Sequence[Mixer]) -> family.SpecFields:
    """Return the fields for layers with these mixers. Layers for multi-token prediction are not
    loaded.
    """
    config.only(score_function="sigmoid", use_qk_norm=True, moe_router_enable_expert_bias=True)
    config.only(moe_shared_expert_intermediate_size=config.raw("moe_intermediate_size"))
    shared = family.shared_experts(config, key="num_shared_experts")
    experts = family.moe(config, router=family.deepseek_router(config), shared=shared)
    blocks = family.first_dense(config, experts, family.dense(config))
    return {
        "layers": family.layers(config, mixers, blocks),
        "num_mtp_layers": family.mtp_layers(config),
    }


def _ling_2_5(config: Fields, full_attention: Callable[[Fields], Mixer]) -> family.SpecFields:
    config.only(
        use_bias=False,
        use_qkv_bias=False,
        linear_silu=False,
        use_linear_silu=False,
        linear_rope=True,
    )
    config.only(router_dtype="fp32")
    count = family.num_layers(config)
    group = config.integer("layer_group_size", 1, family.MAX_LAYERS)
    num_grouped = count // group * group  # layers in whole groups
    softmax = full_attention(config)
    # Decay rates are those of layers that are numbered from -1, as in training.
    mixers = [
        softmax
        if (i + 1) % group == 0 or i >= num_grouped
        else _lightning(config, 1 - (i - 1) / max(count - 1, 1) + 1e-5)
        for i in range(count)
    ]
    return _with_experts(config, mixers)


def _lightning(config: Fields, decay: float) -> Lightning:
    """Read lightning attention. decay: factor of the layer's decay rates."""
    heads = config.integer("num_attention_heads", 1, family.MAX_HEADS)
    dim = config.integer("head_dim", 2, 4096)
    if config.values.get("num_kv_heads_for_linear_attn") not in (None, 0, heads):
        raise config.error(
            "num_kv_heads_for_linear_attn", f"only {heads}, num_attention_heads, is supported"
        )
    groups = config.integer("group_norm_size", 1, heads)
    if heads % groups:
        raise config.error("group_norm_size", f"it must divide num_attention_heads ({heads})")
    rope = read_rope(config, dim, partial=True)
    return Lightning(num_heads=heads, head_dim=dim, rope=rope, decay=decay, norm_groups=groups)


def _latent_attention(config: Fields) -> Mixer:
    config.only(rope_interleave=True)
    return family.latent_attention(config)


def _grouped_query_attention(config: Fields) -> Mixer:
    return family.attention(config, rope={"partial": True}, qk_norm="head")


LING_2 = family.Family(
    architecture="BailingMoeV2ForCausalLM",
    model_type=("bailing_moe", "bailing_moe_v2"),
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=157184,
        hidden=2048,
        intermediate=5120,
        layers=20,
        heads=16,
        kv_heads=4,
        positions=32768,
        experts=256,
        top_k=8,
        expert_size=512,
    )
    | {
        "eos_token_id": 156892,
        "head_dim": 128,
        "n_group": 8,
        "rope_theta": 600_000.0,
        "topk_group": 4,
        "use_bias": False,
        "use_qkv_bias": False,
    },
    names=Names(
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
_LINEAR_DEFAULTS = LING_2.defaults | {
    "group_norm_size": 4,
    "layer_group_size": 5,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 2.5,
}
_LATENT_WEIGHTS = (
    "q_proj",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
)
_LATENT_NAMES = {
    f"self_attn.{name}.weight": (f"attention.{name}.weight",) for name in _LATENT_WEIGHTS
}
_LINEAR_NAMES = replace(LING_2.names, ignored=("rotary_emb.inv_freq", "attention.slope"))
LING_2_5 = family.Family(
    architecture="BailingMoeV2_5ForCausalLM",
    model_type=("bailing_hybrid", "bailing_moe_linear"),
    fields=lambda config: _ling_2_5(config, _latent_attention),
    defaults=_LINEAR_DEFAULTS
    | family.LATENT_DEFAULTS
    | {"num_key_value_heads": 16, "q_lora_rank": None, "rope_theta": 6_000_000.0},
    names=replace(_LINEAR_NAMES, spelled={**_LINEAR_NAMES.spelled, **_LATENT_NAMES}),
)
LING_LINEAR_2 = family.Family(
    architecture="BailingMoeLinearV2ForCausalLM",
    model_type="bailing_moe_linear",
    fields=lambda config: _ling_2_5(config, _grouped_query_attention),
    defaults=_LINEAR_DEFAULTS,
    names=_LINEAR_NAMES,
)
